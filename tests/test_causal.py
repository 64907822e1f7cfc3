"""Does it matter? What a substitution must and must not change, and that it leaves no trace."""

import numpy as np
import pytest
import torch
import zoo
from typeguard import TypeCheckError

import tl_valuealign as va
from tl_valuealign.plots.effect import plot_effect
from tl_valuealign.substitution import Substitution

pytestmark = pytest.mark.bridge

IDS = zoo.ids(9, 12)


def substitute(model, **options):
    return va.substitute_input(model, IDS, progress=False, **options)


def losses(logits, ids):
    scores = torch.log_softmax(logits[:, :-1].double(), -1)
    return -scores.gather(2, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "nanochat", "mpt", "gpt_oss", "bloom"])
@pytest.mark.parametrize("roles", [("V",), ("Q",), ("K",), ("Q", "K", "V")])
def test_a_stream_in_place_of_itself_changes_nothing(name, roles):
    result = substitute(zoo.bridge(name), source="full", by="set", roles=roles)
    assert result.units == ("set",)
    assert abs(float(result.delta)) < 1e-6
    assert result.self_error < 1e-4


@pytest.mark.parametrize("name", ["llama", "nanochat", "gemma2", "olmo2"])
@pytest.mark.parametrize("roles", [("V",), ("K",)])
def test_the_embedding_is_all_there_is_at_block_0_of_a_rotary_model(name, roles):
    result = substitute(zoo.bridge(name), roles=roles)
    assert abs(float(result.delta[0])) < 1e-6
    assert float(result.delta[1:].abs().min()) > 1e-5


def test_against_a_model_whose_value_weights_see_the_embedding_by_hand():
    """One block's values recomputed with plain torch and put in by a plain module hook."""
    hf = zoo.build("llama")
    with torch.no_grad():
        plain = losses(hf(IDS).logits, IDS)
        embed = hf.model.embed_tokens(IDS)
        block = hf.model.layers[1]
        values = block.self_attn.v_proj(block.input_layernorm(embed))
        handle = block.self_attn.v_proj.register_forward_hook(lambda *_: values)
        changed = losses(hf(IDS).logits, IDS)
        handle.remove()
    result = substitute(zoo.bridge("llama"), layers=(1,))
    per_sequence = (changed - plain).mean(1).numpy()
    assert float(result.delta) == pytest.approx(per_sequence.mean(), abs=1e-6)
    assert result.base_loss == pytest.approx(float(plain.mean()), abs=1e-5)
    spread = per_sequence.std(ddof=0) * (10 / 8) ** 0.5 / 3
    assert float(result.stderr) == pytest.approx(spread, rel=1e-3)


def test_heads_add_up_only_through_the_model_and_match_their_set():
    model = zoo.bridge("llama")
    by_head = substitute(model, by="head", layers=(1,))
    assert by_head.units == ("L1H0", "L1H1")
    both, layer = substitute(model, by="set", layers=(1,)), substitute(model, layers=(1,))
    assert float(both.delta) == pytest.approx(float(layer.delta), abs=1e-9)
    one = substitute(model, layers=(1,), heads=(1,))
    assert float(one.delta) == pytest.approx(float(by_head.delta[1]), abs=1e-9)
    assert abs(float(by_head.delta[0] - by_head.delta[1])) > 1e-5
    frame = by_head.to_dataframe()
    assert list(frame["head"]) == [0, 1] and list(frame["layer"]) == [1, 1]
    assert list(layer.to_dataframe()["head"].isna()) == [True]


def test_the_mean_and_random_controls_are_what_they_say():
    model = zoo.bridge("llama")
    with torch.no_grad():
        hf = zoo.build("llama")
        streams = {}
        for layer in (1, 2):
            norm = hf.model.layers[layer].input_layernorm
            norm.register_forward_hook(lambda m, i, o, layer=layer: streams.update({layer: o}))
        hf(IDS)
        attn = hf.model.layers[2].self_attn
        mean = streams[2].flatten(0, 1).mean(0)
        values = attn.v_proj(mean).expand(*IDS.shape, -1)
        plain = losses(hf(IDS).logits, IDS)
        attn.v_proj.register_forward_hook(lambda *_: values)
        changed = losses(hf(IDS).logits, IDS)
    result = substitute(model, source="mean", layers=(2,))
    assert float(result.delta) == pytest.approx(float((changed - plain).mean()), abs=1e-6)
    first, again, other = (
        substitute(model, source="random", by="set", seed=seed, batch_size=size)
        for seed, size in ((0, 8), (0, 3), (1, 8))
    )
    assert float(first.delta) == pytest.approx(float(again.delta), abs=1e-6)
    assert abs(float(first.delta - other.delta)) > 1e-5


def test_random_directions_have_the_length_of_the_stream(monkeypatch):
    seen = []
    original = Substitution._random

    def spy(self, normed, batch, layer):
        drawn = original(self, normed, batch, layer)
        seen.append((normed, drawn))
        return drawn

    monkeypatch.setattr(Substitution, "_random", spy)
    substitute(zoo.bridge("gpt2"), source="random", by="set")
    for normed, drawn in seen:
        torch.testing.assert_close(normed.norm(dim=-1), drawn.norm(dim=-1))
        assert float(drawn.mean(-1).abs().max()) < 1e-6  # LayerNorm: random within what is read
        cosine = torch.nn.functional.cosine_similarity(normed, drawn, dim=-1)
        assert float(cosine.mean().abs()) < 0.15


def test_weights_hooks_and_mode_are_as_before_and_hooks_of_the_user_still_fire():
    model = zoo.bridge("llama")
    fired = []
    model.add_hook("blocks.1.attn.hook_v", lambda value, hook: fired.append(1))
    weights = {name: p.clone() for name, p in model.named_parameters()}
    hooks = sum(len(point.fwd_hooks) for point in model.hook_dict.values())
    model.train()
    with torch.no_grad():
        before = model.eval()(IDS)
    model.train()
    substitute(model, by="head")
    assert model.training and fired
    assert sum(len(point.fwd_hooks) for point in model.hook_dict.values()) == hooks
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS), before)


def test_hooks_are_gone_after_an_error(monkeypatch):
    model = zoo.bridge("llama")

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("tl_valuealign.parts.HeadReader.vectors", fail)
    hooks = sum(len(point._forward_hooks) for point in model.hook_dict.values())
    with pytest.raises(KeyboardInterrupt):
        substitute(model)
    assert sum(len(point._forward_hooks) for point in model.hook_dict.values()) == hooks


def test_an_edit_that_does_not_reach_the_model_is_caught(monkeypatch):
    """Hooks that fire but change nothing must not come back as "no effect"."""
    monkeypatch.setattr(
        "tl_valuealign.substitution._replace", lambda *args: lambda activation: activation.clone()
    )
    with pytest.raises(va.SelfCheckError, match="do not reach"):
        substitute(zoo.bridge("llama"))


def test_a_user_hook_that_edits_heads_is_caught():
    model = zoo.bridge("llama")
    model.add_hook("blocks.1.attn.hook_v", lambda value, hook: 2 * value)
    with pytest.raises(va.SelfCheckError):
        substitute(model)


def test_skip_first_leaves_position_0_alone():
    model = zoo.bridge("llama")
    short = torch.cat([IDS[:, :2]])
    kept = va.substitute_input(model, short, progress=False)
    assert kept.n_tokens == 9
    with pytest.raises(va.InputError, match="skip_first"):
        va.substitute_input(model, short, skip_first=True, progress=False)
    three = va.substitute_input(model, IDS[:, :3], skip_first=True, progress=False)
    assert three.n_tokens == 9


def test_batches_and_padding_do_not_matter():
    model = zoo.bridge("gpt2")
    ragged = [row[: 5 + n].tolist() for n, row in enumerate(IDS[:7])] + IDS[7:].tolist()
    one, many = (va.substitute_input(model, ragged, batch_size=n, progress=False) for n in (1, 8))
    torch.testing.assert_close(one.delta, many.delta, rtol=0, atol=1e-6)
    assert one.n_tokens == sum(len(row) - 1 for row in ragged)


def test_few_sequences_withhold_intervals():
    result = va.substitute_input(zoo.bridge("llama"), IDS[:7], progress=False)
    assert result.stderr.isnan().all() and result.half_width.isnan().all()
    assert not result.delta.isnan().any()
    assert not substitute(zoo.bridge("llama")).stderr.isnan().any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "2_attn_out"}, "not upstream of block 0|unknown"),
        ({"source": "1_attn_out"}, "not upstream of block 0"),
        ({"source": "nothing"}, "unknown"),
        ({"by": "token"}, "by: 'token'"),
        ({"heads": (2,)}, "heads are 0 to 1"),
        ({"roles": ("Q", "V"), "by": "head"}, "do not share"),
        ({"roles": ("OV",)}, "OV"),
        ({"layers": (9,)}, "blocks are 0 to 2"),
        ({"seed": 1.5}, "seed: expected a whole number"),
        ({"seed": None}, "seed: expected a whole number"),
    ],
)
def test_what_cannot_be_substituted_is_refused(options, words):
    with pytest.raises(va.InputError, match=words):
        substitute(zoo.bridge("llama"), **options)


def test_random_directions_follow_the_seed_alone():
    """Whatever the kind of integer, and whatever the caller's default dtype."""
    model = zoo.bridge("llama")
    plain = substitute(model, source="random", seed=3).delta
    assert torch.equal(substitute(model, source="random", seed=np.int64(3)).delta, plain)
    torch.set_default_dtype(torch.float64)
    try:
        again = substitute(model, source="random", seed=3).delta
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(again, plain, rtol=0, atol=1e-6)


def test_another_source_is_normed_by_its_own_size():
    result = substitute(zoo.bridge("llama"), source="0_attn_out", layers=(1, 2))
    assert float(result.delta.abs().min()) > 1e-4


def test_the_figure_sets_effect_against_geometry():
    model = zoo.bridge("llama")
    effect = substitute(model, by="head")
    alignment = va.analyze_value_alignment(model, IDS, progress=False)
    shares = va.contribution_shares(model, IDS, progress=False)
    identity = va.token_identity(model, IDS, progress=False)
    for against, values in (
        (alignment, alignment.alignment("V", "embed")),
        (shares, shares.V[0]),
        (identity, identity.V),
    ):
        (points,) = plot_effect(effect, against).data
        np.testing.assert_allclose(points.x, values.flatten())
        np.testing.assert_allclose(points.y, effect.delta)
        np.testing.assert_allclose(points.error_y.array, effect.half_width)
        assert list(points.marker.color) == [0, 0, 1, 1, 2, 2]
    (points,) = plot_effect(substitute(model), alignment).data
    np.testing.assert_allclose(points.x, alignment.alignment("V", "embed").mean(1))
    with pytest.raises(va.InputError, match="by='layer'"):
        plot_effect(substitute(model, by="set"), alignment)
    other = va.analyze_value_alignment(zoo.bridge("llama", seed=5), IDS, progress=False)
    with pytest.raises(va.InputError, match="against: it is about other weights"):
        plot_effect(effect, other)
    with pytest.raises(va.InputError, match="layer 2"):
        plot_effect(effect, va.token_identity(model, IDS, layers=(0, 1), progress=False))
    with pytest.raises(TypeCheckError):
        plot_effect(effect, effect)

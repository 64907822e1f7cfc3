"""HookedTransformer of transformer-lens 2.18 and 3.9: every layout, flag and tokenizer rule."""

import oracle
import pytest
import tiny
import torch
import zoo
from agreement import assert_agrees

import tl_valuealign as va

pytestmark = pytest.mark.hooked

ROLES = ("Q", "K", "V", "OV")
FLAGS = ("use_split_qkv_input", "use_attn_result", "use_attn_in", "use_hook_mlp_in")


@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
@pytest.mark.parametrize("name", zoo.HOOKED)
def test_agrees_with_the_oracle(name, processed):
    model, ids = zoo.hooked(name, processed), zoo.ids()
    result = tiny.analyze(model, ids, roles=ROLES, components=("attn_out", "mlp_out"))
    truth = oracle.run(model, ids)
    assert set(result.sources) == set(truth.upstream[max(truth.layers)])
    assert_agrees(result, truth)
    for metric in ("energy", "pooled"):
        assert_agrees(result.with_metric(metric), truth)


@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_converted_weights_agree_with_the_oracle(name, processed):
    model, ids = zoo.hooked_from_hf(name, processed), zoo.ids()
    result = tiny.analyze(model, ids, roles=ROLES)
    assert_agrees(result, oracle.run(model, ids))
    assert ("LayerNorm" if name == "gpt2" else "RMSNorm") in result.provenance["input_norm"][0]


def test_key_and_value_heads_stay_native():
    result = tiny.analyze(zoo.hooked("grouped"), zoo.ids(), roles=ROLES)
    heads = {role: result.role(role).full.shape[-1] for role in ROLES}
    assert heads == {"Q": 4, "K": 2, "V": 2, "OV": 4}


RUNS = [(name, flag) for name in ("LN", "attn_only", "grouped_rotary") for flag in FLAGS]
RUNS.remove(("grouped_rotary", "use_attn_in"))  # HookedTransformer itself cannot run this


@pytest.mark.parametrize(("name", "flag"), RUNS)
def test_flags_of_the_user_change_nothing(name, flag):
    """They move hooks and axes about; the figures and the flag itself stay."""
    model, ids = zoo.hooked(name), zoo.ids()
    plain = tiny.analyze(model, ids, roles=ROLES)
    setattr(model.cfg, flag, True)
    tiny.assert_close(plain, tiny.analyze(model, ids, roles=ROLES), atol=1e-6)
    assert getattr(model.cfg, flag) is True


def test_ungrouped_heads_change_nothing():
    model, ids = zoo.hooked("grouped"), zoo.ids()
    plain = tiny.analyze(model, ids, roles=ROLES)
    model.set_ungroup_grouped_query_attention(True)
    _, cache = model.run_with_cache(ids)
    assert cache["blocks.0.attn.hook_v"].shape[2] == 4  # the flag does repeat the heads
    tiny.assert_close(plain, tiny.analyze(model, ids, roles=ROLES), atol=1e-6)


def test_shortformer_positions_are_no_source_and_still_checked():
    """They go into queries and keys without entering the stream."""
    model = zoo.hooked("shortformer")
    result = tiny.analyze(model, zoo.ids(), roles=ROLES)
    assert "pos_embed" not in result.sources
    assert max(float(error.max()) for error in result.checks.read_in.values()) < 1e-5
    model.hook_pos_embed.add_hook(lambda positions, hook: 1.5 * positions, is_permanent=True)
    tiny.analyze(model, zoo.ids())  # other positions in the model itself are no fault


@pytest.fixture
def left_padder():
    model = zoo.hooked("LN")
    model.tokenizer = tiny.tokenizer(padding_side="left")
    return model


def test_text_that_holds_the_padding_id_is_text(left_padder):
    """With a tokenizer that pads left, HookedTransformer masks every padding id by itself."""
    ids = zoo.ids()
    ids[0, 0] = ids[1, 3] = ids[2, :2] = tiny.PAD
    with torch.no_grad():
        masked = left_padder(ids)
    reference = oracle.run(zoo.hooked("LN"), ids)
    left_padder.tokenizer.padding_side = "right"
    with torch.no_grad():
        assert (left_padder(ids) - masked).abs().max() > 1e-3  # there was a signal to lose
    left_padder.tokenizer.padding_side = "left"
    assert_agrees(tiny.analyze(left_padder, ids), reference)
    assert left_padder.tokenizer.padding_side == "left"


def test_ragged_strings_under_left_padding(left_padder):
    rows = [zoo.ids()[0, :5], zoo.ids()[1], zoo.ids()[2, :8]]
    together = tiny.analyze(left_padder, [tiny.text(row) for row in rows])
    with_bos = [torch.cat([torch.tensor([tiny.BOS]), row]) for row in rows]
    left_padder.tokenizer = None
    tiny.assert_close(together, tiny.analyze(left_padder, with_bos), atol=1e-6)


def test_bos_follows_the_models_own_setting(left_padder):
    assert tiny.analyze(left_padder, "w5 w6 w7").provenance["n_bos_prepended"] == 1
    left_padder.cfg.default_prepend_bos = False
    facts = tiny.analyze(left_padder, "w5 w6 w7").provenance
    assert (facts["n_bos_prepended"], facts["bos_id"], facts["n_tokens"]) == (0, None, 3)


def test_refactored_matrices_are_noticed():
    """role OV is what it was, role V is not, and the provenance says why."""
    plain, ids = zoo.hooked("LNPre"), zoo.ids()
    refactored = zoo.hooked("LNPre")
    refactored.process_weights_(
        fold_ln=False,
        center_writing_weights=False,
        center_unembed=False,
        refactor_factored_attn_matrices=True,
    )
    before = tiny.analyze(plain, ids, roles=("V", "OV"))
    after = tiny.analyze(refactored, ids, roles=("V", "OV"))
    assert before.provenance["notes"] == []
    assert "refactor_factored_attn_matrices" in after.provenance["notes"][0]
    tiny.assert_close(before, after, roles=["OV"])
    assert (before.V.singular_values - after.V.singular_values).abs().max() > 0.1


def test_a_bidirectional_model_is_refused_by_name():
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    options = zoo._SIZES | {"normalization_type": "LN", "attention_dir": "bidirectional"}
    model = HookedTransformer(HookedTransformerConfig(**options))
    with pytest.raises(va.ModelError, match="both directions"):
        tiny.analyze(model, zoo.ids())


def test_a_model_that_looks_ahead_is_found_out():
    """Whatever its configuration says: padding on the right would change its figures."""
    model = zoo.hooked("LN")
    model.blocks[0].attn.apply_causal_mask = lambda scores, *others: scores
    with pytest.raises(va.SelfCheckError, match="not causal"):
        tiny.analyze(model, zoo.ids())
    # Without attention before the target block nothing looks ahead, and nothing is wrong.
    assert tiny.analyze(model, zoo.ids(), layers=[0]).layers == (0,)


@pytest.mark.parametrize(
    ("dtype", "close"),
    [(torch.float64, 1e-10), (torch.float16, 2**-9), (torch.bfloat16, 2**-6)],
    ids=str,
)
@pytest.mark.parametrize("name", ["LN", "grouped_rotary"])
def test_other_dtypes(name, dtype, close):
    """Against the oracle in float64 on the same stored weights."""
    model, ids = zoo.hooked(name).to(dtype), zoo.ids()
    result, truth = tiny.analyze(model, ids, roles=ROLES), oracle.run(model, ids)
    assert result.provenance["dtype"] == str(dtype).removeprefix("torch.")
    for role in ROLES:
        mine, theirs = result.role(role), getattr(truth, role)
        assert mine.n_directions.tolist() == theirs.k.tolist()
        assert mine.numerical_rank.tolist() == theirs.rank.tolist()
        assert abs(mine.full.numpy() - theirs.full["norm"]).max() < close


def test_a_model_of_one_block():
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    options = zoo._SIZES | {"normalization_type": "LN", "n_layers": 1}
    with zoo._seeded(0):
        model = zoo.randomise(HookedTransformer(HookedTransformerConfig(**options))).eval()
    result = tiny.analyze(model, zoo.ids(), roles=ROLES)
    assert result.sources == ("embed", "pos_embed")
    assert_agrees(result, oracle.run(model, zoo.ids()))


def test_swapped_keys_and_values_stop_the_run(monkeypatch):
    from tl_valuealign.adapter import ModelView

    good = ModelView.weight
    swap = {"Q": "Q", "K": "V", "V": "K"}
    monkeypatch.setattr(ModelView, "weight", lambda view, la, role: good(view, la, swap[role]))
    with pytest.raises(va.SelfCheckError, match=r"block 0, role [KV].*hook_[kv]"):
        tiny.analyze(zoo.hooked("grouped"), zoo.ids())


@pytest.mark.parametrize("fault", ["exception", "interrupt"])
def test_the_model_is_left_as_it_was(fault):
    """Also after an error or Ctrl-C in the middle: flags, hooks, configuration, weights."""
    model, ids, fired = zoo.hooked("LN").train(), zoo.ids(), []
    model.add_hook("blocks.0.hook_attn_out", lambda value, hook: fired.append(hook.name))
    model.add_hook("blocks.1.attn.hook_v", lambda v, hook: None, is_permanent=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    handles = [len(point.fwd_hooks) for point in model.hook_dict.values()]
    settings = dict(vars(model.cfg))
    error = {"exception": ZeroDivisionError, "interrupt": KeyboardInterrupt}[fault]

    def break_off(value, hook):
        raise error

    with model.hooks([("blocks.1.hook_resid_pre", break_off)]), pytest.raises(error):
        tiny.analyze(model, ids)
    tiny.analyze(model, ids)
    assert all(module.training for module in model.modules())
    assert [len(point.fwd_hooks) for point in model.hook_dict.values()] == handles
    assert dict(vars(model.cfg)) == settings
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert fired
    fired.clear()
    model(ids)
    assert fired == ["blocks.0.hook_attn_out"]

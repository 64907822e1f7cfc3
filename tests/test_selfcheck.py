"""Planted faults: each must stop the run with an error that names where and what.

A fault is planted in what the package is told (a hook's value, a stored matrix), and the same model
without it passes first, so that every test has something to lose.
"""

import pytest
import tiny
import torch
import zoo

import tl_valuealign as va
from tl_valuealign import refusals
from tl_valuealign.adapter import ModelView

pytestmark = pytest.mark.any_bridge


def check(model, match=None, **options):
    """Run over all roles; with ``match``, it must stop with a self-check error that fits."""
    options = {"roles": ("Q", "K", "V", "OV")} | options
    if match is None:
        return tiny.analyze(model, zoo.ids(), **options)
    with pytest.raises(va.SelfCheckError, match=match) as caught:
        tiny.analyze(model, zoo.ids(), **options)
    return str(caught.value)


@pytest.fixture
def alter(monkeypatch):
    """alter(hook, change): ``change(value, all activations)`` replaces what a hook reports."""
    good = ModelView.run

    def plant(hook, change):
        def run(view, ids, names, stop_at_layer=None):
            seen, stopped = good(view, ids, list(names), stop_at_layer)
            seen = dict(seen)
            if hook in seen:
                seen[hook] = change(seen[hook], seen)
            return seen, stopped

        monkeypatch.setattr(ModelView, "run", run)

    return plant


@pytest.fixture
def reweigh(monkeypatch):
    """reweigh(role, change) replaces the stored matrix of a role, wherever it is read."""
    good = ModelView.weight

    def plant(role, change):
        def weight(view, layer, asked):
            found = good(view, layer, asked)
            return change(found) if asked == role else found

        monkeypatch.setattr(ModelView, "weight", weight)

    return plant


# Streams -----------------------------------------------------------------------------------------


def test_an_attn_out_hook_that_contains_the_residual(alter):
    model = zoo.bridge("llama")
    check(model)
    hook = "blocks.1.hook_attn_out"
    alter(hook, lambda value, seen: value + seen["blocks.1.hook_resid_pre"])
    message = check(model, match="block 2: the embedding and the outputs of blocks 0-1")
    assert hook in message and "tolerance 0.0001" in message


@pytest.mark.parametrize("name", ["granite", "gemma2", "bloom", "olmo2"])
def test_attention_before_its_scale_or_post_norm_is_not_the_write(name, monkeypatch):
    """Granite scales what attention writes (by 0.22), Gemma 2 and OLMo 2 norm it, and BLOOM's
    inner hook has the residual in it."""
    model = zoo.bridge(name)
    check(model)
    good = ModelView.writes

    def inner(view, layer):
        return [hook.replace("hook_attn_out", "attn.hook_out") for hook in good(view, layer)]

    monkeypatch.setattr(ModelView, "writes", inner)
    check(model, match="block 1: .*attn.hook_out.* is not what the block adds")


@pytest.mark.parametrize("component", ["attn_out", "mlp_out"])
def test_a_write_scaled_by_022(alter, component):
    model = zoo.bridge("gpt2")
    check(model)
    alter(f"blocks.0.hook_{component}", lambda value, seen: 0.22 * value)
    check(model, match="block 1: the embedding and the outputs of blocks 0-0")


def test_an_embedding_scaled_by_four(alter):
    model = zoo.bridge("gemma")
    check(model)
    alter("blocks.0.hook_resid_pre", lambda value, seen: 4 * value)
    check(model, match="block 1: the embedding")


def test_an_embedding_scaled_by_four_before_a_norm_that_hides_it(alter):
    """With block 0 alone nothing adds up, and its norm takes the factor out again."""
    model = zoo.bridge("llama")
    check(model, layers=[0])
    alter("blocks.0.hook_resid_pre", lambda value, seen: 4 * value)
    check(model, layers=[0], match="block 0: the stream that stop_at_layer returns is .* away")


@pytest.mark.parametrize("factor", [0.0, 4.0])
def test_positions_that_are_not_those_in_the_stream(alter, factor):
    model = zoo.bridge("gpt2")
    check(model)
    alter("hook_pos_embed", lambda value, seen: factor * value)
    check(model, match="embed: the same token enters the stream as different vectors")


def test_one_faulty_token_among_many(alter):
    model = zoo.bridge("llama")

    def spoil(value, seen):
        value = value.clone()
        value[0, 1] *= 1.01
        return value

    alter("blocks.1.hook_mlp_out", spoil)
    check(model, match="block 2")


def test_a_stream_that_depends_on_later_tokens(monkeypatch):
    model = zoo.bridge("llama")
    good = ModelView.run

    def run(view, ids, names, stop_at_layer=None):
        seen, stopped = good(view, ids, names, stop_at_layer)
        return seen, None if stopped is None else stopped + 0.01 * ids[:, -1:, None]

    monkeypatch.setattr(ModelView, "run", run)
    check(model, match="with others behind them .* not causal")


def test_not_a_number_in_a_stream(alter):
    alter("blocks.1.hook_attn_out", lambda value, seen: value * torch.nan)
    check(zoo.bridge("llama"), match="block 2.* within inf")


def test_a_model_that_computes_no_numbers():
    hf = zoo.build("llama")
    with torch.no_grad():
        hf.model.layers[0].mlp.down_proj.weight[3, 5] = torch.inf
    message = check(zoo.bridge("llama", hf=hf), match="block 0: the stream has NaN or infinite")
    assert "bfloat16" in message


# Read-in matrices --------------------------------------------------------------------------------


def test_the_gain_applied_twice(monkeypatch):
    model = zoo.bridge("llama")
    check(model)
    good = ModelView.read_in

    def twice(view, role, layer, norm):
        return (
            good(view, role, layer, norm) * norm.gain[:, None]
            if norm.gain is not None
            else (good(view, role, layer, norm))
        )

    monkeypatch.setattr(ModelView, "read_in", twice)
    message = check(model, match=r"block 0, role (Q|K|V|OV): \(x̄/s\) A \+ b misses attn\.hook_")
    assert "the gain follows another rule" in message


def test_the_gain_forgotten(monkeypatch):
    model = zoo.bridge("llama")
    good = ModelView.norm_candidates

    def without(view, layer):
        return [norm for norm in good(view, layer) if norm.gain is None]

    monkeypatch.setattr(ModelView, "norm_candidates", without)
    check(model, match="block 0, role")


OFFSET = [name for name, entry in zoo.ZOO.items() if entry.one_plus and not zoo.wrong(name)]


@pytest.mark.parametrize("name", OFFSET)
def test_the_offset_of_the_gain_forgotten(name, monkeypatch):
    """These store w and multiply by 1 + w."""
    model = zoo.bridge(name)
    check(model)
    good = ModelView.norm_candidates

    def without(view, layer):
        return [norm for norm in good(view, layer) if norm.gain_rule != "1 + w"]

    monkeypatch.setattr(ModelView, "norm_candidates", without)
    check(model, match="as the closest input norm")


def test_the_wrong_norm(monkeypatch):
    """An RMSNorm for a LayerNorm fits no head of a model whose weights are not centred."""
    model = zoo.bridge("neox")
    good = ModelView.norm_candidates

    def uncentred(view, layer):
        return [norm for norm in good(view, layer) if norm.kind != "LayerNorm"]

    monkeypatch.setattr(ModelView, "norm_candidates", uncentred)
    check(model, match="block 0, role .* RMSNorm with gain w|none as the closest")


def test_a_transposed_square_weight(reweigh, monkeypatch):
    options = zoo.ZOO["llama"].options | {"head_dim": zoo.D}
    square = zoo.Entry("LlamaConfig", "LlamaForCausalLM", options)
    monkeypatch.setitem(zoo.ZOO, "square", square)
    model = zoo.bridge("square")
    check(model)
    reweigh("V", lambda weight: weight.mT)
    check(model, roles=("V",), match="block 0, role V.*transposed")


def test_keys_and_values_swapped(monkeypatch):
    model = zoo.bridge("llama")
    good, swap = ModelView.weight, {"Q": "Q", "K": "V", "V": "K"}
    monkeypatch.setattr(ModelView, "weight", lambda view, la, role: good(view, la, swap[role]))
    check(model, match=r"block 0, role (K|V|OV): .*hook_[kv]")


@pytest.mark.parametrize("role", ["Q", "K", "V"])
def test_heads_permuted(reweigh, role):
    model = zoo.bridge("llama")
    check(model)
    reweigh(role, lambda weight: weight.roll(1, dims=0))
    check(model, roles=(role,), match=f"block 0, role {role}: .*permuted")


def test_features_of_a_head_permuted(reweigh):
    reweigh("V", lambda weight: weight.roll(1, dims=2))
    check(zoo.bridge("llama"), roles=("V",), match="block 0, role V")


def test_heads_of_the_output_matrix_permuted(monkeypatch):
    """W_O is read by role OV alone."""
    model = zoo.bridge("llama")
    good = ModelView.write_out
    monkeypatch.setattr(ModelView, "write_out", lambda *args: good(*args).roll(1, dims=0))
    check(model, roles=("V",))
    check(model, roles=("OV",), match="block 0, role OV")


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_bias_of_a_hundred_times_the_signal_hides_nothing(name, reweigh, monkeypatch):
    """Real Qwen2 keys have such biases; the check looks at what varies over tokens."""
    hf = zoo.build(name)
    with torch.no_grad():
        for key, parameter in hf.named_parameters():
            if key.endswith(("k_proj.bias", "c_attn.bias")):
                parameter.mul_(300)
    model = zoo.bridge(name, hf=hf)
    check(model)
    reweigh("K", lambda weight: weight.roll(1, dims=0))
    check(model, roles=("K",), match="block 0, role K")


# What a check must not do ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gpt_neo"])
def test_equally_good_norms_are_told_apart_by_the_models_attributes(name):
    """Processed weights are centred and so are processed streams: an RMSNorm would fit as well,
    but the readable space lacks a dimension all the same."""
    result = check(zoo.bridge(name, compat=True))
    assert result.provenance["input_norm"][0].startswith("LayerNorm")
    assert result.provenance["readable_dim"] == zoo.D - 1


def test_blocks_that_see_different_things_are_not_put_into_one_grid(monkeypatch):
    """ModernBERT's decoder has no norm before its first attention and LayerNorms after."""
    options = dict(
        vocab_size=zoo.VOCAB,
        hidden_size=zoo.D,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=zoo.HEADS,
        max_position_embeddings=zoo.N_CTX,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=8,
    )
    entry = zoo.Entry("ModernBertDecoderConfig", "ModernBertDecoderForCausalLM", options)
    monkeypatch.setitem(zoo.ZOO, "modernbert", entry)
    model = zoo.bridge("modernbert")
    with pytest.raises(va.ModelError, match=r"blocks 1, 2, 3 read through a LayerNorm.*layers=\(0"):
        tiny.analyze(model, zoo.ids())
    assert tiny.analyze(model, zoo.ids(), layers=[0]).provenance["readable_dim"] == zoo.D
    rest = tiny.analyze(model, zoo.ids(), layers=[1, 2, 3])
    assert rest.provenance["readable_dim"] == zoo.D - 1


def test_checks_are_in_the_result_with_their_tolerances():
    result = check(zoo.bridge("phi"))
    checks = result.checks
    assert checks.decomposition.shape == (zoo.LAYERS,) and checks.decomposition[0] == 0
    assert float(checks.decomposition.max()) < 1e-6
    assert set(checks.read_in) == {"Q", "K", "V", "OV"}
    assert all(0 < float(error.max()) < 1e-5 for error in checks.read_in.values())
    assert checks.decomposition_tolerance == checks.read_in_tolerance == 1e-4


def test_known_wrong_releases_are_told_from_right_ones():
    """The table of known faults speaks of releases; this one's place in it is as tested."""
    release = refusals._release()
    for architecture, fixed in refusals.FIXED_IN.items():
        names = [name for name, entry in zoo.ZOO.items() if entry.model == architecture]
        assert all((release < fixed) == bool(zoo.wrong(name)) for name in names)

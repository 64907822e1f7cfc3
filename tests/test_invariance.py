"""The first theorem: no figure depends on how TransformerLens holds or processes the weights.

And the second: role OV, A W_O, does not even depend on how a head's two factors share its work.
"""

import pytest
import tiny
import torch
import zoo

ROLES = ("Q", "K", "V", "OV")
RAW, COMPAT = "raw", "compat"


def run(model, **options):
    return tiny.analyze(model, zoo.ids(), **{"roles": ROLES} | options)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def reference(request):
    """The figures of HookedTransformer or, where there is none, of the raw bridge."""
    return request.param, run(_any_model(request.param))


def _any_model(name):
    try:
        from transformer_lens.model_bridge import TransformerBridge  # noqa: F401
    except ImportError:
        return zoo.hooked_from_hf(name)
    return zoo.bridge(name)


# What each step of weight processing does to the weights is TransformerLens's business; the
# figures must not notice any of them, alone or together.
STEPS = {
    "fold_ln": {"fold_ln": True},
    "centre": {"center_writing_weights": True},
    "fold_value_biases": {"fold_value_biases": True},
    "all": dict.fromkeys(("fold_ln", "center_writing_weights", "fold_value_biases"), True),
}
NO_STEP = dict.fromkeys(
    ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False
)


@pytest.mark.any_bridge
@pytest.mark.parametrize("step", STEPS)
def test_no_step_of_compatibility_mode_is_noticed(reference, step):
    name, wanted = reference
    model = zoo.bridge(name, compat=True, **NO_STEP | STEPS[step])
    tiny.assert_close(wanted, run(model))


@pytest.mark.any_bridge
def test_compatibility_mode_without_processing_is_not_noticed(reference):
    name, wanted = reference
    tiny.assert_close(wanted, run(zoo.bridge(name, compat=True, no_processing=True)))


@pytest.mark.hooked
@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
def test_hooked_transformer_has_the_same_figures(reference, processed):
    name, wanted = reference
    tiny.assert_close(wanted, run(zoo.hooked_from_hf(name, processed)))


@pytest.mark.any_bridge
@pytest.mark.parametrize("name", ["gpt_neo", "bloom", "neox_parallel", "gemma2", "qwen3", "olmo2"])
def test_raw_and_compatibility_mode_agree(name):
    tiny.assert_close(run(zoo.bridge(name)), run(zoo.bridge(name, compat=True)))


@pytest.mark.any_bridge
def test_processing_did_change_the_weights():
    """Otherwise agreement would prove nothing."""
    raw, processed = zoo.bridge("gpt2"), zoo.bridge("gpt2", compat=True)
    assert (raw.blocks[1].attn.W_V - processed.blocks[1].attn.W_V).abs().max() > 0.1
    assert (raw.blocks[1].attn.W_O - processed.blocks[1].attn.W_O).abs().max() > 0.01


# The OV role -------------------------------------------------------------------------------------


@torch.no_grad()
def share_out(attn, heads, kv_heads, seed):
    """W_V → W_V M and W_O → M⁻¹ W_O with a random M per key/value head, in a Llama's weights."""
    generator = torch.Generator().manual_seed(seed)
    values = attn.v_proj.weight.unflatten(0, (kv_heads, -1))  # [kv head, d_head, d]
    writes = attn.o_proj.weight.unflatten(1, (heads, -1))  # [d, head, d_head]
    for head in range(kv_heads):
        mix = torch.randn(2 * (values.shape[1],), generator=generator, dtype=torch.float64)
        mix += 2 * torch.eye(len(mix), dtype=torch.float64)
        values[head] = (mix.T @ values[head].double()).to(values)
        group = range(head * heads // kv_heads, (head + 1) * heads // kv_heads)
        for query in group:
            writes[:, query] = (writes[:, query].double() @ torch.linalg.inv(mix).T).to(writes)


@pytest.mark.any_bridge
@pytest.mark.parametrize("seed", range(3))
def test_ov_ignores_how_a_head_shares_out_its_work(seed):
    plain, rewritten = zoo.build("llama"), zoo.build("llama")
    for layer in rewritten.model.layers:
        share_out(layer.self_attn, 4, 2, seed)
    ids = zoo.ids()
    with torch.no_grad():  # it is the same model
        assert (plain(ids).logits - rewritten(ids).logits).abs().max() < 1e-3
    before, after = run(zoo.bridge("llama", hf=plain)), run(zoo.bridge("llama", hf=rewritten))
    tiny.assert_close(before, after, roles=["Q", "K", "OV"], atol=2e-5, rtol=1e-4)
    assert (before.V.full - after.V.full).abs().max() > 1e-2  # V's directions did change


@pytest.mark.any_bridge
def test_ov_ignores_refactoring_and_the_provenance_says_so():
    plain = zoo.bridge("gpt2", compat=True)
    refactored = zoo.bridge("gpt2", compat=True, refactor_factored_attn_matrices=True)
    before, after = run(plain), run(refactored)
    tiny.assert_close(before, after, roles=["OV"], atol=2e-5, rtol=1e-4)
    assert (before.V.singular_values - after.V.singular_values).abs().max() > 0.1
    assert before.provenance["notes"] == []
    (note,) = after.provenance["notes"]
    assert "refactor_factored_attn_matrices" in note


@pytest.mark.any_bridge
def test_ov_by_its_small_core_is_the_svd_of_the_whole_product():
    model = zoo.bridge("llama")
    result = run(model, roles=("OV",))
    attn, norm = model.blocks[1].attn, model.blocks[1].ln1.original_component.weight.detach()
    for head in range(4):
        A = norm.double()[:, None] * attn.W_V[head // 2].detach().double()
        whole = torch.linalg.svdvals(A @ attn.W_O[head].detach().double())[:12]
        torch.testing.assert_close(result.OV.singular_values[1, head], whole, rtol=1e-6, atol=1e-9)

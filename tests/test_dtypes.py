"""float16, bfloat16 and float64: figures as exact as the dtype allows, and checks that know it."""

import numpy as np
import oracle
import pytest
import tiny
import torch
import zoo
from agreement import assert_agrees

import tl_valuealign as va
from tl_valuealign.adapter import ModelView

pytestmark = pytest.mark.any_bridge

ROLES = ("Q", "K", "V", "OV")
# OLMo 2 is not among them: its bridge cannot run in half precision.
SOME = ["gpt2", "opt", "llama", "gemma2", "granite", "bloom", "qwen2", "mixtral"]
# Streams carry a few roundings of the stored dtype; alignments are means of them over tokens.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


def run(name, dtype, compat=False, **options):
    model = zoo.bridge(name, compat=compat, dtype=dtype)
    return tiny.analyze(model, zoo.ids(), **{"roles": ROLES} | options)


def test_double_precision_is_used():
    """GPT-2 computes all of itself in float64, and then every figure has 10 digits."""
    result = run("gpt2", torch.float64)
    truth = oracle.run(zoo.build("gpt2", dtype=torch.float64), zoo.ids())
    assert_agrees(result, truth, alignment=1e-11, relative=1e-10)
    assert float(result.checks.decomposition.max()) < 1e-14
    assert max(float(error.max()) for error in result.checks.read_in.values()) < 1e-13
    assert result.provenance["dtype"] == "float64"


@pytest.mark.parametrize("compat", [False, True], ids=["raw", "compat"])
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "llama", "gemma2", "neox_parallel"),
        # transformer-lens 3.9 leaves a float32 bias in Qwen2 when it processes float64 weights.
        pytest.param("qwen2", marks=pytest.mark.bridge),
    ],
)
def test_models_that_compute_norms_in_single_precision_all_the_same(name, compat):
    """Most do, and processing goes through float32: figures and checks are as good as that."""
    result = run(name, torch.float64, compat)
    truth = oracle.run(zoo.build(name, dtype=torch.float64), zoo.ids())
    assert_agrees(result, truth, alignment=1e-6, relative=1e-5)
    assert result.checks.read_in_tolerance == 1e-6


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", SOME)
def test_half_precision_is_as_exact_as_it_can_be(name, dtype):
    """Against the oracle in float64 on the same stored weights: spectra are exact, because they
    are computed from the weights alone, and streams as far as the model computes them."""
    result = run(name, dtype)
    truth = oracle.run(zoo.build(name, dtype=dtype), zoo.ids())
    rounding = ROUNDING[dtype]
    for role in ROLES:
        mine, theirs = result.role(role), getattr(truth, role)
        np.testing.assert_array_equal(mine.n_directions, theirs.k)
        np.testing.assert_array_equal(mine.numerical_rank, theirs.rank)
        singular = theirs.s[..., : mine.singular_values.shape[-1]]
        np.testing.assert_allclose(mine.singular_values, singular, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(mine.full, theirs.full["norm"], atol=4 * rounding, rtol=0)
    rows = [truth.labels.index(label) for label in result.sources]
    np.testing.assert_allclose(result.norms, truth.norms[rows], rtol=8 * rounding)
    assert result.provenance["dtype"] == str(dtype).removeprefix("torch.")
    for values in (result.V.full, result.norms, result.V.singular_values):
        assert values.dtype == torch.float64


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", SOME)
def test_half_precision_is_close_to_single(name, dtype):
    """The weights are rounded, too: figures move by a few roundings and no more."""
    half, single = run(name, dtype), run(name, torch.float32)
    for role in ROLES:
        mine, theirs = half.role(role), single.role(role)
        np.testing.assert_allclose(
            mine.singular_values,
            theirs.singular_values,
            atol=float(2 * ROUNDING[dtype] * theirs.singular_values.max()),
        )
        same = (mine.n_directions == theirs.n_directions).numpy()
        assert same.mean() > 0.9  # a share that falls on a threshold may tip over
        difference = np.abs(mine.full.numpy() - theirs.full.numpy())[same]
        assert difference.max() < 8 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_half_precision_after_processing(name, dtype):
    raw, processed = run(name, dtype), run(name, dtype, compat=True)
    np.testing.assert_allclose(raw.V.full, processed.V.full, atol=8 * ROUNDING[dtype])


# Checks that know the dtype ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *ROUNDING], ids=str)
@pytest.mark.parametrize(
    "fault", ["write scaled by 0.22", "residual in attn_out", "swapped", "permuted", "gain"]
)
def test_faults_are_found_in_every_dtype(monkeypatch, dtype, fault):
    run("llama", dtype)  # passes without the fault
    weigh, read, go = ModelView.weight, ModelView.read_in, ModelView.run

    def spoiled(view, ids, names, stop_at_layer=None):
        seen, stopped = go(view, ids, names, stop_at_layer)
        seen, hook = dict(seen), "blocks.0.hook_attn_out"
        if hook in seen:
            extra = seen["blocks.0.hook_resid_pre"] if "residual" in fault else -0.78 * seen[hook]
            seen[hook] = seen[hook] + extra
        return seen, stopped

    swap = {"Q": "Q", "K": "V", "V": "K"}
    if fault == "swapped":
        monkeypatch.setattr(ModelView, "weight", lambda v, la, role: weigh(v, la, swap[role]))
    elif fault == "permuted":
        monkeypatch.setattr(ModelView, "weight", lambda v, la, role: weigh(v, la, role).roll(1, 0))
    elif fault == "gain":
        monkeypatch.setattr(
            ModelView,
            "read_in",
            lambda v, role, la, norm: (
                read(v, role, la, norm) * (1 if norm.gain is None else norm.gain[:, None])
            ),
        )
    else:
        monkeypatch.setattr(ModelView, "run", spoiled)
    with pytest.raises(va.SelfCheckError):
        run("llama", dtype)


def test_the_better_of_two_norms_within_tolerance_is_taken():
    """With gains around 30, w for 1 + w is off by 3%: less than bfloat16 allows, more than the
    right one leaves."""
    hf = zoo.build("gemma")
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.input_layernorm.weight.add_(30)
    result = tiny.analyze(zoo.bridge("gemma", hf=hf.to(torch.bfloat16)), zoo.ids())
    assert result.provenance["input_norm"] == ["RMSNorm with gain 1 + w"]


def test_the_smallest_fault_that_single_precision_must_show(monkeypatch):
    """A write that is off by a thousandth is far above rounding."""
    go = ModelView.run

    def spoiled(view, ids, names, stop_at_layer=None):
        seen, stopped = go(view, ids, names, stop_at_layer)
        hook = "blocks.0.hook_mlp_out"
        return {k: v * 1.001 if k == hook else v for k, v in seen.items()}, stopped

    monkeypatch.setattr(ModelView, "run", spoiled)
    with pytest.raises(va.SelfCheckError, match="block 1"):
        run("llama", torch.float32)


def test_ranks_in_half_precision_are_not_the_size_of_the_matrix():
    """A rank-3 matrix rounded to bfloat16 has full rank by float32's rule and 3 by its own."""

    def edited(dtype):
        hf = zoo.build("llama")
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            left = torch.randn(12, 3, generator=generator)
            low = left @ torch.randn(3, zoo.D, generator=generator) / 6
            hf.model.layers[0].self_attn.v_proj.weight[:12] = low
        return tiny.analyze(zoo.bridge("llama", hf=hf.to(dtype)), zoo.ids(), layers=[0])

    assert int(edited(torch.float32).V.numerical_rank[0, 0]) == 3
    assert int(edited(torch.bfloat16).V.numerical_rank[0, 0]) == 3
    assert int(edited(torch.bfloat16).V.numerical_rank[0, 1]) == 12
    # The rounded entries are a new matrix: its further singular values are real, and small.
    s = edited(torch.bfloat16).V.singular_values[0, 0]
    assert 0 < s[3] < s[0] * 2**-7


def test_streams_too_large_for_half_precision_stop_the_run():
    hf = zoo.build("llama", dtype=torch.float16)
    with torch.no_grad():
        hf.model.layers[0].mlp.down_proj.weight.mul_(3e4)
    with pytest.raises(va.SelfCheckError, match="float16 is too narrow.*bfloat16"):
        tiny.analyze(zoo.bridge("llama", hf=hf), zoo.ids())

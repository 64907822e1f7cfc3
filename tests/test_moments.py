"""Second moments: their layout, runs that choose them, and what a result that kept them answers."""

import dataclasses

import numpy as np
import oracle
import pytest
import streams
import torch
import zoo
from agreement import assert_agrees

import tl_valuealign as va
from tl_valuealign import budget
from tl_valuealign.symmetric import UpperRows

FAMILIES = ["gpt2", "llama", "neox_parallel", "gemma2", "jamba"]


def run(model, ids=None, **options):
    ids = zoo.ids(batch=9) if ids is None else ids
    return va.analyze_value_alignment(model, ids, **({"progress": False} | options))


# The layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 127, 256, 700])
def test_packed_rows_hold_the_whole_matrix(size):
    layout = UpperRows(size)
    x = streams.draw(size, 11, size).double()
    flat = torch.zeros(layout.packed, dtype=torch.float64)
    layout.add_outer(flat, x[:4])
    layout.add_outer(flat, x[4:])
    torch.testing.assert_close(layout.unpack(flat), x.T @ x)
    assert layout.packed <= size**2


@pytest.mark.parametrize("size", [7, 300, 700])
@pytest.mark.parametrize("at_once", [1, 2**40], ids=["one head at a time", "all heads at once"])
def test_forms_are_the_dense_quadratic_forms(size, at_once, monkeypatch):
    monkeypatch.setitem(va.symmetric.FORM_BYTES, "cpu", at_once)
    layout = UpperRows(size)
    x = streams.draw(1, 3, 20, size).double()
    flat = torch.zeros(3, layout.packed, dtype=torch.float64)
    for each, rows in zip(flat, x, strict=True):
        layout.add_outer(each, rows)
    u, w = streams.draw(2, 5, size, 4).double(), streams.draw(3, 2, 5, 4).double()
    w[0, :, 2:] = 0
    both, first = layout.forms([(flat[:2], 2), (flat[2:], 1)], u, w)
    dense = torch.einsum("hdi,mde,hei,chi->mch", u, x.mT @ x, u, w)
    torch.testing.assert_close(both, dense[:2])
    torch.testing.assert_close(first, dense[2:, :1])


# Which engine runs ------------------------------------------------------------------------------


@pytest.mark.bridge
@pytest.mark.parametrize("metric", ["energy", "pooled"])
@pytest.mark.parametrize("name", FAMILIES)
def test_agrees_with_the_oracle(name, metric):
    ids = zoo.ids()
    components = ("attn_out", "mlp_out")
    roles = ("Q", "K", "V", "OV")
    result = run(zoo.bridge(name), ids, metric=metric, roles=roles, components=components)
    assert result.provenance["engine"] == "moments"
    truth = oracle.run(zoo.build(name), ids)
    assert_agrees(result, truth)
    other = "pooled" if metric == "energy" else "energy"
    assert_agrees(result.with_metric(other), truth)


@pytest.mark.bridge
def test_both_engines_give_the_same_result(monkeypatch):
    model = zoo.bridge("llama")
    by_moments = run(model, metric="energy", skip_first=True)
    with monkeypatch.context() as patch:
        patch.setattr(budget, "available", lambda device: 1e8)
        patch.setattr(budget, "UpperRows", lambda size: UpperRows(100 * size))
        by_tokens = run(model, metric="energy", skip_first=True)
    assert by_tokens.provenance["engine"] == "tokens"
    assert by_moments.provenance["engine"] == "moments"
    for role, mine in by_moments.roles.items():
        theirs = by_tokens.roles[role]
        np.testing.assert_allclose(mine.full, theirs.full, atol=1e-6)
        np.testing.assert_allclose(mine.by_source, theirs.by_source, atol=1e-6)
        np.testing.assert_allclose(mine.projected_sq_norm, theirs.projected_sq_norm, rtol=2e-6)
        assert mine.full_stderr.isnan().all() and not theirs.full_stderr.isnan().any()
    np.testing.assert_allclose(by_moments.norms, by_tokens.norms)
    assert "no sums per sequence" in by_moments.provenance["intervals"]


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("moments", [True, False], ids=["moments", "tokens alone"])
def test_directions_rebuilt_from_the_weights_give_the_same_result(name, moments, monkeypatch):
    roles, model = ("Q", "V", "OV"), zoo.bridge(name)
    held = run(model, roles=roles)
    choose = budget.choose

    def rebuilding(*given, **options):
        plan = choose(*given, **options)
        return dataclasses.replace(plan, rebuilt=True, kinds=plan.kinds if moments else ())

    monkeypatch.setattr(budget, "choose", rebuilding)
    rebuilt = run(model, roles=roles)
    assert "rebuilt" in rebuilt.provenance["memory"]
    for role, mine in held.roles.items():
        for field in mine.__dataclass_fields__:
            np.testing.assert_allclose(
                getattr(rebuilt.roles[role], field),
                getattr(mine, field),
                rtol=1e-4 if "stderr" in field else 2e-6,
                atol=1e-6,
                err_msg=f"{role} {field}",
            )


@pytest.mark.bridge
def test_what_fits_nowhere_is_refused_with_the_figures(monkeypatch):
    monkeypatch.setattr(budget, "available", lambda device: 2**20)
    figures = r"moments engine.*9\.1 GiB.*tokens engine: 2\.0 GiB.*rebuilt.*MiB.*layers="
    with pytest.raises(va.ResourceError, match=figures):
        budget.choose(
            "energy",
            keep_moments=False,
            d_model=4096,
            n_sources=33,
            n_layers=32,
            heads=[(32, 128)],
            n_thresholds=2,
            dtype=torch.float32,
            place=streams.CPU,
            batch_tokens=0,
            model_device=streams.CPU,
        )


def test_the_memory_of_moments_is_what_was_planned():
    plan = budget.choose(
        "pooled",
        keep_moments=False,
        d_model=300,
        n_sources=4,
        n_layers=3,
        heads=[(2, 8)],
        n_thresholds=2,
        dtype=torch.float32,
        place=streams.CPU,
        batch_tokens=0,
        model_device=streams.CPU,
    )
    sums = va.moments.MomentSums(300, 4, 3, kinds=plan.kinds, device=plan.home)
    assert plan.engine == "moments"
    assert plan.n_bytes == sum(kind.nbytes for kind in sums.flat) <= 2 * 7 * 300**2 * 8


@pytest.mark.bridge
@pytest.mark.parametrize("metric", ["norm", "energy"])
def test_results_are_ordinary_tensors(metric):
    """What inference mode makes cannot be used in training afterwards."""
    result = run(zoo.bridge("gpt2"), metric=metric, keep_moments=True)
    tensors = dict(_tensors("result", result))
    assert len(tensors) > 40
    for name, tensor in tensors.items():
        assert not tensor.is_inference() and not tensor.requires_grad, name
        assert tensor.device.type == "cpu", name


def _tensors(name, value):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}", each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(f"{name}.{field.name}", getattr(value, field.name))


# Asking again -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept():
    return run(zoo.bridge("gpt2"), metric="energy", roles=("V",), keep_moments=True)


@pytest.mark.bridge
@pytest.mark.parametrize("metric", ["energy", "pooled"])
def test_other_roles_and_thresholds_are_answered_without_the_model(kept, metric):
    asked = kept.ask(roles=("OV", "Q"), thresholds=(0.7, 1.0), metric=metric)
    fresh = run(zoo.bridge("gpt2"), metric=metric, roles=("OV", "Q"), thresholds=(0.7, 1.0))
    assert tuple(asked.roles) == ("OV", "Q") and asked.metric == metric
    for role, mine in asked.roles.items():
        for name in mine.__dataclass_fields__:
            np.testing.assert_allclose(
                getattr(mine, name), getattr(fresh.roles[role], name), rtol=1e-9, err_msg=name
            )


@pytest.mark.bridge
def test_a_run_for_norms_keeps_moments_too(kept):
    by_tokens = run(zoo.bridge("gpt2"), keep_moments=True)
    asked = by_tokens.ask(roles=("V",), metric="energy")
    np.testing.assert_allclose(asked.V.full, kept.V.full, rtol=1e-9)
    with pytest.raises(va.InputError, match="does not follow from second moments"):
        by_tokens.ask(thresholds=(0.7,))


@pytest.mark.bridge
@pytest.mark.parametrize("metric", ["energy", "pooled"])
def test_any_subspace_is_answered_without_the_model(kept, metric):
    truth = oracle.run(zoo.build("gpt2"), zoo.ids(batch=9))
    basis = streams.draw(0, zoo.D, 3)
    basis = torch.cat([basis, basis[:, :1] * 2], dim=1)  # a column that adds nothing
    by_source, full = kept.subspace_alignment(basis, metric)
    centred = basis.double() - basis.double().mean(0)
    U = np.linalg.qr(centred[:, :3].numpy())[0]
    for number, label in enumerate(kept.sources):
        x = oracle.visible(truth.streams[label], "LN")[truth.kept]
        assert float(by_source[number]) == pytest.approx(oracle.align(x, U)[metric], abs=1e-6)
    for number, layer in enumerate(kept.layers):
        x = oracle.visible(truth.resid[layer], "LN")[truth.kept]
        assert float(full[number]) == pytest.approx(oracle.align(x, U)[metric], abs=1e-6)


@pytest.mark.bridge
@pytest.mark.parametrize(
    "basis, message",
    [
        (torch.zeros(zoo.D, 2), "spans nothing"),
        (torch.ones(zoo.D, 1), "spans nothing"),  # the mean, which LayerNorm takes out
        (torch.ones(3, 2), r"expected .*\[32, k\]"),
        (torch.full((zoo.D, 1), torch.nan), "NaN"),
    ],
)
def test_a_subspace_that_cannot_be_asked_about(kept, basis, message):
    with pytest.raises(va.InputError, match=message):
        kept.subspace_alignment(basis)


@pytest.mark.bridge
def test_a_result_without_moments_says_how_to_keep_them():
    plain = run(zoo.bridge("gpt2"), metric="energy")
    with pytest.raises(va.InputError, match="keep_moments=True"):
        plain.ask(thresholds=(0.7,))


@pytest.mark.bridge
def test_kept_moments_survive_the_disk(kept, tmp_path):
    kept.save(tmp_path / "kept.safetensors")
    again = va.load(tmp_path / "kept.safetensors")
    assert torch.equal(again.moments.energy, kept.moments.energy)
    assert torch.equal(again.ask(thresholds=(0.3,)).V.full, kept.ask(thresholds=(0.3,)).V.full)


@pytest.mark.bridge
@pytest.mark.parametrize("metric", ["norm", "energy"])
def test_merged_halves_are_the_whole(metric):
    ids, model = zoo.ids(batch=20), zoo.bridge("llama")
    whole = run(model, ids, metric=metric, keep_moments=True)
    merged = run(model, ids[:7], metric=metric, keep_moments=True).merge(
        run(model, ids[7:], metric=metric, keep_moments=True)
    )
    for role, mine in merged.roles.items():
        for name in mine.__dataclass_fields__:
            np.testing.assert_allclose(
                getattr(mine, name), getattr(whole.roles[role], name), rtol=1e-5, err_msg=name
            )
    if metric == "norm":
        assert not merged.V.excess_stderr.isnan().any()
    asked, expected = (r.ask(thresholds=(0.7,), metric="pooled") for r in (merged, whole))
    np.testing.assert_allclose(asked.K.by_source, expected.K.by_source, rtol=1e-6)

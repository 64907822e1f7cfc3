"""Directions, singular values, counts and ranks against numpy's float64 SVD, one head at a time."""

import gc

import numpy as np
import pytest
import streams
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_valuealign as va
from tl_valuealign import readin
from tl_valuealign.spectra import (
    HeadDirections,
    HeadSVD,
    RebuiltDirections,
    count_directions,
    decompose,
    decompose_product,
    numerical_rank,
    rebuild,
)

D, WIDTH = 48, 8


def with_spectrum(seed, values, d=D):
    """A matrix [1, d, len(values)] of these singular values, float32."""
    left = torch.linalg.qr(streams.draw(seed, d, len(values)).double()).Q
    right = torch.linalg.qr(streams.draw(seed + 1, len(values), len(values)).double()).Q
    return ((left * torch.tensor(values, dtype=torch.float64)) @ right.T).float()[None]


def assert_like_numpy(matrices, found, *, directions=1e-6, values=1e-12):
    """Projectors on every leading subspace that is separated from the rest, and all values."""
    for head, matrix in enumerate(matrices.double().numpy()):
        U, s, _ = np.linalg.svd(matrix, full_matrices=False)
        mine = found.directions[head].double().numpy()
        np.testing.assert_allclose(found.singular_values[head], s, rtol=0, atol=values * s[0])
        for k in range(1, len(s) + 1):
            if s[k - 1] < 1e-6 * s[0] or (k < len(s) and s[k - 1] - s[k] < 1e-4 * s[0]):
                continue
            np.testing.assert_allclose(
                mine[:, :k] @ mine[:, :k].T, U[:, :k] @ U[:, :k].T, atol=directions
            )


@given(st.integers(0, 2**31), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_random_heads(seed, heads):
    matrices = streams.draw(seed, heads, D, WIDTH)
    assert_like_numpy(matrices, decompose(matrices, torch.float32))


def test_heads_do_not_depend_on_their_company():
    matrices = torch.cat(
        [with_spectrum(0, [9, 5, 1e-6]), torch.zeros(1, D, 3), with_spectrum(2, [3, 2, 1])]
    )
    found = decompose(matrices, torch.float32)
    assert_like_numpy(matrices[[0, 2]], decompose(matrices[[0, 2]], torch.float32))
    assert_like_numpy(matrices[[2]], decompose(matrices[[2]], torch.float32))
    np.testing.assert_allclose(found.singular_values[1], 0)
    assert not found.directions[1].any()
    np.testing.assert_allclose(found.singular_values[0, 2], 1e-6, rtol=0.1)


@pytest.mark.parametrize(
    "values",
    [[8, 4, 2, 1], [1, 0.3, 0.02, 5e-3], [1, 0.3, 2e-3, 3e-4], [1, 1e-3, 1e-5, 1e-7], [5, 1, 0, 0]],
    ids=["well", "weak", "weaker", "poorly", "singular"],
)
def test_conditioning(values):
    matrix = with_spectrum(3, values)
    found = decompose(matrix, torch.float32)
    assert_like_numpy(matrix, found, values=1e-9)
    rank = sum(value > D * torch.finfo(torch.float32).eps * values[0] for value in values)
    assert int(numerical_rank(found.singular_values, D, torch.float32)) == rank
    inside = found.directions[0][:, :rank].double()
    np.testing.assert_allclose(inside.T @ inside, np.eye(rank), atol=1e-5)


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_no_digit_is_lost_that_the_gram_matrix_keeps(scale):
    """Every kind of head in one stack: values to float64 rounding, counts on the edge, ranks."""
    kinds = {
        "well": np.linspace(2, 1, WIDTH),
        "weak": np.logspace(0, -3.5, WIDTH),
        "graded": np.logspace(0, -6, WIDTH),
        "repeated": [3, 3, 3, 2, 2, 1, 1, 1],
        "dominated": [1e4, *np.linspace(2, 1, WIDTH - 1)],
        "dominated, poorly": [1e5, *np.linspace(2, 1, WIDTH - 1)],
    }
    matrices = torch.cat([with_spectrum(20 + i, s) for i, s in enumerate(kinds.values())])
    short, zero = matrices[:1].clone(), torch.zeros_like(matrices[:1])
    short[..., -2:] = short[..., :2]  # of rank WIDTH - 2, exactly
    matrices = torch.cat([matrices, short, zero]) * scale
    found = decompose(matrices, torch.float32)
    assert_like_numpy(matrices[:-1], HeadSVD(found.directions[:-1], found.singular_values[:-1]))
    assert not found.directions[-1].any()
    eps = np.finfo(np.float64).eps
    for matrix, mine in zip(matrices.double().numpy(), found.singular_values, strict=True):
        s = np.linalg.svd(matrix, compute_uv=False)
        loss = np.ones(WIDTH)
        if (s >= 1e-4 * s[0] * 0.99).all() and s[0] > 0:
            loss = s[0] / s
        assert (np.abs(mine.numpy() - s) <= 16 * eps * s[0] * loss).all()
        exact, energy = torch.from_numpy(s)[None], np.cumsum(s**2)
        rank = numerical_rank(exact, D, torch.float32)
        assert int(numerical_rank(mine[None], D, torch.float32)) == int(rank)
        for k in range(1, int(rank)):
            share = float(energy[k - 1] / energy[-1])
            assert int(count_directions(mine[None], share * (1 - 1e-11))) == k
            if s[k] ** 2 > 1e-10 * energy[-1]:
                assert int(count_directions(mine[None], share * (1 + 1e-11))) == k + 1
        assert int(count_directions(mine[None], 1.0)) == int(count_directions(exact, 1.0))


def test_float64_weights_keep_float64():
    matrix = with_spectrum(5, [1, 1e-3, 1e-6, 1e-9]).double()
    assert_like_numpy(matrix, decompose(matrix, torch.float64), directions=1e-9, values=1e-15)


def test_more_columns_than_rows():
    matrix = streams.draw(7, 2, 3, 5)
    assert_like_numpy(matrix, decompose(matrix, torch.float32))


def test_products_are_decomposed_through_their_factors():
    A, W = streams.draw(8, 3, D, WIDTH), streams.draw(9, 3, WIDTH, D)
    found = decompose_product(A, W)
    for head in range(3):
        U, s, _ = np.linalg.svd((A[head].double() @ W[head].double()).numpy())
        np.testing.assert_allclose(found.singular_values[head], s[:WIDTH], rtol=1e-12)
        mine = found.directions[head].numpy()
        np.testing.assert_allclose(mine @ mine.T, U[:, :WIDTH] @ U[:, :WIDTH].T, atol=1e-12)


def test_rebuilding_keeps_the_digits_or_is_not_done():
    thresholds = torch.tensor([[4], [2]])
    for values, small in (([8, 4, 2, 1], True), ([1, 0.1, 0.01, 1e-4], False)):
        matrix = with_spectrum(11, values)
        svd = decompose(matrix, torch.float32)
        head = HeadDirections(svd.directions, svd.singular_values, thresholds)
        got = rebuild(head, lambda matrix=matrix: matrix)
        assert isinstance(got, RebuiltDirections) == small
        np.testing.assert_allclose(got.directions, head.directions, atol=1e-5)
        assert torch.equal(got.n_directions, thresholds)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=9), st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_counts_are_the_smallest_that_carry_the_share(values, share):
    s = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)[None]
    k = int(count_directions(s, share))
    energy = s[0].square()
    assert float(energy[:k].sum()) >= share * float(energy.sum()) * (1 - 1e-12)
    assert k == 1 or float(energy[: k - 1].sum()) < share * float(energy.sum())


# What is remembered within a session --------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """How often decompose really runs."""
    made = []
    monkeypatch.setattr(readin, "decompose", lambda *given: made.append(1) or decompose(*given))
    return made


def run(model, **options):
    return va.analyze_value_alignment(model, zoo.ids(), progress=False, **options)


@pytest.mark.bridge
def test_a_second_call_decomposes_nothing(calls):
    model = zoo.bridge("llama")
    first = run(model)
    assert len(calls) == 3 * zoo.LAYERS
    second = run(model, thresholds=(0.7, 0.9))
    assert len(calls) == 3 * zoo.LAYERS
    np.testing.assert_allclose(first.V.full[0], second.V.full[1], rtol=1e-6)
    run(zoo.bridge("llama", seed=1))
    assert len(calls) == 6 * zoo.LAYERS


@pytest.mark.bridge
def test_changed_weights_are_not_taken_for_the_old(calls):
    model = zoo.bridge("llama")
    before = run(model)
    with torch.no_grad():
        model.blocks[1].ln1.original_component.weight[0] += 0.5  # the gain is part of A
    after = run(model)
    assert len(calls) == 3 * zoo.LAYERS + 3
    assert not torch.equal(before.V.singular_values[1], after.V.singular_values[1])


@pytest.mark.bridge
def test_what_is_remembered_goes_with_the_model():
    model = zoo.bridge("llama")
    run(model)
    held = len(readin._remembered)
    assert held >= 1
    del model
    gc.collect()
    assert len(readin._remembered) < held

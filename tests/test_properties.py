"""What must hold of the measure itself, whatever the numbers, on seeded random streams."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_valuealign.chance import chance_alignment
from tl_valuealign.engines import TokenEngine
from tl_valuealign.shapes import METRICS
from tl_valuealign.spectra import HeadDirections, count_directions, decompose
from tl_valuealign.tokens import Corpus, read

D, HEADS, D_HEAD, TOKENS = 12, 3, 4, 10
seeds = st.integers(0, 2**32 - 1)
rows = st.lists(st.integers(1, TOKENS), min_size=1, max_size=5)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measure(matrices, stream, lengths, *, thresholds=(0.9, 0.5), batch_size=8, skip_first=False):
    """{metric: [threshold, head]} of a stream given as one row of tokens a sequence."""
    svd = decompose(matrices, torch.float32)
    k = torch.stack([count_directions(svd.singular_values, t) for t in thresholds])
    block = [HeadDirections(svd.directions.float(), svd.singular_values, k)]
    engine = TokenEngine(
        [block], ["V"], 1, centred=False, dtype=torch.float32, device=torch.device("cpu")
    )
    numbers = torch.arange(sum(lengths))
    vectors = dict(zip(numbers.tolist(), stream, strict=True))
    corpus = Corpus("test", iter(numbers.split(list(lengths))))
    for batch in corpus.batches(batch_size, None):
        if skip_first:
            batch = batch.without_first()
        x = torch.stack([torch.stack([vectors[int(i)] for i in row]) for row in batch.ids])
        engine.start_batch(batch)
        engine.add(0, x, [0])
        engine.add(1, x, [0])
    sums = engine.finish(torch.ones(1, 1, dtype=torch.bool))
    return {m: sums.alignment("V", m)[:, 0, 0] for m in METRICS}


def close(left, right, tolerance=1e-5):
    for metric in METRICS:
        np.testing.assert_allclose(left[metric], right[metric], rtol=0, atol=tolerance)


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_the_full_basis_captures_all_of_a_stream_inside_it(seed):
    A = draw(seed, HEADS, D, D_HEAD)
    inside = draw(seed + 1, TOKENS, D_HEAD) @ A[0].T
    found = measure(A, inside, [TOKENS], thresholds=(1.0,))
    for metric in METRICS:
        assert float(found[metric][0, 0]) == pytest.approx(1, abs=1e-5)


@given(seeds, st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None)
def test_scaling_a_stream_changes_no_alignment(seed, factor):
    A, x = draw(seed, HEADS, D, D_HEAD), draw(seed + 1, TOKENS, D)
    close(measure(A, x, [TOKENS]), measure(A, x * factor, [TOKENS]))


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_an_orthogonal_stream_is_not_seen(seed):
    A = draw(seed, 1, D, D_HEAD)
    basis = torch.linalg.qr(A[0], mode="complete").Q
    outside = draw(seed + 1, TOKENS, D - D_HEAD) @ basis[:, D_HEAD:].T
    for values in measure(A, outside, [TOKENS]).values():
        assert float(values.abs().max()) < 1e-5


@given(seeds, rows, st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_batches_and_sequence_splits_change_nothing(seed, lengths, batch_size):
    A, x = draw(seed, HEADS, D, D_HEAD), draw(seed + 1, sum(lengths), D)
    together = measure(A, x, lengths)
    close(together, measure(A, x, lengths, batch_size=batch_size), 1e-6)
    close(together, measure(A, x, [1] * sum(lengths)), 1e-6)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_heads_together_equal_heads_one_by_one(seed):
    A, x = draw(seed, HEADS, D, D_HEAD), draw(seed + 1, TOKENS, D)
    together = measure(A, x, [TOKENS])
    for head in range(HEADS):
        alone = measure(A[head : head + 1], x, [TOKENS])
        close({m: v[:, head : head + 1] for m, v in together.items()}, alone, 1e-6)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_rotating_the_space_changes_nothing(seed):
    A, x = draw(seed, HEADS, D, D_HEAD), draw(seed + 1, TOKENS, D)
    turn = torch.linalg.qr(draw(seed + 2, D, D)).Q
    close(measure(A, x, [TOKENS]), measure(turn @ A, x @ turn.T, [TOKENS]))


def test_skip_first_leaves_position_zero_out():
    A, x = draw(0, HEADS, D, D_HEAD), draw(1, TOKENS, D)
    close(measure(A, x, [TOKENS], skip_first=True), measure(A, x[1:], [TOKENS - 1]), 1e-6)


@given(seeds, st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_padding_on_either_side_is_the_same_text(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(100, (n,), generator=generator) for n in lengths]
    width = max(lengths) + 2
    left, right = (torch.full((len(texts), width), 7) for _ in range(2))
    left_mask, right_mask = torch.zeros_like(left), torch.zeros_like(right)
    for row, ids in enumerate(texts):
        left[row, width - len(ids) :], left_mask[row, width - len(ids) :] = ids, 1
        right[row, : len(ids)], right_mask[row, : len(ids)] = ids, 1
    options = {"tokenizer": None, "prepend_bos": True, "n_ctx": 64, "d_vocab": 100}
    for ids, mask in ((left, left_mask), (right, right_mask)):
        corpus = read(ids, attention_mask=mask, **options)
        for batch in corpus.batches(8, None):
            for row, expected in enumerate(texts):
                assert batch.ids[row][batch.keep[row]].tolist() == expected.tolist()


@pytest.mark.parametrize("d", [2, 12, 257])
def test_chance_is_what_random_directions_get(d):
    """The closed form against the mean over many isotropic vectors, for k from 1 to d."""
    k = torch.tensor(sorted({1, max(1, d // 3), d})).reshape(1, 1, -1)
    x = torch.randn(20000, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    share = x.square().cumsum(-1) / x.square().sum(-1, keepdim=True)
    for metric, values in (("norm", share.sqrt()), ("energy", share)):
        sampled = values[:, k.flatten() - 1]
        error = 5 * sampled.std(0) / math.sqrt(len(x)) + 1e-12
        difference = sampled.mean(0) - chance_alignment(k, d, metric).flatten()
        assert bool((difference.abs() <= error).all()), (metric, difference, error)

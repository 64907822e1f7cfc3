"""How sure: intervals cover what they say, and boxes that are noise are rare.

The texts are made of sequences whose tokens share a centre, so that tokens are far from
independent and sequences are the only honest unit. Everything runs through the engine that real
runs use.
"""

import numpy as np
import pytest
import torch
from fakes import fake_result

import tl_valuealign as va
from tl_valuealign.engines import TokenEngine
from tl_valuealign.intervals import MIN_SEQUENCES, RatioSums, half_width, withheld
from tl_valuealign.result import assemble
from tl_valuealign.role_result import Checks, Spectra
from tl_valuealign.spectra import HeadDirections
from tl_valuealign.tokens import Batch

D, K, LONGEST = 12, 3, 16
METRICS = ("norm", "energy", "pooled")


def heads(count, generator):
    basis = torch.randn(count, D, K, generator=generator, dtype=torch.float64)
    directions = torch.linalg.qr(basis)[0]
    values = torch.ones(count, K, dtype=torch.float64)
    return HeadDirections(directions, values, torch.full((1, count), K))


def streams(n, length, generator, lift=None):
    """Embedding and full stream [sequence, position, d], each sequence around a centre of its own.

    ``lift`` adds to the full stream a part inside one head's directions."""
    centre = 1.2 * torch.randn(n, 1, D, generator=generator, dtype=torch.float64)
    embed = centre + torch.randn(n, length, D, generator=generator, dtype=torch.float64)
    full = centre + torch.randn(n, length, D, generator=generator, dtype=torch.float64)
    if lift is not None:
        full = full + 3 * full @ lift @ lift.T
    return embed, full


def measure(directions, embed, full, generator, seed):
    """One text of ragged sequences through the engine."""
    n, length = embed.shape[:2]
    ends = torch.randint(LONGEST // 3, length + 1, (n,), generator=generator)
    keep = torch.arange(length)[None] < ends[:, None]
    engine = TokenEngine(
        [[directions]], ("V",), 1, centred=False, dtype=torch.float64, device=torch.device("cpu")
    )
    seeds = tuple(1000 * seed + i for i in range(n))
    engine.start_batch(Batch(torch.zeros(n, length, dtype=torch.int64), keep, seeds))
    engine.add(0, embed, [0])
    engine.add(1, full, [0])
    return engine.finish(torch.tensor([[True]]))


def as_result(directions, sums, metric="norm"):
    count = directions.n_directions[:, None]
    width = directions.singular_values[None]
    spectra = Spectra(
        width,
        count,
        count[0],
        torch.zeros_like(count, dtype=torch.bool),
        torch.ones_like(count, dtype=torch.float64),
    )
    zeros = torch.zeros(1, dtype=torch.float64)
    return assemble(
        {"V": spectra},
        sums,
        sources=("embed",),
        layers=(0,),
        thresholds=(0.9,),
        metric=metric,
        checks=Checks(zeros, 1.0, {"V": zeros}, 1.0),
        provenance={},
    )


def truth(directions, stream):
    """Every metric of a long stream [sequence, position, d], {metric: [head]}."""
    flat = stream.flatten(0, 1)
    inside = torch.einsum("td,hdk->htk", flat, directions.directions).square().sum(-1)
    whole = flat.square().sum(-1)
    return {
        "norm": (inside / whole).sqrt().mean(1),
        "energy": (inside / whole).mean(1),
        "pooled": inside.sum(1) / whole.sum(),
    }


@pytest.mark.parametrize("n", [MIN_SEQUENCES, 24])
def test_95_percent_intervals_cover_93_to_97_percent(n):
    generator = torch.Generator().manual_seed(n)
    directions = heads(8, generator)
    population = streams(150_000, 4, generator)
    known = [truth(directions, stream) for stream in population]
    hits = {(metric, what): [] for metric in METRICS for what in ("embed", "full", "difference")}
    for seed in range(300):
        sums = measure(directions, *streams(n, LONGEST, generator), generator, seed)
        for metric in METRICS:
            result = as_result(directions, sums, metric)
            for what, true in (("embed", known[0][metric]), ("full", known[1][metric])):
                low, high = result.interval("V", what)
                hits[metric, what].append((low[0] <= true) & (true <= high[0]))
            effective = sums.effective_sequences(metric)[-1]
            width = half_width(result.V.excess_stderr[0, 0], effective)
            wrong = result.V.excess[0, 0] - (known[1][metric] - known[0][metric])
            hits[metric, "difference"].append(wrong.abs() <= width)
    for name, found in hits.items():
        covered = float(torch.stack(found).double().mean())
        assert 0.93 <= covered <= 0.97, (name, covered)


def test_tokens_as_units_would_be_far_too_sure():
    """The simulation has something to get wrong: the naive error is much too small."""
    generator = torch.Generator().manual_seed(1)
    directions = heads(8, generator)
    embed, full = streams(40, LONGEST, generator)
    sums = measure(directions, embed, full, generator, 0)
    ours = sums.stderr("V", "energy")[0, 1, 0]
    inside = torch.einsum("std,hdk->hstk", full, directions.directions).square().sum(-1)
    share = (inside / full.square().sum(-1)).flatten(1)
    naive = share.std(1) / share.shape[1] ** 0.5
    assert float((ours / naive).mean()) > 1.8


@pytest.mark.parametrize("n", [MIN_SEQUENCES, 20])
def test_under_the_null_boxes_that_survive_are_rare(n):
    """Embedding and full stream have one law: any surviving box is false."""
    generator = torch.Generator().manual_seed(100 + n)
    directions = heads(40, generator)
    plain, firm, texts = 0, [], 300
    for seed in range(texts):
        result = as_result(
            directions, measure(directions, *streams(n, LONGEST, generator), generator, seed)
        )
        plain += int(result.boxes().sum())
        firm.append(int(result.boxes(significant=True).sum()))
    assert 0.45 < plain / (40 * texts) < 0.55  # the plain comparison is a coin
    assert sum(firm) / (40 * texts) <= 0.05
    # Under the complete null the false discovery rate is the rate of texts with any box.
    slack = 2.5 * (0.05 * 0.95 / texts) ** 0.5
    assert sum(count > 0 for count in firm) / texts <= 0.05 + slack


def test_real_boxes_survive():
    generator = torch.Generator().manual_seed(3)
    directions = heads(40, generator)
    lift = directions.directions[7]
    found = [
        as_result(
            directions,
            measure(directions, *streams(24, LONGEST, generator, lift=lift), generator, seed),
        ).boxes(significant=True)
        for seed in range(20)
    ]
    assert all(bool(boxes[0, 7]) for boxes in found)


def test_the_bootstrap_agrees_with_the_jackknife():
    """Two roads to the paired error of full − embedding that share no code."""
    generator = torch.Generator().manual_seed(4)
    directions = heads(8, generator)
    embed, full = streams(60, LONGEST, generator)
    keep = torch.arange(LONGEST)[None] < torch.randint(5, LONGEST + 1, (60, 1), generator=generator)
    engine = TokenEngine(
        [[directions]], ("V",), 1, centred=False, dtype=torch.float64, device=torch.device("cpu")
    )
    engine.start_batch(Batch(torch.zeros(60, LONGEST, dtype=torch.int64), keep, tuple(range(60))))
    engine.add(0, embed, [0])
    engine.add(1, full, [0])
    difference, error = engine.finish(torch.tensor([[True]])).excess("V", "norm")
    per_token = []
    for stream in (embed, full):
        inside = torch.einsum("std,hdk->hstk", stream, directions.directions).norm(dim=-1)
        per_token.append((inside / stream.norm(dim=-1)).numpy())
    gap, kept = per_token[1] - per_token[0], keep.numpy()
    totals, counts = (gap * kept).sum(2), kept.sum(1)
    left = (totals.sum(1, keepdims=True) - totals) / (counts.sum() - counts)
    jackknife = np.sqrt(59 / 60 * ((left - left.mean(1, keepdims=True)) ** 2).sum(1))
    np.testing.assert_allclose(difference[0, 0], totals.sum(1) / counts.sum(), rtol=1e-9)
    ratio = error[0, 0].numpy() / jackknife
    assert 0.85 < ratio.mean() < 1.15 and ratio.min() > 0.7 and ratio.max() < 1.4


@pytest.mark.parametrize("n", [1, 2, MIN_SEQUENCES - 1])
def test_too_few_sequences_withhold_intervals_and_keep_the_figures(n):
    result = fake_result(3, 2, n_sequences=n, zero_head=None)
    assert not result.V.full.isnan().any()
    assert result.V.full_stderr.isnan().all() and result.V.excess_stderr.isnan().all()
    assert all(limit.isnan().all() for limit in result.interval("V", "embed"))
    assert not result.boxes(significant=True).any()
    assert withheld(n) == f"intervals withheld: {n} sequences, fewer than {MIN_SEQUENCES}"
    assert withheld(MIN_SEQUENCES) == ""


def test_a_running_ratio_equals_the_same_ratio_at_once():
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(30, 4, 3, generator=generator)
    b = torch.rand(30, 1, 3, generator=generator) + 0.5
    whole, parts = RatioSums(), RatioSums()
    whole.add(a, b)
    for chunk in range(0, 30, 7):
        parts.add(a[chunk : chunk + 7], b[chunk : chunk + 7])
    torch.testing.assert_close(whole.ratio(), parts.ratio())
    torch.testing.assert_close(whole.stderr(), parts.stderr())
    ratio = a.double().sum(0) / b.double().sum(0)
    torch.testing.assert_close(whole.ratio(), ratio)
    residual = (a - ratio * b).square().sum(0)
    m = b.double().sum(0) ** 2 / b.double().square().sum(0)
    expected = (residual * (m + 1) / (m - 1)).sqrt() / b.double().sum(0)
    torch.testing.assert_close(whole.stderr(), expected, rtol=1e-6, atol=0)


def test_an_interval_widens_with_its_level_and_refuses_nonsense():
    result = fake_result(3, 2, zero_head=None)
    narrow, wide = (result.interval("V", "full", level=level) for level in (0.5, 0.99))
    assert (wide[0] < narrow[0]).all() and (narrow[1] < wide[1]).all()
    for level in (0, 1, 95):
        with pytest.raises(va.InputError, match="level"):
            result.interval("V", "full", level=level)

"""Compared with what? Where streams have no direction of their own, every null must say so."""

import numpy as np
import pytest
import torch
import zoo
from typeguard import TypeCheckError

import tl_valuealign as va
from tl_valuealign.chance import chance_alignment, random_matrix_directions
from tl_valuealign.nulls import RoleNull
from tl_valuealign.sampled import Reservoir, Sampled
from tl_valuealign.tokens import Batch

D = 24


def subspaces(count, width, generator):
    drawn = torch.randn(count, D, width, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn)[0]


@pytest.mark.parametrize("metric", ["norm", "energy", "pooled"])
def test_isotropic_streams_sit_on_chance_from_one_direction_to_all(metric):
    generator = torch.Generator().manual_seed(0)
    stream = Sampled(torch.randn(20_000, D, generator=generator, dtype=torch.float64), metric)
    scores = stream.scores(subspaces(4, D, generator))
    every = torch.arange(1, D + 1)[None, None]
    chance = chance_alignment(every, D, metric)[0, 0]
    # A token's captured share has a standard deviation below 0.3 at any k.
    assert float((scores - chance).abs().max()) < 5 * 0.3 / 20_000**0.5
    torch.testing.assert_close(scores[:, -1], torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("metric", ["norm", "energy"])
def test_the_covariance_null_of_isotropic_streams_is_chance(metric):
    generator = torch.Generator().manual_seed(1)
    stream = Sampled(torch.randn(4_000, D, generator=generator, dtype=torch.float64), metric)
    drawn = torch.stack(
        [stream.random_subspace(10, generator, centred=True) for _ in range(100)]
    ).mean(0)
    chance = chance_alignment(torch.arange(1, 11)[None, None], D, metric)[0, 0]
    torch.testing.assert_close(drawn, chance, rtol=0.02, atol=0)


def test_the_covariance_null_follows_the_stream():
    """A stream in 5 dimensions is captured whole by any 5 of its own, and by few of random ones."""
    generator = torch.Generator().manual_seed(2)
    plane = subspaces(1, 5, generator)[0]
    tokens = torch.randn(2_000, 5, generator=generator, dtype=torch.float64) @ plane.T
    stream = Sampled(tokens, "energy")
    own = stream.random_subspace(5, generator, centred=True)
    assert float(own[4]) == pytest.approx(1, abs=1e-9)
    assert float(stream.scores(subspaces(50, 5, generator))[:, 4].mean()) < 0.3
    assert 0.15 < float(own[0]) < 0.35  # one of five on average


def test_only_the_second_moment_follows_the_mean():
    """Tokens that share one direction and are otherwise isotropic: their covariance knows nothing
    of it, their second moment little else."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(5_000, D, generator=generator, dtype=torch.float64)
    tokens[:, 0] += 20
    stream = Sampled(tokens, "energy")
    found = {
        centred: torch.stack(
            [stream.random_subspace(3, generator, centred=centred)[2] for _ in range(60)]
        ).mean()
        for centred in (True, False)
    }
    assert float(found[False]) > 0.9
    # The shared direction varies least of all, as the tokens' lengths are taken out.
    assert float(found[True]) < 3 / D
    chance = chance_alignment(torch.tensor([[[3]]]), D, "energy")
    assert float(found[True]) < float(chance)


def test_the_sample_is_even_and_the_same_whatever_the_batches():
    def read(size, batch_size):
        reservoir = Reservoir(size)
        for start in range(0, 40, batch_size):
            rows = torch.arange(start, min(start + batch_size, 40))
            ids = rows[:, None] * 10 + torch.arange(10)
            batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), tuple(rows.tolist()))
            reservoir.add(batch, {("full", 0): ids.flatten()[:, None].double()})
        return reservoir

    chosen = read(50, 8).held["full", 0].flatten()
    assert chosen.equal(read(50, 3).held["full", 0].flatten())
    assert len(chosen.unique()) == 50 and 120 < float(chosen.mean()) < 280
    assert len(read(1000, 8).held["full", 0]) == 400


@pytest.mark.bridge
@pytest.mark.parametrize("null", ["covariance", "other-heads"])
def test_observed_figures_are_those_of_the_analysis(null):
    model, ids = zoo.bridge("gpt2"), zoo.ids(6, 12)
    result = va.null_alignment(
        model, ids, null=null, sources=("embed", "full", "1_attn_out"), progress=False
    )
    truth = va.analyze_value_alignment(model, ids, progress=False)
    for role in ("Q", "K", "V"):
        found = getattr(result, role)
        want = getattr(truth, role)
        torch.testing.assert_close(found.observed[:, 0], want.by_source[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(found.observed[:, 1], want.full, rtol=0, atol=1e-5)
        late = truth.source_index("1_attn_out")
        torch.testing.assert_close(
            found.observed[:, 2], want.by_source[:, late], rtol=0, atol=1e-5, equal_nan=True
        )
        assert found.observed[:, 2, :2].isnan().all() and not found.expected[:, 2, 2].isnan().any()


@pytest.mark.bridge
def test_other_heads_by_hand():
    """All heads kept to one direction each, so that every head is cut to as many."""
    model, ids = zoo.bridge("llama"), zoo.ids(6, 12)
    result = va.null_alignment(
        model, ids, null="other-heads", thresholds=(1e-6,), metric="energy", progress=False
    )
    truth = va.analyze_value_alignment(
        model, ids, thresholds=(1e-6,), metric="energy", progress=False
    )
    embed = truth.V.by_source[0, 0].flatten()
    for head, own in enumerate(embed):
        others = torch.cat([embed[:head], embed[head + 1 :]])
        at = (0, 0, head // 2, head % 2)
        assert float(result.V.expected[at]) == pytest.approx(float(others.mean()), abs=1e-5)
        assert float(result.V.spread[at]) == pytest.approx(float(others.std()), abs=1e-5)
        rank = float((others < own).double().mean())
        assert float(result.V.percentile[at]) == pytest.approx(rank)
    torch.testing.assert_close(result.V.relative, result.V.observed / result.V.expected)


@pytest.mark.bridge
def test_nulls_are_seeded_and_said():
    model, ids = zoo.bridge("llama"), zoo.ids(4, 12)
    first, again, other = (
        va.null_alignment(model, ids, seed=seed, draws=8, progress=False) for seed in (0, 0, 1)
    )
    assert torch.equal(first.V.expected, again.V.expected)
    assert not torch.equal(first.V.expected, other.V.expected)
    assert first.null == "covariance" and first.n_tokens == 48
    frame = first.to_dataframe()
    assert len(frame) == 2 * 2 * 3 * (4 + 2 + 2)
    with pytest.raises(va.InputError, match="null: 'coin'"):
        va.null_alignment(model, ids, null="coin", progress=False)
    for options, words in (
        ({"sources": ("9_attn_out",)}, "'9_attn_out'"),
        ({"sources": None}, "sources: expected"),
        ({"sources": [["embed"]]}, "sources: expected strings"),
        ({"seed": None}, "seed: expected a whole number"),
        ({"draws": 1}, "draws: one subspace has no spread"),
    ):
        with pytest.raises(va.InputError, match=words):
            va.null_alignment(model, ids, progress=False, **options)
    second = va.null_alignment(model, ids, null="second-moment", draws=8, progress=False)
    assert not torch.equal(first.V.expected, second.V.expected)
    with pytest.raises(TypeCheckError, match="RoleNull.spread"):
        RoleNull(first.V.observed, first.V.observed, first.V.observed[0], first.V.observed)


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_random_model_has_boxes_at_the_rate_of_a_coin(name):
    """No head has learned anything, so the full stream beats the embedding half of the time."""
    boxes = []
    for seed in range(24):
        result = va.analyze_value_alignment(
            zoo.bridge(name, seed=seed), zoo.ids(4, 16, seed=seed), progress=False
        )
        # Block 0 of a rotary model has the embedding as its full stream.
        for role in ("Q", "K", "V"):
            boxes.append(result.boxes(role=role)[1:].flatten())
    boxes = torch.cat(boxes).double()
    # Heads of one model share their streams: count models, not heads, as independent.
    assert abs(float(boxes.mean()) - 0.5) < 0.12, float(boxes.mean())


def test_a_random_matrix_needs_the_directions_of_marchenko_and_pastur():
    """The law of large matrices, integrated numerically, against the seeded draws."""
    ratio, share = 64 / 576, 0.9
    low, high = (1 - ratio**0.5) ** 2, (1 + ratio**0.5) ** 2
    x = np.linspace(low, high, 200_001)[1:-1]
    density = np.sqrt((high - x) * (x - low)) / (2 * np.pi * ratio * x)
    order = slice(None, None, -1)
    mass, energy = np.cumsum(density[order]), np.cumsum((density * x)[order])
    needed = 64 * np.interp(share, energy / energy[-1], mass / mass[-1])
    assert random_matrix_directions(576, 64, share) == pytest.approx(needed, abs=1.0)
    assert random_matrix_directions(64, 64, 1.0) == 64

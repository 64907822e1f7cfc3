"""Both engines against a float64 loop over heads, on streams as awkward as real ones."""

import numpy as np
import pytest
import streams
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_valuealign.shapes import METRICS

seeds = st.integers(0, 2**31)
KINDS = [("moments", ("energy", "pooled")), ("tokens", ("pooled",)), ("tokens", ())]
IDS = ["moments", "tokens", "tokens alone"]


def agree(sums, truth, *, metrics=METRICS, alignment=1e-6, relative=1e-6):
    for role, (expected, projected) in truth.items():
        for metric in metrics:
            np.testing.assert_allclose(
                sums.alignment(role, metric),
                expected[METRICS.index(metric)],
                rtol=0,
                atol=alignment,
                err_msg=f"{role} {metric}",
            )
        np.testing.assert_allclose(sums.projected(role), projected, rtol=relative, err_msg=role)


def metrics_of(kind):
    return METRICS[1:] if kind == "moments" else METRICS


@pytest.mark.parametrize("kind, moments", KINDS, ids=IDS)
@given(seed=seeds, centred=st.booleans())
@settings(max_examples=15, deadline=None)
def test_engines_agree_with_a_loop_over_heads(kind, moments, seed, centred):
    world = streams.world(seed)
    engine = streams.eat(streams.engine_of(world, kind, moments=moments, centred=centred), world)
    sums = engine.finish(world.upstream)
    agree(sums, streams.truth(world, centred=centred), metrics=metrics_of(kind))
    expected = world.streams.double()
    expected = (expected - centred * expected.mean(-1, keepdim=True)).norm(dim=-1).mean(-1)
    np.testing.assert_allclose(sums.mean_norms()[:-1, 0], expected[: world.sources], rtol=1e-6)
    np.testing.assert_allclose(sums.mean_norms()[-1], expected[world.sources :], rtol=1e-6)


@pytest.mark.parametrize("kind, moments", KINDS, ids=IDS)
@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_one_token_of_another_size_costs_no_digits(kind, moments, factor):
    world = streams.world(3, d=300, lengths=(40, 40, 40, 40))
    world.streams[:, 45] *= factor
    # One head per role sees nothing of the odd token, whose squares are a million times all others.
    odd = torch.linalg.qr(world.streams[:, 45].double().T).Q
    for found in world.matrices.values():
        for A in found:
            A[0] -= (odd @ (odd.T @ A[0].double())).float()
    engine = streams.eat(streams.engine_of(world, kind, moments=moments), world)
    sums = engine.finish(world.upstream)
    truth = streams.truth(world)
    projected = truth["V"][1][:, 2]
    assert factor < 1 or bool((projected[:, 0] < projected[:, 1] / 1000).all())
    # Without moments the odd token's own rounding in float32 is not averaged over others.
    relative = 1e-6 if moments else 5e-6
    agree(sums, truth, metrics=metrics_of(kind), relative=relative)


@pytest.mark.parametrize("kind, moments", KINDS, ids=IDS)
@pytest.mark.parametrize("factor", [1e-18, 1e18])
def test_squares_beyond_float32_neither_vanish_nor_overflow(kind, moments, factor):
    world = streams.world(4)
    world.streams *= factor
    engine = streams.eat(streams.engine_of(world, kind, moments=moments), world)
    agree(engine.finish(world.upstream), streams.truth(world), metrics=metrics_of(kind))


@pytest.mark.parametrize("kind, moments", KINDS, ids=IDS)
def test_zero_tokens_and_zero_heads_are_left_out(kind, moments):
    world = streams.world(5)
    world.streams[:, 3] = 0
    world.matrices["V"][1][0] = 0
    engine = streams.eat(streams.engine_of(world, kind, moments=moments), world)
    sums = engine.finish(world.upstream)
    truth = streams.truth(world)
    truth["V"][0][:, :, :, 1, 0] = torch.nan
    agree(sums, truth, metrics=metrics_of(kind))
    assert (sums.zero_norm_tokens() == 1).all()
    assert float(sums.projected("V")[:2, 1, 0].abs().max()) == 0


@pytest.mark.parametrize("kind, moments", KINDS, ids=IDS)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_batches_change_nothing(kind, moments, batch_size):
    world = streams.world(9)
    few, many = (
        streams.eat(streams.engine_of(world, kind, moments=moments), world, batch_size=size)
        for size in (3, batch_size)
    )
    for one, other in zip(few.additive(), many.additive(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind, moments", KINDS, ids=IDS)
def test_float64_is_kept(kind, moments):
    world = streams.world(11)
    world.streams = world.streams.double()
    engine = streams.engine_of(world, kind, moments=moments, dtype=torch.float64)
    sums = streams.eat(engine, world).finish(world.upstream)
    agree(sums, streams.truth(world), metrics=metrics_of(kind), alignment=1e-12, relative=1e-12)


def test_the_token_engine_projects_only_what_a_threshold_needs():
    world = streams.world(13, d_head=12)
    few = streams.engine_of(world, "tokens", moments=("pooled",))
    all_of_them = streams.engine_of(world, "tokens", moments=())
    for pack, every in zip(few.packs, all_of_them.packs, strict=True):
        assert len(every.rows) == 6 * 12
        assert len(pack.rows) < len(every.rows)


def test_the_moment_engine_claims_no_errors():
    world = streams.world(17)
    sums = streams.eat(streams.engine_of(world, "moments"), world).finish(world.upstream)
    assert sums.n_sequences >= 8
    assert sums.stderr("V", "energy").isnan().all()
    assert sums.excess("V", "energy")[1].isnan().all()
    assert not sums.excess("V", "energy")[0].isnan().any()
    assert sums.alignment("V", "norm").isnan().all()
    tokens = streams.eat(streams.engine_of(world, "tokens"), world).finish(world.upstream)
    assert not tokens.stderr("V", "energy")[:, 0].isnan().any()

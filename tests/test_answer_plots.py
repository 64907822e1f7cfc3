"""Figures of token identity and of sampled nulls draw what the results hold."""

import numpy as np
import pytest
import torch
from typeguard import TypeCheckError

from tl_valuealign import InputError, plot_identity, plot_null
from tl_valuealign.identity import IdentityResult, RoleIdentity
from tl_valuealign.nulls import NullResult, RoleNull

FACTS = {"model_name": "tiny <b>", "n_tokens": 1000, "n_sequences": 12}
HEADS = {"Q": 4, "K": 2, "V": 2}


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.05


@pytest.fixture
def identity():
    roles = {}
    for seed, (role, heads) in enumerate(HEADS.items()):
        share = drawn(3, heads, seed=seed)
        share[1, 0] = torch.nan
        roles[role] = RoleIdentity(share, drawn(3, heads, seed=9))
    return IdentityResult(roles, (2, 5, 7), 900, 80, False, FACTS)


@pytest.fixture
def null():
    roles = {}
    for seed, (role, heads) in enumerate(HEADS.items()):
        shape = (2, 2, 3, heads)
        observed, expected = drawn(*shape, seed=seed), drawn(*shape, seed=seed + 5)
        roles[role] = RoleNull(observed, expected, drawn(*shape, seed=7), drawn(*shape) / 2)
    sources = ("embed", "full")
    return NullResult(roles, sources, (2, 5, 7), (0.9, 0.5), "norm", "covariance", 500, FACTS)


def grids(figure):
    heats = [t for t in figure.data if t.type == "heatmap" and not t.meta.get("missing")]
    return {trace.meta["role"]: trace for trace in heats}


def test_identity_shows_every_role_s_shares_from_0_to_1(identity):
    figure = plot_identity(identity)
    found = grids(figure)
    assert set(found) == set(HEADS)
    for role, trace in found.items():
        np.testing.assert_allclose(trace.z, identity.role(role).share, rtol=1e-6)
        layers = np.repeat([[2], [5], [7]], HEADS[role], axis=1)
        np.testing.assert_array_equal(trace.customdata[..., -1], layers)
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    assert "900 vectors of 80 distinct tokens" in figure.layout.title.subtitle.text
    assert "<b>" not in figure.layout.title.subtitle.text
    assert any(trace.showlegend and "unknown" in trace.name for trace in figure.data)
    shuffled = IdentityResult(identity.roles, (2, 5, 7), 900, 80, True, FACTS)
    assert "shuffled" in plot_identity(shuffled).layout.title.subtitle.text


@pytest.mark.parametrize(("source", "threshold"), [(None, None), ("full", 0.5), ("embed", 0.5)])
def test_a_null_is_the_middle_of_a_log_scale(null, source, threshold):
    figure = plot_null(null, source, threshold=threshold)
    place = 0 if source is None else null.sources.index(source)
    at = 0 if threshold is None else null.thresholds.index(threshold)
    for role, trace in grids(figure).items():
        values = null.role(role)
        ratio = values.observed[at, place] / values.expected[at, place]
        np.testing.assert_allclose(trace.z, ratio.log2(), atol=1e-6)
        np.testing.assert_allclose(trace.customdata[..., 0], values.observed[at, place], atol=1e-6)
        np.testing.assert_allclose(trace.customdata[..., 3], ratio, rtol=1e-6)
    axis = figure.layout.coloraxis
    assert axis.cmin == -axis.cmax
    assert axis.colorbar.ticktext[axis.colorbar.tickvals.index(0)] == "1× <b>null</b>"


def test_what_is_not_there_is_refused(identity, null):
    with pytest.raises(InputError, match="embed, full"):
        plot_null(null, "3_attn_out")
    with pytest.raises(InputError, match="0.9, 0.5"):
        plot_null(null, threshold=0.7)
    for plot, wrong in ((plot_identity, null), (plot_null, identity)):
        with pytest.raises(TypeCheckError):
            plot(wrong)

"""How close is close: a result of the package against the oracle's."""

import numpy as np

ALIGNMENT, RELATIVE = 2e-5, 1e-4


def assert_agrees(result, truth, *, alignment=ALIGNMENT, relative=RELATIVE):
    """Every figure of ``result`` against ``oracle.run``; both must be NaN in the same places."""
    assert list(result.layers) == truth.layers
    rows = [truth.labels.index(label) for label in result.sources]
    np.testing.assert_allclose(result.norms, truth.norms[rows], rtol=relative)
    np.testing.assert_allclose(result.full_norms, truth.full_norms, rtol=relative)
    for name, mine in result.roles.items():
        theirs = getattr(truth, name)
        message = f"role {name}"
        np.testing.assert_array_equal(mine.n_directions, theirs.k, err_msg=message)
        np.testing.assert_array_equal(mine.numerical_rank, theirs.rank, err_msg=message)
        singular = theirs.s[..., : mine.singular_values.shape[-1]]
        np.testing.assert_allclose(mine.singular_values, singular, rtol=1e-5, atol=1e-7)
        metric = result.metric
        pairs = (
            (mine.chance, theirs.chance[metric], 1e-12),
            (mine.full, theirs.full[metric], alignment),
            (mine.by_source, theirs.by_source[metric][:, rows], alignment),
        )
        for got, want, tolerance in pairs:
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=message)
        np.testing.assert_allclose(
            mine.projected_sq_norm, theirs.projected[rows], rtol=relative, err_msg=message
        )
        np.testing.assert_allclose(
            mine.projected_sq_norm_full, theirs.projected_full, rtol=relative, err_msg=message
        )

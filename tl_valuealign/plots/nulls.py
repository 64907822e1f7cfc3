"""A stream's alignment beside a sampled null."""

import numpy as np
import plotly.graph_objects as go

from tl_valuealign import arguments
from tl_valuealign.describe import METRIC_WORDS
from tl_valuealign.nulls import NullResult
from tl_valuealign.plots.canvas import Canvas, Look
from tl_valuealign.plots.common import Array, relative_scale, safe, share, source_words
from tl_valuealign.plots.grid import draw_zero_heads, name_gaps
from tl_valuealign.plots.role_grids import RoleGrid, draw_role_grids
from tl_valuealign.shapes import typed

NULL_WORDS = {
    "covariance": "random subspaces drawn through the stream’s own covariance",
    "second-moment": "random subspaces drawn through the stream’s own second moment",
    "other-heads": "the same stream against the directions of every other head",
}


@typed
def plot_null(
    result: NullResult, source: str | None = None, *, threshold: float | None = None
) -> go.Figure:
    """Alignment over what the null expects, one grid per role, on a log scale centred on 1.

    ``source``: one of the result's; None for the first. ``threshold``: None for the first. Hovering
    tells the observed figure, the null's mean and spread, and the share of the null below.
    Raises ``InputError`` if source or threshold is not in the result.
    """
    source = result.sources[0] if source is None else source
    index = arguments.threshold_index(threshold, result.thresholds, "null_alignment")
    return draw_null(result, source, index, Look())


def draw_null(result: NullResult, source: str, index: int, look: Look) -> go.Figure:
    """The same in any look."""
    arguments.choices("source", source, result.sources)
    place, p = result.sources.index(source), result.provenance
    canvas = Canvas(
        f"Is the {source_words(source)} more aligned than its null?",
        [
            f"{safe(p['model_name'])} · {result.n_tokens:,} sampled tokens · directions carrying "
            f"{share(result.thresholds[index])} of squared singular values",
            f"null: {NULL_WORDS[result.null]}",
            f"colour: {METRIC_WORDS[result.metric]}, divided by the null’s mean (log scale)",
        ],
        look,
    )
    grids = [_grid(result, role, place, index) for role in result.roles]
    panels, width, height = draw_role_grids(canvas, result.layers, grids)
    for grid, panel in zip(grids, panels, strict=True):
        draw_zero_heads(canvas, panel, ~np.isfinite(grid.z), result.layers, role=grid.role)
    name_gaps(canvas, "not upstream, or a zero matrix")
    scale = relative_scale(grid.z for grid in grids)
    words = [word.replace("chance", "null") for word in scale["colorbar"]["ticktext"]]
    canvas.layout["coloraxis"] = scale | {"colorbar": scale["colorbar"] | {"ticktext": words}}
    return canvas.figure(width, height)


def _grid(result: NullResult, role: str, place: int, index: int) -> RoleGrid:
    values = result.role(role)
    names = ("observed", "expected", "spread", "relative", "percentile")
    numbers = [getattr(values, name)[index, place].numpy() for name in names]
    blocks = np.array(result.layers, dtype=float)[:, None]
    layer: Array = np.broadcast_to(blocks, numbers[0].shape)
    template = (
        f"<b>L%{{customdata[5]}}H%{{x}} · {safe(role)} · {source_words(result.sources[place])}</b>"
        "<br>alignment %{customdata[0]:.3f}<br>"
        "null %{customdata[1]:.3f}, spread %{customdata[2]:.3f}<br>"
        "%{customdata[3]:.2f} × null, above %{customdata[4]:.1%} of it<extra></extra>"
    )
    with np.errstate(divide="ignore"):
        z = np.log2(numbers[3])
    return RoleGrid(role, z, np.stack([*numbers, layer], axis=-1), template)

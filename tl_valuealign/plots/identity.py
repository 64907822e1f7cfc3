"""How much of every head's vectors the token alone explains."""

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.identity import IdentityResult
from tl_valuealign.plots.canvas import Canvas, Look
from tl_valuealign.plots.common import Array, safe, value_scale
from tl_valuealign.plots.grid import draw_zero_heads, name_gaps
from tl_valuealign.plots.role_grids import RoleGrid, draw_role_grids
from tl_valuealign.shapes import typed


@typed
def plot_identity(result: IdentityResult) -> go.Figure:
    """Share of the variance of every head's vectors that lies between tokens, one grid per role.

    1 is a table looked up by token, 0 a vector that owes the token nothing. Where no token occurs
    twice all is unknown.
    """
    return draw_identity(result, Look())


def draw_identity(result: IdentityResult, look: Look) -> go.Figure:
    """The same in any look."""
    p = result.provenance
    canvas = Canvas(
        "How much of each head’s vectors the token alone explains",
        [
            f"{safe(p['model_name'])} · {result.n_tokens:,} vectors of "
            f"{result.n_distinct:,} distinct tokens",
            "colour: variance between tokens over all variance, corrected for chance",
            "control: ids were shuffled, so 0 is expected" if result.shuffled else "",
        ],
        look,
    )
    canvas.subtitle = [line for line in canvas.subtitle if line]
    grids = [_grid(result, role) for role in result.roles]
    panels, width, height = draw_role_grids(canvas, result.layers, grids)
    for grid, panel in zip(grids, panels, strict=True):
        draw_zero_heads(canvas, panel, ~np.isfinite(grid.z), result.layers, role=grid.role)
    name_gaps(canvas, "unknown: no variance, or no token that occurs twice")
    canvas.layout["coloraxis"] = value_scale(0.0, 1.0, None)
    return canvas.figure(width, height)


def _grid(result: IdentityResult, role: str) -> RoleGrid:
    share = result.role(role).share.numpy()
    total = result.role(role).total.numpy()
    layer: Array = np.broadcast_to(np.array(result.layers, dtype=float)[:, None], share.shape)
    template = (
        f"<b>L%{{customdata[2]}}H%{{x}} · {safe(role)}</b><br>"
        "share between tokens %{customdata[0]:.3f}<br>"
        "of variance %{customdata[1]:.3g}<extra></extra>"
    )
    return RoleGrid(role, share, np.stack([share, total, layer], axis=-1), template)

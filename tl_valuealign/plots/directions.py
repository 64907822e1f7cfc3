"""How concentrated each head's read-in matrix is: directions needed, and numerical rank."""

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.canvas import BAR_GAP, Canvas, Look
from tl_valuealign.plots.common import SEQUENTIAL, known, safe, share, subtitle
from tl_valuealign.plots.grid import (
    draw_cells,
    draw_zero_heads,
    fit,
    head_axis,
    layer_axis,
    name_gaps,
)
from tl_valuealign.plots.sources import NAMES
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.shapes import typed

LEFT, BETWEEN, HEADING, UNDER = 56, 28, 22, 50
NARROWEST, ROOM_FOR_DIGITS = 196, 17


@typed
def plot_directions(
    result: ValueAlignmentResult, *, role: str = "V", threshold: float | None = None
) -> go.Figure:
    """Directions that carry the threshold's share of squared singular values, and numerical rank.

    Two grids on one scale from 0 to d_head, the counts written in the cells while they fit.
    Raises ``InputError`` for a role or threshold that was not measured.
    """
    result.role(role)
    return draw_directions(result, role, result.threshold_index(threshold), Look())


def draw_directions(result: ValueAlignmentResult, role: str, index: int, look: Look) -> go.Figure:
    """Both grids side by side where the page holds them."""
    values = result.role(role)
    counts, rank = values.n_directions[index].numpy(), values.numerical_rank.numpy()
    d_head = values.singular_values.shape[-1]
    canvas = Canvas(
        f"{NAMES.get(role, role)} heads: how many directions they read from",
        subtitle(result, index, f"colour and number: how many of a head’s {d_head} directions"),
        look,
    )
    layers, heads = rank.shape
    cells = fit(layers, heads, 280 if look.narrow else 400, 500)
    across = max(cells.width, -(-NARROWEST // heads)) * heads + 2
    columns = 1 if look.narrow or LEFT + 2 * across + 150 > look.page else 2
    block = HEADING + cells.down + UNDER
    written = cells.height >= 13 and (across - 2) // heads >= ROOM_FOR_DIGITS
    part = share(result.thresholds[index])
    for place, (shown, title) in enumerate(
        ((counts, f"directions for {part}"), (rank, "numerical rank"))
    ):
        line, column = divmod(place, columns)
        left, top = LEFT + column * (across + BETWEEN), line * block + HEADING
        panel = canvas.panel(
            left,
            top,
            across,
            cells.down,
            x=head_axis(heads, (across - 2) / heads),
            y=layer_axis(result.layers, cells.height, labels=column == 0),
        )
        average = f", mean {known(shown).mean():.1f}" if shown.size else ""
        canvas.note(f"<b>{title}</b>{average}", left, top - 5, yanchor="bottom")
        layer = np.broadcast_to(np.array(result.layers)[:, None], rank.shape)
        behind = np.stack([counts, rank, layer], axis=-1)
        zero = rank == 0
        draw_cells(
            canvas,
            panel,
            np.where(zero, np.nan, shown),
            behind,
            f"<b>L%{{customdata[2]}}H%{{x}} · {safe(role)}</b><br>%{{customdata[0]}} of {d_head} "
            f"directions carry {part}<br>numerical rank %{{customdata[1]}}<extra></extra>",
            role=role,
            gap=1 if cells.height >= 12 else 0,
            texttemplate="%{z:d}" if written else None,
            textfont={"size": 10},
        )
        draw_zero_heads(canvas, panel, zero, result.layers, role=role)
    name_gaps(canvas, "zero read-in matrix")
    canvas.layout["coloraxis"] = _scale(d_head)
    right = LEFT + columns * (across + BETWEEN) - BETWEEN
    width = canvas.colour_bar(right + BAR_GAP, HEADING, max(cells.down, 120))
    return canvas.figure(width, -(-2 // columns) * block)


def _scale(d_head: int) -> dict[str, object]:
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, d_head) if d_head / s <= 8)
    ticks = list(range(0, d_head + 1, step))
    return {
        "colorscale": SEQUENTIAL,
        "cmin": 0,
        "cmax": d_head,
        "colorbar": {"tickvals": ticks, "ticktext": [str(tick) for tick in ticks]},
    }

"""How much each earlier output adds to a head's vector: mean squared norm after the read-in."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.canvas import BAR_GAP, Canvas, Look
from tl_valuealign.plots.common import (
    SEQUENTIAL,
    Array,
    known,
    log_ticks,
    plain,
    safe,
    share,
    subtitle,
)
from tl_valuealign.plots.grid import name_gaps
from tl_valuealign.plots.rows import HEADING, draw_rows, layer_rows
from tl_valuealign.plots.sources import NAMES
from tl_valuealign.result import FULL, ValueAlignmentResult
from tl_valuealign.shapes import typed

VECTOR = {"Q": "query", "K": "key", "V": "value", "OV": "value-output"}


@typed
def plot_projected_norms(
    result: ValueAlignmentResult, *, role: str = "V", layers: Sequence[int] | None = None
) -> go.Figure:
    """Mean ‖x̄ A‖² of every source in the heads of some blocks, on a log colour scale.

    The full stream's own squared norm is the top row, for reference. ``layers`` as in
    :func:`plot_sources`. Raises ``InputError`` for a role or block that was not measured.
    """
    result.role(role)
    return draw_projected_norms(result, role, layer_rows(result, layers), Look())


def draw_projected_norms(
    result: ValueAlignmentResult, role: str, rows: Sequence[int], look: Look
) -> go.Figure:
    """As many grids side by side as a page holds, or one where the page is narrow."""
    values = result.role(role)
    canvas = Canvas(
        f"{NAMES.get(role, role)} heads: how much each earlier output adds to the "
        f"{VECTOR.get(role, 'head')} vector",
        subtitle(
            result, None, "colour: mean squared norm ‖x̄A‖², log scale; the full stream on top"
        ),
        look,
    )

    def cells(row: int, sources: Sequence[str]) -> tuple[Array, Array]:
        squares = _squares(result, role, sources)[:, row]
        full = _squares(result, role, [FULL])[0, row]
        behind = np.stack(
            [
                squares,
                squares / full,
                np.broadcast_to(values.n_directions[0, row].numpy(), squares.shape),
                np.broadcast_to(values.numerical_rank[row].numpy(), squares.shape),
                np.full(squares.shape, result.layers[row]),
            ],
            axis=-1,
        )
        return np.log10(squares), behind

    part = share(result.thresholds[0])
    d_head = values.singular_values.shape[-1]
    width, height, down = draw_rows(
        canvas,
        result,
        role,
        rows,
        cells,
        lambda source: (
            f"<b>L%{{customdata[4]}}H%{{x}} · {safe(role)} · {source}</b><br>"
            "squared norm %{customdata[0]:.3g}<br>"
            "%{customdata[1]:.3g} × that of the full stream<br>"
            f"%{{customdata[2]}} of {d_head} directions carry {part}<br>"
            "numerical rank %{customdata[3]}<extra></extra>"
        ),
        summary=lambda row: _means(result, role, row),
        full=True,
    )
    name_gaps(canvas, "not upstream of this block")
    shown = [np.log10(_squares(result, role, [*result.sources, FULL]))[:, row] for row in rows]
    canvas.layout["coloraxis"] = _log_scale(np.concatenate([known(part) for part in shown]))
    width = canvas.colour_bar(width + BAR_GAP, HEADING, min(max(down, 120), 340))
    return canvas.figure(width, height)


def _squares(result: ValueAlignmentResult, role: str, sources: Sequence[str]) -> Array:
    """Mean squared norms, [source, layer, head]; NaN where there is nothing to show on a log."""
    values = result.role(role)
    parts = [
        values.projected_sq_norm_full
        if source == FULL
        else values.projected_sq_norm[result.source_index(source)]
        for source in sources
    ]
    if not parts:
        return np.empty((0, *values.numerical_rank.shape))
    squares = np.stack([part.numpy() for part in parts])
    return np.where(squares > 0, squares, np.nan)


def _means(result: ValueAlignmentResult, role: str, row: int) -> str:
    embed, full = (_squares(result, role, [source])[0, row] for source in (result.sources[0], FULL))
    ratio = known(embed / full)
    return f"embedding: {100 * np.median(ratio):.2g}% of the full stream" if len(ratio) else ""


def _log_scale(values: Array) -> dict[str, object]:
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if high - low < 0.5:
        middle = (low + high) / 2
        low, high = middle - 0.25, middle + 0.25
    ticks = [math.log10(value) for value in log_ticks(low, high)]
    return {
        "colorscale": SEQUENTIAL,
        "cmin": low,
        "cmax": high,
        "colorbar": {"tickvals": ticks, "ticktext": [plain(10**tick) for tick in ticks]},
    }

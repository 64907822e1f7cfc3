"""The full residual stream against every head's input directions, role by role."""

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.boxes import draw_boxes, has_intervals, interval_note
from tl_valuealign.plots.canvas import BAR_GAP, Canvas, Look, Panel
from tl_valuealign.plots.common import (
    EMBED,
    FULL_STREAM,
    GREY,
    KIND,
    Array,
    alignment_range,
    known,
    mean_over_heads,
    metric_words,
    relative_scale,
    safe,
    subtitle,
    thinned,
    value_scale,
)
from tl_valuealign.plots.grid import (
    Cells,
    draw_cells,
    draw_zero_heads,
    fit,
    head_axis,
    hover,
    layer_axis,
    name_gaps,
    numbers,
)
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.shapes import typed

LEFT, BETWEEN, HEADING, UNDER_GRID, STRIP, UNDER_STRIP = 56, 26, 22, 52, 66, 48
NARROWEST_GRID = 116


@typed
def plot_full_stream(
    result: ValueAlignmentResult, threshold: float | None = None, *, relative: bool = False
) -> go.Figure:
    """Full-stream alignment of every head, one grid per role, with boxes on V.

    Beneath each grid a strip shows the layer means of full stream and embedding beside chance.
    ``relative=True`` colours by alignment over chance, on a log scale centred on 1. Where there
    are intervals, solid boxes survive false-discovery control and dotted ones do not. Raises
    ``InputError`` if the threshold was not computed.
    """
    return draw_full_stream(result, result.threshold_index(threshold), relative, Look())


def draw_full_stream(
    result: ValueAlignmentResult, index: int, relative: bool, look: Look
) -> go.Figure:
    """As many grids side by side as a page holds, or one where the page is narrow."""
    canvas = Canvas(
        "How much of the full residual stream lies in each head’s input directions",
        subtitle(result, index, metric_words(result, relative), interval_note(result)),
        look,
    )
    roles = list(result.roles)
    cells = {role: _cells(result, role) for role in roles}
    widest = max(cell.across for cell in cells.values())
    fitting = max(1, min(len(roles), (look.page - LEFT - 110) // (widest + BETWEEN)))
    columns = 1 if look.narrow else fitting
    down = cells[roles[0]].down
    block = HEADING + down + UNDER_GRID + STRIP + UNDER_STRIP
    low, high = _strip_range(result, index, relative)
    right = 0.0
    for place, role in enumerate(roles):
        row, column = divmod(place, columns)
        if column == 0:
            left = float(LEFT)
        top = row * block + HEADING
        panel = _grid(canvas, result, role, index, relative, cells[role], left, top, column == 0)
        strip = canvas.panel(
            left,
            top + down + UNDER_GRID,
            panel.width,
            STRIP,
            x=_block_axis(result, panel.width),
            y={
                "range": [low, high],
                "nticks": 4,
                "showticklabels": column == 0,
                "title": {"text": "layer mean" if column == 0 else ""},
                "showgrid": True,
            },
        )
        _strip(canvas, strip, result, role, index, relative, legend=place == 0)
        left += panel.width + BETWEEN
        right = max(right, left - BETWEEN)
    for role in roles:
        if role == "V":
            draw_boxes(canvas, _panel_of(canvas, role), result, role, index, cells[role])
    name_gaps(canvas, "zero read-in matrix")
    canvas.layout["coloraxis"] = _scale(result, index, relative)
    width = canvas.colour_bar(right + BAR_GAP, HEADING, max(down, 120))
    rows = -(-len(roles) // columns)
    return canvas.figure(width, rows * block)


def _panel_of(canvas: Canvas, role: str) -> Panel:
    axis = next(t.xaxis for t in canvas.traces if t.meta and t.meta.get("role") == role)
    return next(panel for panel, _, _ in canvas._panels if panel.x == axis)


def _cells(result: ValueAlignmentResult, role: str) -> Cells:
    """Cells of one height for all roles; a key/value head may span the query heads it serves."""
    layers, heads = result.role(role).numerical_rank.shape
    most = max(values.numerical_rank.shape[1] for values in result.roles.values())
    base = fit(layers, most, 260, 480)
    served = min(base.width * most // heads, 3 * base.width)
    return Cells(layers, heads, max(served, -(-NARROWEST_GRID // heads)), base.height)


def _grid(
    canvas: Canvas,
    result: ValueAlignmentResult,
    role: str,
    index: int,
    relative: bool,
    cells: Cells,
    left: float,
    top: float,
    first: bool,
) -> Panel:
    values = result.role(role)
    panel = canvas.panel(
        left,
        top,
        cells.across,
        cells.down,
        x=head_axis(cells.columns, cells.width),
        y=layer_axis(result.layers, cells.height, labels=first),
    )
    name = KIND.get(role, "heads")
    canvas.note(f"<b>{safe(role)}</b>  {cells.columns} {name}", left, top - 5, yanchor="bottom")
    full = values.full[index].numpy()
    behind = numbers(result, role, index, full, values.full_stderr[index].numpy())
    draw_cells(
        canvas,
        panel,
        np.log2(behind[..., 3]) if relative else full,
        behind,
        hover(
            role,
            "full stream",
            values.singular_values.shape[-1],
            intervals=has_intervals(result, role, index),
        ),
        role=role,
        gap=1 if min(cells.width, cells.height) >= 12 else 0,
    )
    draw_zero_heads(canvas, panel, ~np.isfinite(full), result.layers, role=role)
    return panel


def _block_axis(result: ValueAlignmentResult, width: float) -> dict[str, object]:
    count = len(result.layers)
    shown = thinned(count, width / count, 10 + 8 * len(str(max(result.layers))))
    return {
        "range": [-0.5, count - 0.5],
        "tickvals": shown,
        "ticktext": [str(result.layers[i]) for i in shown],
        "title": {"text": "layer"},
    }


def _profiles(
    result: ValueAlignmentResult, role: str, index: int, relative: bool
) -> list[tuple[str, Array, str, str]]:
    values = result.role(role)
    chance = values.chance[index].numpy()
    full, embed = values.full[index].numpy(), values.by_source[index, 0].numpy()
    if relative:
        full, embed, chance = full / chance, embed / chance, chance / chance
    return [
        ("full stream, layer mean", mean_over_heads(full), FULL_STREAM, "solid"),
        ("embedding, layer mean", mean_over_heads(embed), EMBED, "dashdot"),
        ("chance", mean_over_heads(chance), GREY, "dot"),
    ]


def _strip(
    canvas: Canvas,
    strip: Panel,
    result: ValueAlignmentResult,
    role: str,
    index: int,
    relative: bool,
    *,
    legend: bool,
) -> None:
    for name, line, colour, dash in _profiles(result, role, index, relative):
        canvas.traces.append(
            go.Scatter(
                x=list(range(len(line))),
                y=line.astype(np.float32),
                xaxis=strip.x,
                yaxis=strip.y,
                mode="lines" if len(line) > 1 else "markers",
                line={"color": colour, "width": 2, "dash": dash},
                marker={"color": colour},
                name=name,
                legendgroup=name,
                showlegend=legend,
                customdata=list(result.layers),
                hovertemplate=f"<b>layer %{{customdata}} · {safe(role)}</b><br>{name} %{{y:.3f}}"
                "<extra></extra>",
            )
        )


def _strip_range(result: ValueAlignmentResult, index: int, relative: bool) -> tuple[float, float]:
    lines = [
        known(line)
        for role in result.roles
        for _, line, _, _ in _profiles(result, role, index, relative)
    ]
    values = np.concatenate(lines)
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    room = 0.08 * max(high - low, 0.02)
    return low - room, high + room


def _scale(result: ValueAlignmentResult, index: int, relative: bool) -> dict[str, object]:
    chances = np.concatenate([known(values.chance[index]) for values in result.roles.values()])
    if relative:
        return relative_scale(
            np.log2((values.full[index] / values.chance[index]).numpy())
            for values in result.roles.values()
        )
    low, high = alignment_range(values.full[index] for values in result.roles.values())
    return value_scale(low, high, float(chances.mean()) if len(chances) else None)

"""The full residual stream against every head's input directions, role by role."""

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.boxes import draw_boxes, has_intervals, interval_note
from tl_valuealign.plots.canvas import Canvas, Look, Panel
from tl_valuealign.plots.common import (
    EMBED,
    FULL_STREAM,
    GREY,
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
from tl_valuealign.plots.grid import draw_zero_heads, hover, name_gaps, numbers
from tl_valuealign.plots.role_grids import UNDER_GRID, RoleGrid, draw_role_grids, role_cells
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.shapes import typed

STRIP, UNDER_STRIP = 66, 48


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
    grids = [_grid(result, role, index, relative) for role in roles]
    panels, width, height = draw_role_grids(canvas, result.layers, grids, STRIP + UNDER_STRIP)
    low, high = _strip_range(result, index, relative)
    for place, (grid, panel) in enumerate(zip(grids, panels, strict=True)):
        labelled = panel.left == panels[0].left
        strip = canvas.panel(
            panel.left,
            panel.top + panel.height + UNDER_GRID,
            panel.width,
            STRIP,
            x=_block_axis(result, panel.width),
            y={
                "range": [low, high],
                "nticks": 4,
                "showticklabels": labelled,
                "title": {"text": "layer mean" if labelled else ""},
                "showgrid": True,
            },
        )
        _strip(canvas, strip, result, grid.role, index, relative, legend=place == 0)
        missing = ~np.isfinite(grid.z)
        draw_zero_heads(canvas, panel, missing, result.layers, role=grid.role)
        if grid.role == "V":
            shapes = {each.role: each.z.shape for each in grids}
            draw_boxes(canvas, panel, result, "V", index, role_cells("V", shapes))
    name_gaps(canvas, "zero read-in matrix")
    canvas.layout["coloraxis"] = _scale(result, index, relative)
    return canvas.figure(width, height)


def _grid(result: ValueAlignmentResult, role: str, index: int, relative: bool) -> RoleGrid:
    values = result.role(role)
    full = values.full[index].numpy()
    behind = numbers(result, role, index, full, values.full_stderr[index].numpy())
    template = hover(
        role,
        "full stream",
        values.singular_values.shape[-1],
        intervals=has_intervals(result, role, index),
    )
    return RoleGrid(role, np.log2(behind[..., 3]) if relative else full, behind, template)


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

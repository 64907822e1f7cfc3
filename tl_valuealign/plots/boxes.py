"""Outlines around heads whose full stream beats the embedding, and the legend that counts them."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.canvas import Canvas, Panel
from tl_valuealign.plots.common import BOX, safe
from tl_valuealign.plots.grid import Cells, box_path
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.sums import MIN_SEQUENCES

LINE = 2


def has_intervals(result: ValueAlignmentResult, role: str, index: int) -> bool:
    """Whether full − embedding has a standard error anywhere, so that boxes can be tested."""
    return bool(np.isfinite(result.role(role).excess_stderr[index].numpy()).any())


def interval_note(result: ValueAlignmentResult) -> str:
    """Why there are no intervals, in a plain word; empty where there are."""
    index = range(len(result.thresholds))
    if any(has_intervals(result, role, i) for role in result.roles for i in index):
        return ""
    if result.sums.n_sequences < MIN_SEQUENCES:
        return f"intervals withheld: fewer than {MIN_SEQUENCES} sequences"
    return "no intervals: this run kept nothing per sequence"


def dash_length(cell: float) -> float:
    """Pixels of a dash: they divide a cell's side evenly."""
    return cell / (2 if cell < 14 else 4)


def dash_start(cell: float) -> float:
    """Where on its left side an outline starts, in cells: one dash then spans each corner, and
    the outline of a small cell does not look broken."""
    return dash_length(cell) / 2 / cell


def box_layers(
    result: ValueAlignmentResult, role: str, index: int, cells: Cells
) -> list[tuple[str, str, str]]:
    """What to outline: (legend text, dash, path), the post's plain boxes first.

    Where the comparison could be tested, boxes that survive false-discovery control are solid and
    the others dashed. Where it could not, all are drawn solid.
    """
    threshold = result.thresholds[index]
    plain = result.boxes(threshold, role=role).numpy()
    counted = f"{int(plain.sum())} of {plain.size} {safe(role)} heads: full stream above embedding"
    if not has_intervals(result, role, index):
        return [(counted, "solid", box_path(plain))]
    firm = result.boxes(threshold, role=role, significant=True).numpy()
    dash = dash_length(cells.height)
    start = dash_start(cells.height)
    return [
        (counted, f"{dash:g}px", box_path(plain & ~firm, start)),
        (f"{int(firm.sum())} of these hold at 5% false discovery", "solid", box_path(firm)),
    ]


def box_shape(panel: Panel, dash: str, path: str) -> dict[str, Any]:
    """A 2 px outline in data coordinates of a panel. One shape whatever the number of boxes:
    a browser takes a second for thousands of shapes and an instant for thousands of subpaths."""
    return {
        "type": "path",
        "path": path or "M-0.5,-0.5 Z",
        "xref": panel.x,
        "yref": panel.y,
        "line": {"color": BOX, "width": LINE, "dash": dash},
        "fillcolor": "rgba(0,0,0,0)",
        "layer": "above",
    }


def draw_boxes(
    canvas: Canvas,
    panel: Panel,
    result: ValueAlignmentResult,
    role: str,
    index: int,
    cells: Cells,
) -> None:
    """Outline a role's boxes on its grid and count them in the legend."""
    for words, dash, path in box_layers(result, role, index, cells):
        canvas.shapes.append(box_shape(panel, dash, path))
        canvas.traces.append(legend_key(words, panel, color=BOX, dash=dash))


def legend_key(words: str, panel: Panel, *, color: str, dash: str = "solid") -> go.Scatter:
    """A legend entry that draws nothing."""
    return go.Scatter(
        x=[None],
        y=[None],
        xaxis=panel.x,
        yaxis=panel.y,
        mode="lines",
        line={"color": color, "width": LINE, "dash": dash},
        name=words,
        showlegend=True,
        hoverinfo="skip",
        legendrank=1,
    )

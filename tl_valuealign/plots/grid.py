"""Grids of cells: coloured values, hatched gaps, boxes on cell edges, thinned integer ticks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.canvas import Canvas, Panel
from tl_valuealign.plots.common import GREY, MISSING, Array, safe, thinned
from tl_valuealign.result import ValueAlignmentResult

MIN_CELL, MAX_CELL = 6, 32
ZERO = "its read-in matrix is zero"

# Columns of the numbers behind a cell, in the order the hover template names them.
FIELDS = ("value", "stderr", "chance", "ratio", "directions", "rank", "layer")


@dataclass(frozen=True)
class Cells:
    """Size of a grid's cells in pixels."""

    rows: int
    columns: int
    width: int
    height: int

    @property
    def across(self) -> int:
        """Width of the panel: one pixel more on either side, for outlines at the rim."""
        return self.columns * self.width + 2

    @property
    def down(self) -> int:
        return self.rows * self.height + 2


def fit(rows: int, columns: int, across: int, down: int, *, widest: int = MAX_CELL) -> Cells:
    """Whole-pixel cells for a grid of about ``across`` × ``down`` pixels, square while they fit."""
    height = min(max(down // max(rows, 1), MIN_CELL), MAX_CELL)
    width = min(max(across // max(columns, 1), MIN_CELL), widest)
    side = min(height, width)
    return Cells(rows, columns, min(width, 2 * side), side)


def head_axis(count: int, cell: float, title: str = "head") -> dict[str, Any]:
    """Options of an x axis of heads: numeric, integer labels, as many as do not collide."""
    shown = thinned(count, cell, 10 + 8 * len(str(max(count - 1, 0))))
    return {
        "range": [-0.5 - 1 / cell, count - 0.5 + 1 / cell],
        "tickvals": shown,
        "ticktext": [str(head) for head in shown],
        "title": {"text": title},
    }


def layer_axis(
    layers: Sequence[int], cell: float, *, labels: bool = True, title: str = "layer"
) -> dict[str, Any]:
    """Options of a y axis of layers, the first at the top."""
    shown = thinned(len(layers), cell, 15)
    return {
        "range": [len(layers) - 0.5 + 1 / cell, -0.5 - 1 / cell],
        "tickvals": shown,
        "ticktext": [str(layers[row]) for row in shown],
        "showticklabels": labels,
        "title": {"text": title if labels else ""},
    }


def numbers(
    result: ValueAlignmentResult, role: str, index: int, value: Array, stderr: Array
) -> Array:
    """The numbers behind every head's cell, [layer, head, field] in the order of ``FIELDS``."""
    values = result.role(role)
    chance = values.chance[index].numpy()
    layer = np.broadcast_to(np.array(result.layers, dtype=np.float64)[:, None], value.shape)
    return np.stack(
        [
            value,
            stderr,
            chance,
            value / chance,
            values.n_directions[index].numpy(),
            values.numerical_rank.numpy(),
            layer,
        ],
        axis=-1,
    )


def hover(role: str, source: str, d_head: int, *, intervals: bool) -> str:
    """Template of a cell's hover text. ``source`` may itself be a template such as ``%{text}``."""
    spread = " ± %{customdata[1]:.3f}" if intervals else ""
    return (
        f"<b>L%{{customdata[6]}}H%{{x}} · {safe(role)} · {source}</b><br>"
        f"alignment %{{customdata[0]:.3f}}{spread}<br>"
        "chance %{customdata[2]:.3f}, so %{customdata[3]:.2f} × chance<br>"
        f"%{{customdata[4]}} of {d_head} directions<br>"
        "numerical rank %{customdata[5]}<extra></extra>"
    )


def draw_cells(
    canvas: Canvas,
    panel: Panel,
    z: Array,
    behind: Array,
    template: str,
    *,
    role: str,
    layer: int | None = None,
    first_row: float = 0.0,
    step: float = 1.0,
    text: Any = None,
    gap: int = 1,
    **options: Any,
) -> None:
    """Coloured cells of one grid; row r lies at y = first_row + step · r. NaN cells stay empty.

    ``layer`` is that of all cells; None where rows are layers, whose number is then the last of
    ``behind``: so a page knows which head a click means.
    """
    canvas.traces.append(
        go.Heatmap(
            z=np.asarray(z, dtype=np.float32),
            x0=0,
            dx=1,
            y0=first_row,
            dy=step,
            xaxis=panel.x,
            yaxis=panel.y,
            coloraxis="coloraxis",
            customdata=np.asarray(behind, dtype=np.float32),
            text=text,
            hovertemplate=template,
            hoverongaps=False,
            xgap=gap,
            ygap=gap,
            meta={"role": role, "layer": layer},
            showlegend=False,
            **options,
        )
    )


def draw_gaps(
    canvas: Canvas,
    panel: Panel,
    missing: Array,
    behind: Array,
    template: str,
    *,
    role: str,
    layer: int | None = None,
    first_row: float = 0.0,
    step: float = 1.0,
    text: Any = None,
) -> None:
    """Grey, hatched cells where there is no value, saying why when hovered."""
    if not missing.any():
        return
    canvas.traces.append(
        go.Heatmap(
            z=np.where(missing, 0.0, np.nan).astype(np.float32),
            x0=0,
            dx=1,
            y0=first_row,
            dy=step,
            xaxis=panel.x,
            yaxis=panel.y,
            colorscale=[[0, MISSING], [1, MISSING]],
            showscale=False,
            text=text,
            customdata=np.asarray(behind, dtype=np.int16),
            hovertemplate=template,
            hoverongaps=False,
            meta={"role": role, "layer": layer, "missing": True},
            showlegend=False,
        )
    )
    canvas.traces.append(hatching(missing, panel, first_row, step))


def draw_zero_heads(
    canvas: Canvas, panel: Panel, missing: Array, layers: Sequence[int], *, role: str
) -> None:
    """Gaps of a grid of layers by heads: heads whose matrix is zero."""
    layer = np.broadcast_to(np.array(layers)[:, None, None], (*missing.shape, 1))
    template = f"<b>L%{{customdata[0]}}H%{{x}} · {safe(role)}</b><br>{ZERO}<extra></extra>"
    draw_gaps(canvas, panel, missing, layer, template, role=role)


def hatching(missing: Array, panel: Panel, first_row: float = 0.0, step: float = 1.0) -> go.Scatter:
    """Diagonal hatching over cells, one trace whatever their number."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for left, top, right, bottom in rectangles(missing):
        xs += [left, right, right, left, left, None]
        ys += [first_row + step * y for y in (top, top, bottom, bottom, top)] + [None]
    return go.Scatter(
        x=xs,
        y=ys,
        xaxis=panel.x,
        yaxis=panel.y,
        mode="lines",
        line={"width": 0, "color": GREY},
        fill="toself",
        fillcolor=MISSING,
        fillpattern={
            "shape": "/",
            "size": 6,
            "solidity": 0.18,
            "fgcolor": GREY,
            "bgcolor": "rgba(0,0,0,0)",
        },
        hoverinfo="skip",
        legendgroup="missing",
        showlegend=False,
    )


def name_gaps(canvas: Canvas, words: str) -> None:
    """Give the hatching, where a figure has any, one legend entry."""
    hatched = [trace for trace in canvas.traces if trace.legendgroup == "missing"]
    if hatched:
        hatched[0].update(name=words, showlegend=True)


def rectangles(mask: Array) -> list[tuple[float, float, float, float]]:
    """Few rectangles (left, top, right, bottom) on cell edges that cover a boolean grid exactly."""
    done: list[tuple[float, float, float, float]] = []
    open_runs: dict[tuple[int, int], int] = {}
    for row in range(mask.shape[0] + 1):
        runs = _runs(mask[row]) if row < mask.shape[0] else set()
        for run in [run for run in open_runs if run not in runs]:
            start = open_runs.pop(run)
            done.append((run[0] - 0.5, start - 0.5, run[1] + 0.5, row - 0.5))
        for run in runs:
            open_runs.setdefault(run, row)
    return sorted(done)


def _runs(row: Array) -> set[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    return {(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)}


def box_path(flags: Array, start: float = 0.0) -> str:
    """One path of squares on the cell edges of every head that is flagged, [layer, head].

    Each begins ``start`` cells below its top left corner, so that a dash can span the corner.
    """
    return " ".join(
        f"M{h - 0.5},{r - 0.5 + start} L{h - 0.5},{r - 0.5} L{h + 0.5},{r - 0.5} "
        f"L{h + 0.5},{r + 0.5} L{h - 0.5},{r + 0.5} Z"
        for r, h in zip(*(axis.tolist() for axis in np.nonzero(flags)), strict=True)
    )

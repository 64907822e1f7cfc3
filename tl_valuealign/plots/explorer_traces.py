"""What the explorer draws of every role and view: a grid for each source, profiles, chance."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.boxes import box_layers, has_intervals, legend_key
from tl_valuealign.plots.canvas import Canvas, Panel
from tl_valuealign.plots.common import (
    BOX,
    FULL_STREAM,
    GREY,
    MISSING,
    Array,
    mean_over_heads,
    safe,
    source_words,
)
from tl_valuealign.plots.grid import Cells, hatching, hover, numbers
from tl_valuealign.result import FULL, ValueAlignmentResult


@dataclass
class Choice:
    """What one role shows in one view: its panels, and where its traces lie in the figure."""

    role: str
    view: int
    cells: Cells
    main: Panel
    right: Panel
    bottom: Panel
    traces: dict[tuple[str, str], int] = field(default_factory=dict)


def legend_of(result: ValueAlignmentResult, role: str) -> str:
    """Every role has a legend of its own, so that its boxes' count shows with it."""
    number = list(result.roles).index(role) + 1
    return "legend" if number == 1 else f"legend{number}"


def add_traces(
    canvas: Canvas, result: ValueAlignmentResult, choice: Choice, sources: list[str]
) -> None:
    role, legend = choice.role, legend_of(result, choice.role)
    intervals = has_intervals(result, role, 0)
    d_head = result.role(role).singular_values.shape[-1]
    edges = (("right", choice.right), ("bottom", choice.bottom))

    def add(kind: str, source: str, trace: Any) -> None:
        choice.traces[kind, source] = len(canvas.traces)
        trace.update(meta={"part": f"{kind} {source}"} if trace.meta is None else trace.meta)
        canvas.traces.append(trace)

    for source in sources:
        at, words = grid_values(result, choice, source, 0), safe(source_words(source))
        gap = 1 if choice.cells.height >= 12 else 0
        heat = go.Heatmap(
            **at["heat"],
            xaxis=choice.main.x,
            yaxis=choice.main.y,
            coloraxis="coloraxis2" if choice.view else "coloraxis",
            hovertemplate=hover(role, words, d_head, intervals=intervals),
            hoverongaps=False,
            xgap=gap,
            ygap=gap,
            visible=source == FULL,
            meta={"role": role, "source": source, "part": "heat"},
        )
        add("heat", source, heat)
        missing = ~np.isfinite(result.alignment(role, source).numpy())
        if missing.any():
            hatch = hatching(missing, choice.main)
            hatch.update(
                fillpattern={"bgcolor": MISSING},
                hoveron="fills",
                hoverinfo="text",
                text=f"{words}: not upstream of these blocks, or a zero read-in matrix",
                name="not upstream, or a zero matrix",
                showlegend=choice.view == 0,
                legend=legend,
                visible=source == FULL,
            )
            add("gap", source, hatch)
        for kind, panel in edges:
            line = go.Scatter(
                **at[kind],
                xaxis=panel.x,
                yaxis=panel.y,
                mode="lines+markers" if choice.cells.rows < 40 else "lines",
                line={"color": FULL_STREAM, "width": 2},
                marker={"size": 4},
                visible=source == FULL,
                showlegend=False,
                hovertemplate=_edge_hover(kind, words),
            )
            add(kind, source, line)
    for kind, panel in edges:
        line = go.Scatter(
            **chance_line(result, choice, kind, 0),
            xaxis=panel.x,
            yaxis=panel.y,
            mode="lines",
            line={"color": GREY, "width": 2, "dash": "dot"},
            name="chance",
            showlegend=choice.view == 0 and kind == "right",
            legend=legend,
            hovertemplate=_edge_hover(kind, "chance"),
        )
        add(kind, "chance", line)
    if choice.view == 0:
        for place, (words, dash, _) in enumerate(box_layers(result, role, 0, choice.cells)):
            key = legend_key(words, choice.main, color=BOX, dash=dash).update(legend=legend)
            add("key", str(place), key)


def grid_values(
    result: ValueAlignmentResult, choice: Choice, source: str, index: int
) -> dict[str, dict[str, Any]]:
    """What the threshold changes of one source: the grid and its two profiles."""
    threshold = result.thresholds[index]
    value = result.alignment(choice.role, source, threshold).numpy()
    stderr = result.stderr(choice.role, source, threshold).numpy()
    behind = numbers(result, choice.role, index, value, stderr)
    shown = behind[..., 3] if choice.view else value
    grid = {
        "z": np.asarray(np.log2(shown) if choice.view else shown, dtype=np.float32),
        "customdata": behind.astype(np.float32),
        "x": np.arange(value.shape[1], dtype=np.int16),
        "y": np.arange(value.shape[0], dtype=np.int16),
    }
    return {"heat": grid} | _profiles(result, shown)


def chance_line(
    result: ValueAlignmentResult, choice: Choice, kind: str, index: int
) -> dict[str, Any]:
    """Chance in one of the profiles; by definition 1 where all is relative to it."""
    chance = result.role(choice.role).chance[index].numpy()
    return _profiles(result, chance / chance if choice.view else chance)[kind]


def _profiles(result: ValueAlignmentResult, shown: Array) -> dict[str, dict[str, Any]]:
    by_layer = mean_over_heads(shown).astype(np.float32)
    by_head = mean_over_heads(shown.T).astype(np.float32)
    rows, heads = (np.arange(len(line), dtype=np.int16) for line in (by_layer, by_head))
    blocks = np.array(result.layers, dtype=np.int16)
    return {
        "right": {"x": by_layer, "y": rows, "customdata": blocks},
        "bottom": {"x": heads, "y": by_head, "customdata": heads},
    }


def _edge_hover(kind: str, words: str) -> str:
    value, where = ("%{x:.3f}", "layer") if kind == "right" else ("%{y:.3f}", "head")
    return f"<b>{where} %{{customdata}} · {words}</b><br>mean {value}<extra></extra>"

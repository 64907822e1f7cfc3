"""One large grid over role, source, view and threshold, with profiles along its edges.

Plotly's menus and sliders only replay fixed changes, so each choice must move a property that no
other choice touches. Every role and view has panels of its own, all in the same place: role moves
their x axes into or out of sight, view their y axes; source shows and hides traces; the threshold
replaces numbers, outlines and scales. Any combination then shows what it says, in a notebook and
in a saved page alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.boxes import box_layers, has_intervals, interval_note, legend_key
from tl_valuealign.plots.canvas import BAR_GAP, Canvas, Look, Panel
from tl_valuealign.plots.common import (
    BOX,
    FULL_STREAM,
    GREY,
    MISSING,
    Array,
    known,
    mean_over_heads,
    metric_words,
    safe,
    source_words,
    subtitle,
)
from tl_valuealign.plots.explorer_menus import add_menus, add_slider, legend_of, scales, shapes
from tl_valuealign.plots.grid import Cells, fit, hatching, head_axis, hover, layer_axis, numbers
from tl_valuealign.result import FULL, ValueAlignmentResult
from tl_valuealign.shapes import typed

LEFT, MENUS, HEADING, RIGHT_PROFILE, BOTTOM_PROFILE, BETWEEN = 56, 70, 22, 150, 90, 14
UNDER_GRID, UNDER_PROFILE, SLIDER = 46, 34, 96
WIDEST_GRID, TALLEST_GRID, NARROWEST_GRID = 480, 560, 260
MAX_CELLS = 200_000  # over all choices: about 7 MB of numbers
VIEWS = ("alignment", "relative to chance")


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


@typed
def plot_explorer(result: ValueAlignmentResult) -> go.Figure:
    """One large grid with menus for role, source and view, and a slider over the thresholds.

    The strips along its edges are the means over heads and over layers, beside chance. Boxes and
    their count follow role and threshold. Where all sources would make the figure too heavy for a
    browser, full stream, embedding and evenly spaced outputs are offered.
    """
    sources = offered_sources(result)
    role = "V" if "V" in result.roles else next(iter(result.roles))
    note = "" if len(sources) > len(result.sources) - 2 else "menu: a selection of the sources"
    canvas = Canvas(
        "What each head’s input directions find in the residual stream",
        subtitle(result, None, metric_words(result), interval_note(result), note),
    )
    choices = _choices(canvas, result, list(result.roles), range(len(VIEWS)), MENUS)
    for choice in choices:
        _traces(canvas, result, choice, sources)
    canvas.shapes = shapes(result, choices, 0)
    width, bottom = _furnish(canvas, choices[0])
    slides = len(result.thresholds) > 1
    figure = canvas.figure(width, bottom + (SLIDER if slides else 10), min_width=760)
    raw, relative = scales(result, sources, 0)
    bar = figure.layout.coloraxis.colorbar.to_plotly_json()
    figure.update_layout(
        coloraxis=raw | {"colorbar": bar | raw["colorbar"]},
        coloraxis2=relative | {"colorbar": bar | relative["colorbar"]},
    )
    _overlay(figure, choices)
    add_menus(figure, canvas, result, choices, sources, role)
    if slides:
        add_slider(figure, canvas, result, choices, sources, bottom + 12)
    return figure


def draw_explorer_base(result: ValueAlignmentResult, role: str, look: Look) -> go.Figure:
    """One role's full stream, without menus: what a page with controls of its own starts from."""
    canvas = Canvas("", [], look)
    choice = _choices(canvas, result, [role], [0], HEADING)[0]
    _traces(canvas, result, choice, [FULL])
    for trace in canvas.traces:
        if trace.type == "scatter":
            trace.legend = None
    if ("gap", FULL) not in choice.traces:
        empty = hatching(np.zeros((1, 1), dtype=bool), choice.main)
        canvas.traces.append(empty.update(meta={"part": f"gap {FULL}"}, hoverinfo="text"))
    canvas.shapes = shapes(result, [choice], 0)
    width, bottom = _furnish(canvas, choice)
    figure = canvas.figure(width, bottom + 10)
    raw, _ = scales(result, [FULL], 0)
    bar = figure.layout.coloraxis.colorbar.to_plotly_json()
    figure.update_layout(coloraxis=raw | {"colorbar": bar | raw["colorbar"]})
    return figure


def _furnish(canvas: Canvas, first: Choice) -> tuple[float, float]:
    """Words around the panels, and the colour bar; returns width and height so far."""
    main, right, bottom = first.main, first.right, first.bottom
    middle = main.top + main.height / 2
    canvas.note("layer", LEFT - 30, middle, textangle=-90, yanchor="middle", xanchor="right")
    words = "mean over heads" if right.width >= RIGHT_PROFILE else "mean"
    canvas.note(words, right.left, main.top - 4, yanchor="bottom")
    canvas.note("mean over layers", LEFT, bottom.top - 2, yanchor="bottom")
    under = bottom.top + bottom.height
    canvas.note("head", LEFT + main.width / 2, under + 20, xanchor="center")
    edge = right.left + right.width
    width = canvas.colour_bar(edge + BAR_GAP, main.top, max(main.height, 120))
    return max(width, edge), under + UNDER_PROFILE


def offered_sources(result: ValueAlignmentResult) -> list[str]:
    """Sources for the menu, full stream first, thinned evenly to stay within ``MAX_CELLS``."""
    grids = len(VIEWS) * (len(result.thresholds) + 1)
    cells = sum(values.numerical_rank.numel() for values in result.roles.values()) * grids
    # An output of the last block that was analysed reaches no block that was analysed.
    reach = np.zeros(len(result.sources), dtype=bool)
    for values in result.roles.values():
        reach |= np.isfinite(values.by_source[0].numpy()).any(axis=(1, 2))
    named = [source for source, seen in zip(result.sources, reach, strict=True) if seen]
    base = [source for source in named if not source[0].isdigit()]
    rest = [source for source in named if source[0].isdigit()]
    keep = max(MAX_CELLS // max(cells, 1) - len(base) - 1, 2)
    if len(rest) > keep:
        rest = [rest[i * len(rest) // keep] for i in range(keep)]
    return [FULL, *base, *rest]


def _choices(
    canvas: Canvas,
    result: ValueAlignmentResult,
    roles: Sequence[str],
    views: Sequence[int],
    top: float,
) -> list[Choice]:
    layers = len(result.layers)
    most = max(values.numerical_rank.shape[1] for values in result.roles.values())
    widest, edge = (210, 54) if canvas.look.narrow else (WIDEST_GRID, RIGHT_PROFILE)
    base = fit(layers, most, widest, TALLEST_GRID)
    across = max(base.width, min(NARROWEST_GRID, widest) // most) * most
    found = []
    for role in roles:
        heads = result.role(role).numerical_rank.shape[1]
        cells = Cells(layers, heads, across // heads, base.height)
        for view in views:
            level = level_axis(result, view)
            # Choices share their places, so each label is drawn by one of those it holds for.
            only = {"showticklabels": role == roles[0]}
            head = head_axis(heads, across / heads, "") | {"showticklabels": view == views[0]}
            layer = layer_axis(result.layers, base.height, title="") | only
            main = canvas.panel(LEFT, top, across + 2, cells.down, x=head, y=layer)
            right = canvas.panel(
                LEFT + across + 2 + BETWEEN,
                top,
                edge,
                cells.down,
                x=level,
                y=layer | {"showticklabels": False},
            )
            bottom = canvas.panel(
                LEFT,
                top + cells.down + UNDER_GRID,
                across + 2,
                BOTTOM_PROFILE,
                x=head,
                y=level | only | {"showgrid": only["showticklabels"]},
            )
            found.append(Choice(role, view, cells, main, right, bottom))
    return found


def level_axis(result: ValueAlignmentResult, view: int) -> dict[str, Any]:
    """A value axis for the profiles, fixed over all thresholds, roles and sources."""
    parts = []
    for values in result.roles.values():
        level = values.chance.numpy()
        over = level if view else np.ones_like(level)
        streams = np.concatenate(
            [values.full.numpy()[:, None], values.by_source.numpy(), level[:, None]], axis=1
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            streams = streams / over[:, None]
        parts += [known(mean_over_heads(streams)), known(mean_over_heads(streams.swapaxes(2, 3)))]
    every = np.concatenate(parts)
    low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)
    room = 0.06 * max(high - low, 0.02)
    step = next(s for s in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 1e9) if (high - low) / s <= 4)
    ticks = [i * step for i in range(int(np.ceil(low / step)), int(high / step) + 1)]
    return {
        "range": [low - room, high + room],
        "tickvals": ticks,
        "ticktext": [f"{tick:.3g}{'×' if view else ''}" for tick in ticks],
        "showgrid": True,
    }


def _overlay(figure: go.Figure, choices: list[Choice]) -> None:
    """Put every choice's panels on those of the first, which alone would catch the pointer."""
    first = choices[0]
    for choice in choices[1:]:
        for mine, base in (
            (choice.main, first.main),
            (choice.right, first.right),
            (choice.bottom, first.bottom),
        ):
            figure.layout[f"xaxis{mine.x[1:]}"].overlaying = base.x
            figure.layout[f"yaxis{mine.y[1:]}"].overlaying = base.y
    figure.update_xaxes(fixedrange=True)
    figure.update_yaxes(fixedrange=True)


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


def _traces(
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


def _edge_hover(kind: str, words: str) -> str:
    value, where = ("%{x:.3f}", "layer") if kind == "right" else ("%{y:.3f}", "head")
    return f"<b>{where} %{{customdata}} · {words}</b><br>mean {value}<extra></extra>"

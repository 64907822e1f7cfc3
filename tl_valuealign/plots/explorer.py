"""One large grid over role, source, view and threshold, with profiles along its edges.

Plotly's menus and sliders only replay fixed changes, so each choice must move a property that no
other choice touches. Every role and view has panels of its own, all in the same place: role moves
their x axes into or out of sight, view their y axes; source shows and hides traces; the threshold
replaces numbers, outlines and scales. Any combination then shows what it says, in a notebook and
in a saved page alike.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.asking import along_curve
from tl_valuealign.plots.boxes import interval_note
from tl_valuealign.plots.canvas import BAR_GAP, Canvas, Look
from tl_valuealign.plots.common import known, mean_over_heads, metric_words, subtitle
from tl_valuealign.plots.explorer_menus import VIEWS, add_menus
from tl_valuealign.plots.explorer_slider import add_slider, scales, shapes
from tl_valuealign.plots.explorer_traces import Choice, add_traces
from tl_valuealign.plots.grid import Cells, fit, hatching, head_axis, layer_axis
from tl_valuealign.result import FULL, ValueAlignmentResult
from tl_valuealign.shapes import typed

LEFT, MENUS, HEADING, RIGHT_PROFILE, BOTTOM_PROFILE, BETWEEN = 56, 70, 22, 150, 90, 14
UNDER_GRID, UNDER_PROFILE, SLIDER = 46, 34, 96
WIDEST_GRID, TALLEST_GRID, NARROWEST_GRID = 480, 560, 260
MAX_CELLS = 200_000  # over all choices: about 7 MB of numbers


@typed
def plot_explorer(result: ValueAlignmentResult) -> go.Figure:
    """One large grid with menus for role, source and view, and a slider over the thresholds.

    The strips along its edges are the means over heads and over layers, beside chance. Boxes and
    their count follow role and threshold. Where all sources would make the figure too heavy for a
    browser, full stream, embedding and evenly spaced outputs are offered.

    A result that kept its moments (``keep_moments=True``), read in the metric "energy" or
    "pooled", has every twentieth from 0.05 to 1 on the slider; such numbers have no intervals.
    """
    result = along_curve(result)
    sources = offered_sources(result)
    role = "V" if "V" in result.roles else next(iter(result.roles))
    note = "" if len(sources) > len(result.sources) - 2 else "menu: a selection of the sources"
    canvas = Canvas(
        "What each head’s input directions find in the residual stream",
        subtitle(result, None, metric_words(result), interval_note(result), note),
    )
    choices = _choices(canvas, result, list(result.roles), range(len(VIEWS)), MENUS)
    for choice in choices:
        add_traces(canvas, result, choice, sources)
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
    add_traces(canvas, result, choice, [FULL])
    for trace in canvas.traces:
        if trace.type == "scatter":
            trace.legend = None
    if ("gap", FULL) not in choice.traces:
        empty = hatching(np.zeros((1, 1), dtype=bool), choice.main)
        canvas.traces.append(empty.update(meta={"part": f"gap {FULL}"}, hoverinfo="text"))
    canvas.shapes = shapes(result, [choice], 0)
    width, bottom = _furnish(canvas, choice)
    figure = canvas.figure(width, bottom + 10, min_width=760)  # its legend fits on one line
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

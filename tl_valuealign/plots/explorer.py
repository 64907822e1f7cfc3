"""One large grid over role, source, view and threshold, with profiles along its edges.

Plotly's menus and sliders only replay fixed changes, so each choice must move a property that no
other choice touches. Role opens and closes the x axes of its panels, view the y axes, source shows
and hides traces, and the threshold slider replaces numbers, outlines and scales. Any combination
then shows what it says, in a notebook and in a saved page alike.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.boxes import box_layers, box_shape, has_intervals, interval_note
from tl_valuealign.plots.canvas import Canvas, Panel
from tl_valuealign.plots.common import (
    BOX,
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
    share,
    source_words,
    subtitle,
    value_scale,
)
from tl_valuealign.plots.grid import Cells, fit, hatching, head_axis, hover, layer_axis, numbers
from tl_valuealign.result import FULL, ValueAlignmentResult
from tl_valuealign.shapes import typed

LEFT, MENUS, RIGHT_PROFILE, BOTTOM_PROFILE, BETWEEN = 56, 66, 150, 90, 14
UNDER_GRID, UNDER_PROFILE, SLIDER = 46, 24, 74
CLOSED = [0.0, 1e-6]  # an axis this short shows nothing; its labels fall off the page
MAX_CELLS = 200_000  # cells over all choices: about 8 MB of numbers
MENU_PLACES = (LEFT, LEFT + 84, LEFT + 324)
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
    browser, embedding, full stream and evenly spaced outputs are offered.
    """
    sources = offered_sources(result)
    role = "V" if "V" in result.roles else next(iter(result.roles))
    canvas = Canvas(
        "What each head’s input directions find in the residual stream",
        subtitle(result, None, metric_words(result), interval_note(result)),
    )
    cells = {name: _cells(result, name) for name in result.roles}
    across = max(cell.across for cell in cells.values())
    choices = [
        _panels(canvas, result, name, view, cells[name])
        for name in result.roles
        for view in range(len(VIEWS))
    ]
    for choice in choices:
        _traces(canvas, result, choice, sources)
    canvas.shapes = _shapes(result, choices, 0)
    right = LEFT + across + BETWEEN + RIGHT_PROFILE
    down = choices[0].cells.down
    canvas.colour_bar(right + 24, MENUS, max(down, 120))
    height = MENUS + down + UNDER_GRID + BOTTOM_PROFILE + UNDER_PROFILE
    height += SLIDER if len(result.thresholds) > 1 else 8
    figure = canvas.figure(right + 130, height + 44, min_width=760)
    _finish(figure, canvas, result, choices, sources, role, height)
    return figure


def offered_sources(result: ValueAlignmentResult) -> list[str]:
    """Sources for the menu, full stream first, thinned evenly to stay within ``MAX_CELLS``."""
    per_source = sum(values.numerical_rank.numel() for values in result.roles.values())
    per_source *= len(VIEWS) * (len(result.thresholds) + 1)
    room = max(MAX_CELLS // max(per_source, 1), 4)
    # An output of the last block that was analysed reaches no block that was analysed.
    reachable = np.isfinite(
        np.stack([values.by_source[0].numpy() for values in result.roles.values()][:1])
    ).any(axis=(0, 2, 3))
    named = [s for s, seen in zip(result.sources, reachable, strict=True) if seen]
    base = [s for s in named if not s[0].isdigit()]
    rest = [s for s in named if s[0].isdigit()]
    keep = max(room - len(base) - 1, 2)
    if len(rest) > keep:
        rest = [rest[i * len(rest) // keep] for i in range(keep)]
    return [FULL, *base, *rest]


def _cells(result: ValueAlignmentResult, role: str) -> Cells:
    layers, heads = result.role(role).numerical_rank.shape
    most = max(values.numerical_rank.shape[1] for values in result.roles.values())
    base = fit(layers, most, 480, 560)
    width = max(base.width * most, 240) // heads
    return Cells(layers, heads, width, base.height)


def _panels(
    canvas: Canvas, result: ValueAlignmentResult, role: str, view: int, cells: Cells
) -> Choice:
    kind = KIND.get(role, "heads")
    main = canvas.panel(
        LEFT,
        MENUS,
        cells.across,
        cells.down,
        x=head_axis(cells.columns, cells.width, f"<b>{safe(role)}</b>: {cells.columns} {kind}"),
        y=layer_axis(result.layers, cells.height),
    )
    level = {"showgrid": True, "nticks": 4, "title": {"text": "mean over heads"}}
    right = canvas.panel(
        LEFT + cells.across + BETWEEN,
        MENUS,
        RIGHT_PROFILE,
        cells.down,
        x=level,
        y=layer_axis(result.layers, cells.height, labels=False),
    )
    level = {"showgrid": True, "nticks": 4, "title": {"text": "mean over layers"}}
    bottom = canvas.panel(
        LEFT,
        MENUS + cells.down + UNDER_GRID,
        cells.across,
        BOTTOM_PROFILE,
        x=head_axis(cells.columns, cells.width, "") | {"showticklabels": False},
        y=level,
    )
    return Choice(role, view, cells, main, right, bottom)


def _traces(
    canvas: Canvas, result: ValueAlignmentResult, choice: Choice, sources: list[str]
) -> None:
    role, legend = choice.role, _legend(result, choice.role)

    def add(kind: str, source: str, trace: Any) -> None:
        choice.traces[kind, source] = len(canvas.traces)
        canvas.traces.append(trace)

    intervals = has_intervals(result, role, 0)
    d_head = result.role(role).singular_values.shape[-1]
    for source in sources:
        at = _numbers(result, choice, source, 0)
        words, shown = safe(source_words(source)), source == FULL
        add(
            "heat",
            source,
            go.Heatmap(
                **at["heat"],
                xaxis=choice.main.x,
                yaxis=choice.main.y,
                coloraxis="coloraxis" if choice.view == 0 else "coloraxis2",
                hovertemplate=hover(role, words, d_head, intervals=intervals),
                hoverongaps=False,
                xgap=1 if choice.cells.height >= 12 else 0,
                ygap=1 if choice.cells.height >= 12 else 0,
                visible=shown,
                meta={"role": role, "source": source},
                showlegend=False,
            ),
        )
        missing = ~np.isfinite(at["heat"]["z"])
        if missing.any():
            hatch = hatching(missing, choice.main)
            hatch.update(
                hoveron="fills",
                hoverinfo="text",
                text=f"{words}: not upstream, or a zero read-in matrix",
                name="not upstream, or zero",
                showlegend=choice.view == 0,
                legend=legend,
                visible=shown,
            )
            add("gap", source, hatch)
        for kind, panel in (("right", choice.right), ("bottom", choice.bottom)):
            add(
                kind,
                source,
                go.Scatter(
                    **at[kind],
                    xaxis=panel.x,
                    yaxis=panel.y,
                    mode="lines+markers" if choice.cells.rows < 40 else "lines",
                    line={"color": FULL_STREAM, "width": 2},
                    marker={"size": 4},
                    visible=shown,
                    showlegend=False,
                    hovertemplate=_profile_hover(kind, words),
                ),
            )
    for kind, panel in (("right", choice.right), ("bottom", choice.bottom)):
        add(
            kind,
            "chance",
            go.Scatter(
                **_chance_line(result, choice, kind, 0),
                xaxis=panel.x,
                yaxis=panel.y,
                mode="lines",
                line={"color": GREY, "width": 2, "dash": "dot"},
                name="chance",
                showlegend=choice.view == 0 and kind == "right",
                legend=legend,
                hovertemplate=_profile_hover(kind, "chance"),
            ),
        )
    if choice.view == 0:
        for place, (words, dash, _) in enumerate(box_layers(result, role, 0, choice.cells)):
            key = go.Scatter(
                x=[None],
                y=[None],
                xaxis=choice.main.x,
                yaxis=choice.main.y,
                mode="lines",
                line={"color": BOX, "width": 2, "dash": dash},
                name=words,
                legend=legend,
                showlegend=True,
                legendrank=1,
                hoverinfo="skip",
            )
            add("key", str(place), key)


def _legend(result: ValueAlignmentResult, role: str) -> str:
    """Every role has a legend of its own, so that its boxes' count shows with it."""
    number = list(result.roles).index(role) + 1
    return "legend" if number == 1 else f"legend{number}"


def _profile_hover(kind: str, words: str) -> str:
    value, where = ("%{x:.3f}", "layer %{customdata}") if kind == "right" else ("%{y:.3f}", "H%{x}")
    return f"<b>{where} · {words}</b><br>mean {value}<extra></extra>"


def _numbers(
    result: ValueAlignmentResult, choice: Choice, source: str, index: int
) -> dict[str, dict[str, Any]]:
    """What the threshold changes of one source: the grid and its two profiles."""
    threshold = result.thresholds[index]
    value = result.alignment(choice.role, source, threshold).numpy()
    stderr = result.stderr(choice.role, source, threshold).numpy()
    behind = numbers(result, choice.role, index, value, stderr)
    shown = behind[..., 3] if choice.view else value
    return {
        "heat": {
            "z": np.asarray(np.log2(shown) if choice.view else shown, dtype=np.float32),
            "customdata": np.asarray(behind, dtype=np.float32),
            "x": list(range(value.shape[1])),
            "y": list(range(value.shape[0])),
            "name": source,
        },
        **{kind: line | {"name": source} for kind, line in _profiles(result, shown).items()},
    }


def _profiles(result: ValueAlignmentResult, shown: Array) -> dict[str, dict[str, Any]]:
    by_layer, by_head = mean_over_heads(shown), mean_over_heads(shown.T)
    return {
        "right": {
            "x": by_layer.astype(np.float32),
            "y": list(range(len(by_layer))),
            "customdata": list(result.layers),
        },
        "bottom": {"x": list(range(len(by_head))), "y": by_head.astype(np.float32)},
    }


def _chance_line(
    result: ValueAlignmentResult, choice: Choice, kind: str, index: int
) -> dict[str, Any]:
    chance = result.role(choice.role).chance[index].numpy()
    return _profiles(result, chance / chance if choice.view else chance)[kind]


def _shapes(
    result: ValueAlignmentResult, choices: list[Choice], index: int
) -> list[dict[str, Any]]:
    """The full list of outlines of a threshold, for every role and view."""
    return [
        box_shape(choice.main, dash, path)
        for choice in choices
        for _, dash, path in box_layers(result, choice.role, index, choice.cells)
    ]


def _scales(
    result: ValueAlignmentResult, sources: list[str], index: int
) -> tuple[dict[str, Any], dict[str, Any], list[tuple[float, float]]]:
    """Both colour axes, and the range of the profiles in either view, at a threshold."""
    threshold = result.thresholds[index]
    parts = {
        role: [result.alignment(role, source, threshold).numpy() for source in sources]
        for role in result.roles
    }
    every = [part for role in parts.values() for part in role]
    chance = {role: values.chance[index].numpy() for role, values in result.roles.items()}
    ratios = [part / chance[role] for role, of in parts.items() for part in of]
    average = np.concatenate([known(part) for part in chance.values()])
    raw = value_scale(*alignment_range(every), float(average.mean()) if len(average) else None)
    relative = relative_scale(np.log2(ratio) for ratio in ratios)
    return (
        raw,
        relative,
        [_level(every + list(chance.values())), _level([*ratios, np.ones((1, 1))])],
    )


def _level(grids: list[Array]) -> tuple[float, float]:
    values = np.concatenate(
        [known(mean_over_heads(g)) for g in grids] + [known(mean_over_heads(g.T)) for g in grids]
    )
    if not len(values):
        return 0.0, 1.0
    room = 0.06 * max(float(np.ptp(values)), 0.02)
    return float(values.min()) - room, float(values.max()) + room


def _axes(choices: list[Choice], levels: list[tuple[float, float]]) -> dict[str, Any]:
    """Ranges of the profiles' value axes."""
    ranges: dict[str, Any] = {}
    for choice in choices:
        limits = list(levels[choice.view])
        ranges[f"xaxis{choice.right.x[1:]}.range"] = limits
        ranges[f"yaxis{choice.bottom.y[1:]}.range"] = limits
    return ranges


def _step(
    result: ValueAlignmentResult, choices: list[Choice], sources: list[str], index: int
) -> list[Any]:
    """Arguments of ``Plotly.update`` that show another threshold, whatever else is chosen."""
    changes: dict[int, dict[str, Any]] = {}
    for choice in choices:
        for source in sources:
            for kind, values in _numbers(result, choice, source, index).items():
                changes[choice.traces[kind, source]] = values
        for kind in ("right", "bottom"):
            line = _chance_line(result, choice, kind, index)
            changes[choice.traces[kind, "chance"]] = line | {"name": "chance"}
        if choice.view == 0:
            layers = box_layers(result, choice.role, index, choice.cells)
            for place, (words, _, _) in enumerate(layers):
                changes[choice.traces["key", str(place)]] = {
                    "name": words,
                    "x": [None],
                    "y": [None],
                }
    # One update names the same attributes for every trace: what a trace lacks is set to nothing.
    data = {
        key: [values.get(key) for values in changes.values()]
        for key in ("z", "x", "y", "customdata", "name")
    }
    raw, relative, levels = _scales(result, sources, index)
    layout: dict[str, Any] = {
        "shapes": _shapes(result, choices, index),
        "coloraxis.cmin": raw["cmin"],
        "coloraxis.cmax": raw["cmax"],
        "coloraxis.colorbar.tickvals": raw["colorbar"]["tickvals"],
        "coloraxis.colorbar.ticktext": raw["colorbar"]["ticktext"],
        "coloraxis2.cmin": relative["cmin"],
        "coloraxis2.cmax": relative["cmax"],
        "coloraxis2.colorbar.tickvals": relative["colorbar"]["tickvals"],
        "coloraxis2.colorbar.ticktext": relative["colorbar"]["ticktext"],
    } | _axes(choices, levels)
    return [data, layout, list(changes)]


def _finish(
    figure: go.Figure,
    canvas: Canvas,
    result: ValueAlignmentResult,
    choices: list[Choice],
    sources: list[str],
    role: str,
    height: float,
) -> None:
    """Scales, legends, menus and the slider, now that the page's size is known."""
    raw, relative, levels = _scales(result, sources, 0)
    bar = figure.layout.coloraxis.colorbar.to_plotly_json()
    figure.update_layout(
        coloraxis=raw | {"colorbar": bar | raw["colorbar"]},
        coloraxis2=relative | {"colorbar": bar | relative["colorbar"]},
    )
    start = _axes(choices, levels) | _show_role(figure, result, choices, role)
    start |= _show_view(figure, choices, 0)
    legend = figure.layout.legend.to_plotly_json()
    for name in result.roles:
        key = _legend(result, name)
        figure.update_layout({key: legend | {"visible": start.pop(f"{key}.visible")}})
    figure.update_layout({key.replace(".", "_"): value for key, value in start.items()})
    figure.update_layout(
        updatemenus=_menus(figure, canvas, result, choices, sources, role),
        annotations=[*figure.layout.annotations, *_menu_labels(canvas)],
    )
    if len(result.thresholds) > 1:
        left, top = canvas.fraction(LEFT, height - SLIDER + 12)
        right, _ = canvas.fraction(LEFT + max(choices[0].cells.across, 300), 0)
        figure.update_layout(
            sliders=[
                {
                    "active": 0,
                    "x": left,
                    "xanchor": "left",
                    "y": top,
                    "yanchor": "top",
                    "len": right - left,
                    "pad": {"t": 0, "b": 0, "l": 0, "r": 0},
                    "currentvalue": {
                        "prefix": "directions carrying ",
                        "suffix": " of squared singular values",
                        "font": {"size": 12},
                    },
                    "font": {"size": 11},
                    "steps": [
                        {
                            "label": share(threshold),
                            "method": "update",
                            "args": _step(result, choices, sources, index),
                        }
                        for index, threshold in enumerate(result.thresholds)
                    ],
                }
            ]
        )


def _show_role(
    figure: go.Figure, result: ValueAlignmentResult, choices: list[Choice], role: str
) -> dict[str, Any]:
    """Layout changes that open one role's x axes and close the others'."""
    changes: dict[str, Any] = {}
    page = figure.layout.width
    for choice in choices:
        for panel in (choice.main, choice.right, choice.bottom):
            left = (20 + panel.left) / page
            changes[f"xaxis{panel.x[1:]}.domain"] = (
                [left, left + panel.width / page] if choice.role == role else CLOSED
            )
        changes[f"{_legend(result, choice.role)}.visible"] = choice.role == role
    return changes


def _show_view(figure: go.Figure, choices: list[Choice], view: int) -> dict[str, Any]:
    """Layout changes that open one view's y axes and close the other's."""
    changes: dict[str, Any] = {
        "coloraxis.showscale": view == 0,
        "coloraxis2.showscale": view == 1,
    }
    for choice in choices:
        for panel in (choice.main, choice.right, choice.bottom):
            changes[f"yaxis{panel.y[1:]}.domain"] = (
                list(figure.layout[f"yaxis{panel.y[1:]}"].domain) if choice.view == view else CLOSED
            )
    return changes


def _menus(
    figure: go.Figure,
    canvas: Canvas,
    result: ValueAlignmentResult,
    choices: list[Choice],
    sources: list[str],
    role: str,
) -> list[dict[str, Any]]:
    moved = sorted(
        (at, source)
        for choice in choices
        for (_, source), at in choice.traces.items()
        if source in sources
    )
    options: list[tuple[int, list[tuple[str, str, list[Any]]]]] = [
        (
            list(result.roles).index(role),
            [
                (f"{safe(name)}", "relayout", [_show_role(figure, result, choices, name)])
                for name in result.roles
            ],
        ),
        (
            0,
            [
                (
                    safe(source_words(source)),
                    "restyle",
                    [
                        {"visible": [of == source for _, of in moved]},
                        [at for at, _ in moved],
                    ],
                )
                for source in sources
            ],
        ),
        (
            0,
            [
                (name, "relayout", [_show_view(figure, choices, view)])
                for view, name in enumerate(VIEWS)
            ],
        ),
    ]
    menus = []
    for (active, buttons), left in zip(options, MENU_PLACES, strict=True):
        x, y = canvas.fraction(left, 16)
        menus.append(
            {
                "type": "dropdown",
                "active": active,
                "direction": "down",
                "showactive": True,
                "x": x,
                "xanchor": "left",
                "y": y,
                "yanchor": "top",
                "pad": {"t": 0, "b": 0, "l": 0, "r": 0},
                "font": {"size": 12, "color": "#222"},
                "bgcolor": "#f4f4f4",
                "bordercolor": GREY,
                "buttons": [
                    {"label": label, "method": method, "args": args}
                    for label, method, args in buttons
                ],
            }
        )
    return menus


def _menu_labels(canvas: Canvas) -> list[dict[str, Any]]:
    labels = []
    for words, left in zip(("role", "source", "view"), MENU_PLACES, strict=True):
        x, y = canvas.fraction(left, 12)
        labels.append(
            {
                "text": words,
                "x": x,
                "y": y,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
                "borderpad": 0,
                "font": {"size": 11, "color": GREY},
            }
        )
    return labels

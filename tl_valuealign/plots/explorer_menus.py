"""Menus and slider of the explorer: every choice moves what no other choice touches."""

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.boxes import box_layers, box_shape
from tl_valuealign.plots.canvas import Canvas
from tl_valuealign.plots.common import (
    GREY,
    KIND,
    alignment_range,
    known,
    relative_scale,
    safe,
    share,
    source_words,
    value_scale,
)
from tl_valuealign.result import ValueAlignmentResult

if TYPE_CHECKING:
    from tl_valuealign.plots.explorer import Choice

AWAY = 5000.0  # so far along an axis that nothing lies there
VIEW_NAMES = ("alignment", "relative to chance")


def legend_of(result: ValueAlignmentResult, role: str) -> str:
    """Every role has a legend of its own, so that its boxes' count shows with it."""
    number = list(result.roles).index(role) + 1
    return "legend" if number == 1 else f"legend{number}"


def shapes(
    result: ValueAlignmentResult, choices: "list[Choice]", index: int
) -> list[dict[str, Any]]:
    """The full list of outlines at a threshold, for every role and view."""
    return [
        box_shape(choice.main, dash, path)
        for choice in choices
        for _, dash, path in box_layers(result, choice.role, index, choice.cells)
    ]


def scales(
    result: ValueAlignmentResult, sources: list[str], index: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Colour axes of alignment and of alignment over chance at a threshold, all roles alike."""
    threshold = result.thresholds[index]
    parts, ratios = [], []
    for role, values in result.roles.items():
        for source in sources:
            part = result.alignment(role, source, threshold).numpy()
            parts.append(part)
            ratios.append(np.log2(part / values.chance[index].numpy()))
    chance = np.concatenate([known(values.chance[index]) for values in result.roles.values()])
    raw = value_scale(*alignment_range(parts), float(chance.mean()) if len(chance) else None)
    return raw, relative_scale(ratios)


def add_menus(
    figure: go.Figure,
    canvas: Canvas,
    result: ValueAlignmentResult,
    choices: "list[Choice]",
    sources: list[str],
    role: str,
) -> None:
    """Menus for role, source and view, and the state in which they start."""
    home = {
        key: tuple(figure.layout[key].range)
        for key in (axis for axis in figure.layout if axis.startswith(("xaxis", "yaxis")))
    }
    headings = len(figure.layout.annotations)
    left = choices[0].main.left
    figure.update_layout(
        annotations=[*figure.layout.annotations, *_headings(canvas, result, choices[0].main.left)]
    )
    by_role = {name: _show_role(result, choices, home, headings, name) for name in result.roles}
    by_view = [_show_view(choices, home, view) for view in range(len(VIEW_NAMES))]
    legend = figure.layout.legend.to_plotly_json()
    for name in result.roles:
        figure.update_layout({legend_of(result, name): legend})
    for key, value in (by_role[role] | by_view[0]).items():
        _set(figure, key, value)
    moved = [
        (at, source)
        for choice in choices
        for (_, source), at in choice.traces.items()
        if source in sources
    ]
    indices = [at for at, _ in moved]
    menus = (
        (
            "role",
            left,
            list(result.roles).index(role),
            [(safe(name), "relayout", [by_role[name]]) for name in result.roles],
        ),
        (
            "source",
            left + 74,
            0,
            [
                (
                    safe(source_words(source)),
                    "restyle",
                    [{"visible": [of == source for _, of in moved]}, indices],
                )
                for source in sources
            ],
        ),
        (
            "view",
            left + 304,
            0,
            [(name, "relayout", [by_view[view]]) for view, name in enumerate(VIEW_NAMES)],
        ),
    )
    figure.update_layout(
        updatemenus=[_menu(canvas, place, active, buttons) for _, place, active, buttons in menus],
        annotations=[
            *figure.layout.annotations,
            *(_label(canvas, name, place, 6) for name, place, _, _ in menus),
        ],
    )


def add_slider(
    figure: go.Figure,
    canvas: Canvas,
    result: ValueAlignmentResult,
    choices: "list[Choice]",
    sources: list[str],
    top: float,
) -> None:
    """A slider over the thresholds of the result."""
    main = choices[0].main
    x, y = canvas.fraction(main.left, top)
    end, _ = canvas.fraction(main.left + main.width, top)
    steps = [
        {
            "label": share(threshold),
            "method": "update",
            "args": _step(result, choices, sources, index),
        }
        for index, threshold in enumerate(result.thresholds)
    ]
    figure.update_layout(
        sliders=[
            {
                "active": 0,
                "x": x,
                "xanchor": "left",
                "y": y,
                "yanchor": "top",
                "len": end - x,
                "pad": {"t": 0, "b": 0, "l": 0, "r": 0},
                "currentvalue": {
                    "prefix": "directions carrying ",
                    "suffix": " of squared singular values",
                    "font": {"size": 12},
                },
                "font": {"size": 11},
                "steps": steps,
            }
        ]
    )


def _step(
    result: ValueAlignmentResult, choices: "list[Choice]", sources: list[str], index: int
) -> list[Any]:
    """Arguments of ``Plotly.update`` that show another threshold, whatever else is chosen."""
    from tl_valuealign.plots.explorer import chance_line, grid_values

    changes: dict[int, dict[str, Any]] = {}
    for choice in choices:
        for source in sources:
            for kind, values in grid_values(result, choice, source, index).items():
                changes[choice.traces[kind, source]] = values
        for kind in ("right", "bottom"):
            line = chance_line(result, choice, kind, index)
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
        key: [_encoded(values.get(key)) for values in changes.values()]
        for key in ("z", "x", "y", "customdata", "name")
    }
    layout: dict[str, Any] = {"shapes": shapes(result, choices, index)}
    for axis, scale in zip(
        ("coloraxis", "coloraxis2"), scales(result, sources, index), strict=True
    ):
        layout |= {
            f"{axis}.cmin": scale["cmin"],
            f"{axis}.cmax": scale["cmax"],
            f"{axis}.colorbar.tickvals": scale["colorbar"]["tickvals"],
            f"{axis}.colorbar.ticktext": scale["colorbar"]["ticktext"],
        }
    return [data, layout, list(changes)]


def _encoded(value: Any) -> Any:
    """An array in plotly's own binary form: what plotly does for traces but not for sliders."""
    if not isinstance(value, np.ndarray):
        return value
    kind = f"{value.dtype.kind}{value.dtype.itemsize}"
    array = {"dtype": kind, "bdata": b64encode(np.ascontiguousarray(value).tobytes()).decode()}
    return array if value.ndim == 1 else array | {"shape": ", ".join(map(str, value.shape))}


def _show_role(
    result: ValueAlignmentResult,
    choices: "list[Choice]",
    home: dict[str, tuple[float, float]],
    headings: int,
    role: str,
) -> dict[str, Any]:
    """Layout changes that bring one role's x axes into sight and send the others' away."""
    changes: dict[str, Any] = {}
    for choice in choices:
        for panel in (choice.main, choice.right, choice.bottom):
            key = f"xaxis{panel.x[1:]}"
            changes[f"{key}.range"] = _range(home[key], choice.role == role)
    for place, name in enumerate(result.roles):
        changes[f"{legend_of(result, name)}.visible"] = name == role
        changes[f"annotations[{headings + place}].visible"] = name == role
    return changes


def _show_view(
    choices: "list[Choice]", home: dict[str, tuple[float, float]], view: int
) -> dict[str, Any]:
    """Layout changes that bring one view's y axes into sight and send the other's away."""
    changes: dict[str, Any] = {
        "coloraxis.showscale": view == 0,
        "coloraxis2.showscale": view == 1,
    }
    for choice in choices:
        for panel in (choice.main, choice.right, choice.bottom):
            key = f"yaxis{panel.y[1:]}"
            changes[f"{key}.range"] = _range(home[key], choice.view == view)
        ticks = f"xaxis{choice.right.x[1:]}"
        changes[f"{ticks}.showticklabels"] = choice.view == view
        changes[f"{ticks}.showgrid"] = choice.view == view
    return changes


def _range(home: tuple[float, float], shown: bool) -> list[float]:
    return list(home) if shown else [edge + AWAY for edge in home]


def _set(figure: go.Figure, key: str, value: Any) -> None:
    """Apply a dotted layout change, as ``Plotly.relayout`` would."""
    if key.startswith("annotations["):
        place = int(key[len("annotations[") : key.index("]")])
        figure.layout.annotations[place].visible = value
    else:
        container, attribute = key.split(".")
        figure.layout[container][attribute] = value


def _headings(canvas: Canvas, result: ValueAlignmentResult, left: float) -> list[dict[str, Any]]:
    return [
        _label(
            canvas,
            f"<b>{safe(name)}</b>  {values.numerical_rank.shape[1]} {KIND.get(name, 'heads')}",
            left,
            66,
            color=None,
            size=12,
        )
        for name, values in result.roles.items()
    ]


def _label(
    canvas: Canvas,
    text: str,
    left: float,
    top: float,
    *,
    color: str | None = GREY,
    size: int = 11,
) -> dict[str, Any]:
    x, y = canvas.fraction(left, top)
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "borderpad": 0,
        "font": {"size": size} | ({"color": color} if color else {}),
    }


def _menu(
    canvas: Canvas, left: float, active: int, buttons: list[tuple[str, str, list[Any]]]
) -> dict[str, Any]:
    x, y = canvas.fraction(left, 6)
    return {
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
            {"label": label, "method": method, "args": args} for label, method, args in buttons
        ],
    }

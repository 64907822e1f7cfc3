"""Menus of the explorer: every choice moves what no other choice touches."""

from typing import Any

import plotly.graph_objects as go

from tl_valuealign.plots.canvas import Canvas
from tl_valuealign.plots.common import GREY, KIND, count_of, safe, source_words
from tl_valuealign.plots.explorer_traces import Choice, legend_of
from tl_valuealign.result import ValueAlignmentResult

AWAY = 5000.0  # so far along an axis that nothing lies there
VIEWS = ("alignment", "relative to chance")


def add_menus(
    figure: go.Figure,
    canvas: Canvas,
    result: ValueAlignmentResult,
    choices: list[Choice],
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
    by_view = [_show_view(choices, home, view) for view in range(len(VIEWS))]
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
            [(name, "relayout", [by_view[view]]) for view, name in enumerate(VIEWS)],
        ),
    )
    figure.update_layout(
        updatemenus=[_menu(canvas, place, active, buttons) for _, place, active, buttons in menus],
        annotations=[
            *figure.layout.annotations,
            *(_label(canvas, name, place, 6) for name, place, _, _ in menus),
        ],
    )


def _show_role(
    result: ValueAlignmentResult,
    choices: list[Choice],
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
    choices: list[Choice], home: dict[str, tuple[float, float]], view: int
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
    labels = []
    for name, values in result.roles.items():
        counted = count_of(values.numerical_rank.shape[1], KIND.get(name, "heads"))
        text = f"<b>{safe(name)}</b>  {counted}"
        labels.append(_label(canvas, text, left, 66, color=None, size=12))
    return labels


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

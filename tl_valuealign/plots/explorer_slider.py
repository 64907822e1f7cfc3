"""Slider of the explorer: each step replaces numbers, outlines and scales of every choice."""

from base64 import b64encode
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.boxes import box_layers, box_shape
from tl_valuealign.plots.canvas import Canvas
from tl_valuealign.plots.common import alignment_range, known, relative_scale, share, value_scale
from tl_valuealign.plots.explorer_traces import Choice, chance_line, grid_values
from tl_valuealign.result import ValueAlignmentResult


def shapes(result: ValueAlignmentResult, choices: list[Choice], index: int) -> list[dict[str, Any]]:
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
    raw["colorbar"]["ticktext"] = [
        words.replace("<b>chance</b>", "<b>chance</b>,<br>all roles")
        for words in raw["colorbar"]["ticktext"]
    ]
    return raw, relative_scale(ratios)


def add_slider(
    figure: go.Figure,
    canvas: Canvas,
    result: ValueAlignmentResult,
    choices: list[Choice],
    sources: list[str],
    top: float,
) -> None:
    """A slider over the thresholds of the result, in order; it starts at the first of them."""
    main = choices[0].main
    order = sorted(range(len(result.thresholds)), key=lambda index: result.thresholds[index])
    x, y = canvas.fraction(main.left, top)
    end, _ = canvas.fraction(main.left + main.width, top)
    steps = [
        {
            "label": share(result.thresholds[index]),
            "method": "update",
            "args": _step(result, choices, sources, index),
        }
        for index in order
    ]
    figure.update_layout(
        sliders=[
            {
                "active": order.index(0),
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
    result: ValueAlignmentResult, choices: list[Choice], sources: list[str], index: int
) -> list[Any]:
    """Arguments of ``Plotly.update`` that show another threshold, whatever else is chosen."""
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
                key = {"name": words, "x": [None], "y": [None]}
                changes[choice.traces["key", str(place)]] = key
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

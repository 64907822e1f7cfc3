"""What a report's page draws from: figures in two widths, and every number, packed small."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from tl_valuealign.asking import along_curve
from tl_valuealign.plots import common
from tl_valuealign.plots.boxes import dash_start, has_intervals
from tl_valuealign.plots.canvas import Look
from tl_valuealign.plots.explorer import draw_explorer_base, level_axis
from tl_valuealign.plots.explorer_slider import scales
from tl_valuealign.plots.grid import hover
from tl_valuealign.report_heads import decoded_directions, tokens_in_context
from tl_valuealign.report_pack import role_numbers, starts
from tl_valuealign.report_plates import Plate
from tl_valuealign.result import FULL, ValueAlignmentResult

WIDE, NARROW = Look(bare=True, page=1160), Look(bare=True, narrow=True)


def page_data(
    result: ValueAlignmentResult, found: list[Plate], directions: pd.DataFrame | None
) -> str:
    """All of it as JSON that may stand inside a ``<script>`` element."""
    curve = along_curve(result)
    order = [*curve.sources, FULL]
    intervals = {role: has_intervals(curve, role, 0) for role in curve.roles}
    explorer = {}
    for role, values in curve.roles.items():
        both = _both(partial(draw_explorer_base, curve, role))
        explorer[role] = both | {
            "hover": hover(
                role, "SOURCE", values.singular_values.shape[-1], intervals=intervals[role]
            ),
            "start": dash_start(_cell(both["wide"])),
        }
    document = {
        "figures": {
            plate.name: _both(plate.draw) | {"threshold": plate.threshold} for plate in found
        },
        "explorer": explorer,
        "roles": {role: role_numbers(curve, role, intervals[role]) for role in curve.roles},
        "tokens": tokens_in_context(result),
        "directions": {} if directions is None else decoded_directions(result, directions),
        "sources": order,
        "starts": starts(curve),
        "words": [common.safe(common.source_words(source)) for source in order],
        "plainWords": [common.source_words(source) for source in order],
        "gapWords": "not upstream of these blocks, or a zero read-in matrix",
        "layers": curve.layers,
        "thresholds": curve.thresholds,
        "scales": [
            [go.layout.Coloraxis(**scale).to_plotly_json() for scale in scales(curve, order, at)]
            for at in range(len(curve.thresholds))
        ],
        "levels": [level_axis(curve, view) for view in range(2)],
        "colours": {
            "embed": common.EMBED,
            "full": common.FULL_STREAM,
            "attention": common.ATTENTION,
            "mlp": common.MLP,
            "grey": common.GREY,
            "faint": common.FAINT,
        },
    }
    return script_safe(json.dumps(document, allow_nan=False, separators=(",", ":")))


def script_safe(text: str) -> str:
    """JSON that no ``</script>``, ``<!--`` or line separator inside a string can break out of."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _both(draw: Callable[[Look], go.Figure]) -> dict[str, Any]:
    """Traces once, layouts for wide and for narrow pages."""
    wide, narrow = _plain(draw(WIDE)), _plain(draw(NARROW))
    return {"data": wide["data"], "wide": wide["layout"], "narrow": narrow["layout"]}


def _cell(layout: dict[str, Any]) -> float:
    """Pixels from one row of the first grid to the next."""
    axis = layout["yaxis"]
    span = (axis["domain"][1] - axis["domain"][0]) * layout["height"]
    return float(span / abs(axis["range"][1] - axis["range"][0]))


def _plain(figure: go.Figure) -> dict[str, Any]:
    """A figure as plain JSON data, without template, on the page's own background."""
    figure.layout.template = None
    figure.layout.paper_bgcolor = "rgba(0,0,0,0)"
    document: dict[str, Any] = json.loads(figure.to_json())
    document["layout"].pop("template", None)
    return document

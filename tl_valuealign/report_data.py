"""What a report's page draws from: figures in two widths, and every number, packed small."""

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots import common
from tl_valuealign.plots.boxes import dash_start, has_intervals
from tl_valuealign.plots.canvas import Look
from tl_valuealign.plots.directions import draw_directions
from tl_valuealign.plots.explorer import draw_explorer_base, level_axis
from tl_valuealign.plots.explorer_slider import scales
from tl_valuealign.plots.full_stream import draw_full_stream
from tl_valuealign.plots.grid import hover
from tl_valuealign.plots.norms import draw_norms
from tl_valuealign.plots.projected import draw_projected_norms
from tl_valuealign.plots.rows import layer_rows
from tl_valuealign.plots.sources import draw_sources
from tl_valuealign.result import FULL, ValueAlignmentResult

WIDE, NARROW = Look(bare=True, page=1160), Look(bare=True, narrow=True)
PLAIN = Look()


@dataclass(frozen=True)
class Plate:
    """One figure of the page: its title, one sentence on how to read it, and how to draw it."""

    name: str
    title: str
    reading: str
    draw: Callable[[Look], go.Figure]


def plates(result: ValueAlignmentResult) -> list[Plate]:
    """The post's seven figures in its order, as far as the result has their roles."""
    rows = layer_rows(result, None)

    def sources(role: str, index: int) -> Callable[[Look], go.Figure]:
        return partial(draw_sources, result, role, rows, index, False)

    first = common.share(result.thresholds[0])
    found = []
    if "V" in result.roles:
        found.append(
            Plate(
                "sources-V",
                "Which earlier output do value heads look for?",
                "Each small grid is one block. Rows are what was written before it, the token "
                "embedding first; columns are its heads. A row brighter than the rest is a source "
                "that points into the heads’ input directions more than the others do; the bar "
                "marks what a random direction would give.",
                sources("V", 0),
            )
        )
    if "K" in result.roles:
        found.append(
            Plate(
                "sources-K",
                "And key heads?",
                "The same for keys, on the same colour scale: if the embedding row stands out "
                "above but not here, looking for the embedding is particular to values.",
                sources("K", 0),
            )
        )
    found.append(
        Plate(
            "norms",
            "Is the embedding simply large?",
            "Lines are mean lengths of what each block writes, the dashed level is the embedding. "
            "A source that is not long but stood out above did so by its direction.",
            partial(draw_norms, result),
        )
    )
    if "V" in result.roles:
        found += [
            Plate(
                "directions-V",
                "How choosy are value heads?",
                f"Left, how many directions carry {first} of a head’s squared singular values; "
                "right, how many it has at all. The fewer on the left, the more an alignment "
                "says; near the maximum, almost any stream would fit.",
                partial(draw_directions, result, "V", 0),
            )
        ]
    found.append(
        Plate(
            "full-stream",
            "How much of the whole stream do the heads see?",
            "One cell a head, layers downwards. Outlined value heads see more of the full stream "
            "than of the embedding alone. The strips below show layer means beside chance.",
            partial(draw_full_stream, result, 0, False),
        )
    )
    if "V" in result.roles:
        found.append(
            Plate(
                "projected-V",
                "How much does each output add to the values?",
                "The same grids, now coloured by the squared length of what a source alone would "
                "put into the value vector, on a log scale, with the full stream’s on top. A "
                "source can point well and still add little, if it is short.",
                partial(draw_projected_norms, result, "V", rows),
            )
        )
        if 0.5 in result.thresholds:
            found.append(
                Plate(
                    "sources-V-50",
                    "Does it hold for the strongest directions alone?",
                    "The first figure again, with only as many directions as carry half of the "
                    "squared singular values: the pattern should stay if it is not an artefact "
                    "of counting many weak directions.",
                    sources("V", result.threshold_index(0.5)),
                )
            )
    return found


def page_data(result: ValueAlignmentResult, found: list[Plate]) -> str:
    """All of it as JSON that may stand inside a ``<script>`` element."""
    order = [*result.sources, FULL]
    intervals = {role: has_intervals(result, role, 0) for role in result.roles}
    explorer = {}
    for role, values in result.roles.items():
        both = _both(partial(draw_explorer_base, result, role))
        explorer[role] = both | {
            "hover": hover(
                role, "SOURCE", values.singular_values.shape[-1], intervals=intervals[role]
            ),
            "start": dash_start(both["cell"]),
        }
    document = {
        "figures": {plate.name: _both(plate.draw) for plate in found},
        "explorer": explorer,
        "roles": {role: _packed(result, role, intervals[role]) for role in result.roles},
        "sources": order,
        "words": [common.safe(common.source_words(source)) for source in order],
        "plainWords": [common.source_words(source) for source in order],
        "gapWords": "not upstream of these blocks, or a zero read-in matrix",
        "layers": result.layers,
        "thresholds": result.thresholds,
        "scales": [
            [go.layout.Coloraxis(**scale).to_plotly_json() for scale in scales(result, order, at)]
            for at in range(len(result.thresholds))
        ],
        "levels": [level_axis(result, view) for view in range(2)],
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
    axis = wide["layout"]["yaxis"]
    span = (axis["domain"][1] - axis["domain"][0]) * wide["layout"]["height"]
    return {
        "data": wide["data"],
        "wide": wide["layout"],
        "narrow": narrow["layout"],
        "cell": span / abs(axis["range"][1] - axis["range"][0]),
    }


def _plain(figure: go.Figure) -> dict[str, Any]:
    """A figure as plain JSON data, without template, on the page's own background."""
    figure.layout.template = None
    figure.layout.paper_bgcolor = "rgba(0,0,0,0)"
    document: dict[str, Any] = json.loads(figure.to_json())
    document["layout"].pop("template", None)
    return document


def _packed(result: ValueAlignmentResult, role: str, intervals: bool) -> dict[str, Any]:
    values = result.role(role)
    alignment = np.concatenate([values.by_source.numpy(), values.full.numpy()[:, None]], axis=1)
    stderr = np.concatenate(
        [values.by_source_stderr.numpy(), values.full_stderr.numpy()[:, None]], axis=1
    )
    known = stderr[np.isfinite(stderr)]
    scale = float(known.max()) if known.size and known.max() > 0 else 1.0
    boxes = [
        result.boxes(threshold, role=role).numpy().astype(np.uint8)
        + result.boxes(threshold, role=role, significant=True).numpy()
        for threshold in result.thresholds
    ]
    return {
        "heads": values.numerical_rank.shape[1],
        "d_head": values.singular_values.shape[-1],
        "alignment": _fractions(alignment),
        "stderr": _fractions(stderr / scale, np.uint8) if intervals else None,
        "stderrScale": scale,
        "chance": _array(values.chance.numpy().astype(np.float32)),
        "directions": _array(values.n_directions.numpy().astype(np.uint16)),
        "rank": _array(values.numerical_rank.numpy().astype(np.uint16)),
        "boxes": _array(np.stack(boxes).astype(np.uint8)),
        "spectrum": _fractions(_relative(values.singular_values.numpy())),
    }


def _relative(spectrum: common.Array) -> common.Array:
    """Singular values with the largest of each head as 1; zero heads stay zero."""
    first = spectrum[..., :1]
    return spectrum / np.where(first > 0, first, 1.0)


def _fractions(values: common.Array, kind: Any = np.uint16) -> dict[str, str]:
    """Numbers from 0 to 1 in even steps (16 bits: off by at most 8e-6); the top code is NaN."""
    top = np.iinfo(kind).max
    near = np.clip(np.rint(np.nan_to_num(values) * (top - 1)), 0, top - 1)
    return _array(np.where(np.isfinite(values), near, top).astype(kind))


def _array(values: Any) -> dict[str, str]:
    """Raw little-endian bytes, as a page reads them."""
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    kind = f"{values.dtype.kind}{values.dtype.itemsize}"
    return {"dtype": kind, "bdata": b64encode(little.tobytes()).decode()}

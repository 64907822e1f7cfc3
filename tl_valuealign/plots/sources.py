"""Which earlier output points into a head's input directions: embedding and attention outputs."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.boxes import has_intervals, interval_note
from tl_valuealign.plots.canvas import BAR_GAP, Canvas, Look
from tl_valuealign.plots.common import (
    Array,
    alignment_range,
    known,
    metric_words,
    relative_scale,
    subtitle,
    value_scale,
)
from tl_valuealign.plots.grid import hover, name_gaps, numbers
from tl_valuealign.plots.rows import HEADING, draw_rows, layer_rows
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.shapes import typed

NAMES = {"Q": "Query", "K": "Key", "V": "Value", "OV": "Value-output"}


@typed
def plot_sources(
    result: ValueAlignmentResult,
    *,
    role: str = "V",
    layers: Sequence[int] | None = None,
    threshold: float | None = None,
    relative: bool = False,
) -> go.Figure:
    """Alignment of the embedding and of every attention output with the heads of some blocks.

    One grid per block: sources down, heads across. ``layers=None`` takes six blocks spread over
    the second half. The colour range depends on result and threshold only, so that figures of two
    roles compare at a glance. ``relative=True`` divides by chance. Raises ``InputError`` for a
    role, block or threshold that was not measured.
    """
    result.role(role)
    index = result.threshold_index(threshold)
    return draw_sources(result, role, layer_rows(result, layers), index, relative, Look())


def draw_sources(
    result: ValueAlignmentResult,
    role: str,
    rows: Sequence[int],
    index: int,
    relative: bool,
    look: Look,
) -> go.Figure:
    """As many grids side by side as a page holds, or one where the page is narrow."""
    values = result.role(role)
    canvas = Canvas(
        f"{NAMES.get(role, role)} heads: how well each earlier output lines up with what they read",
        subtitle(result, index, metric_words(result, relative), interval_note(result)),
        look,
    )

    def cells(row: int, sources: Sequence[str]) -> tuple[Array, Array]:
        where = [result.source_index(source) for source in sources]
        stack = [
            numbers(
                result,
                role,
                index,
                values.by_source[index, at].numpy(),
                values.by_source_stderr[index, at].numpy(),
            )[row]
            for at in where
        ]
        behind = np.stack(stack) if stack else np.empty((0, values.numerical_rank.shape[1], 7))
        return (np.log2(behind[..., 3]) if relative else behind[..., 0]), behind

    d_head = values.singular_values.shape[-1]
    intervals = has_intervals(result, role, index)
    width, height, down = draw_rows(
        canvas,
        result,
        role,
        rows,
        cells,
        lambda source: hover(role, source, d_head, intervals=intervals),
        summary=lambda row: _means(result, role, index, row),
    )
    name_gaps(canvas, "not upstream of this block")
    canvas.layout["coloraxis"] = _scale(result, role, index, relative)
    width = canvas.colour_bar(width + BAR_GAP, HEADING, min(max(down, 120), 340))
    return canvas.figure(width, height)


def _means(result: ValueAlignmentResult, role: str, index: int, row: int) -> str:
    """The two averages that a reader compares first."""
    values = result.role(role).by_source[index, :, row].numpy()
    outputs = [at for at, source in enumerate(result.sources) if source.endswith("_attn_out")]
    embed, rest = known(values[0]), known(values[outputs])
    if not len(embed) or not len(rest):
        return ""
    return f"mean: embedding {embed.mean():.2f}, attention {rest.mean():.2f}"


def _scale(
    result: ValueAlignmentResult, role: str, index: int, relative: bool
) -> dict[str, object]:
    values = result.role(role)
    if relative:
        return relative_scale(
            np.log2((v.by_source[index] / v.chance[index]).numpy()) for v in result.roles.values()
        )
    low, high = alignment_range(v.by_source[index] for v in result.roles.values())
    chance = known(values.chance[index])
    return value_scale(low, high, float(chance.mean()) if len(chance) else None)

"""Raw L2 norms of what is written into the stream, block by block."""

import math

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.plots.canvas import Canvas, Look, Panel
from tl_valuealign.plots.common import (
    ATTENTION,
    EMBED,
    FULL_STREAM,
    GREY,
    MLP,
    Array,
    known,
    log_ticks,
    plain,
    safe,
    subtitle,
    thinned,
)
from tl_valuealign.plots.rows import block
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.shapes import typed

LEFT, WIDTH, NARROW, HEIGHT, UNDER = 62, 620, 260, 320, 48
LOG_FROM = 30  # a linear axis hides what is this many times smaller

STYLE = {
    "attn_out": ("attention output", ATTENTION, "solid", "circle"),
    "mlp_out": ("MLP output", MLP, "solid", "square"),
    "embed": ("token embedding", EMBED, "dash", "circle"),
    "pos_embed": ("positional embedding", GREY, "dot", "circle"),
}


@typed
def plot_norms(result: ValueAlignmentResult) -> go.Figure:
    """Mean ‖x̄‖ of attention (and MLP) outputs by block, the embedding as a level line.

    The full stream that each block reads is drawn too. The axis is logarithmic where the norms
    span more than a factor of 30.
    """
    return draw_norms(result, Look())


def draw_norms(result: ValueAlignmentResult, look: Look) -> go.Figure:
    """Narrower where the page is."""
    width = NARROW if look.narrow else WIDTH
    canvas = Canvas(
        "How large each layer’s output is beside the token embedding",
        subtitle(result, None, "mean L2 norm over tokens, of the mean-free part under LayerNorm"),
        look,
    )
    numbers = sorted({*result.layers, *(block(s) for s in result.sources if block(s) >= 0)})
    values = known(np.concatenate([result.norms.numpy(), result.full_norms.numpy()]))
    values = values[values > 0]
    span = (float(values.min()), float(values.max())) if len(values) else (1.0, 1.0)
    log = span[1] / span[0] > LOG_FROM
    limits = _limits(span, log)
    ticks = log_ticks(*limits) if log else []
    first, last = numbers[0], numbers[-1]
    spacing = width / (last - first + 1)
    shown = [first + at for at in thinned(last - first + 1, spacing, 10 + 8 * len(str(last)))]
    panel = canvas.panel(
        LEFT,
        8,
        width,
        HEIGHT,
        x={
            "range": [first - 0.5, last + 0.5],
            "tickvals": shown,
            "ticktext": [str(number) for number in shown],
            "title": {"text": "block"},
        },
        y={
            "type": "log" if log else "linear",
            "range": limits,
            **({"tickvals": ticks, "ticktext": [plain(tick) for tick in ticks]} if log else {}),
            "title": {"text": "mean norm" + (" (log scale)" if log else "")},
            "showgrid": True,
        },
    )
    _lines(canvas, panel, result, first, last)
    return canvas.figure(LEFT + width + 8, 8 + HEIGHT + UNDER)


def _limits(span: tuple[float, float], log: bool) -> list[float]:
    if log:
        low, high = (math.log10(value) for value in span)
        return [low - 0.06 * (high - low), high + 0.06 * (high - low)]
    return [0.0, 1.06 * span[1]]


def _lines(
    canvas: Canvas, panel: Panel, result: ValueAlignmentResult, first: int, last: int
) -> None:
    norms = result.norms.numpy()
    canvas.traces.append(
        _line(
            panel,
            list(result.layers),
            result.full_norms.numpy(),
            "full stream into the block",
            FULL_STREAM,
            "dashdot",
            "diamond",
        )
    )
    kinds: dict[str, list[int]] = {}
    for at, source in enumerate(result.sources):
        kinds.setdefault(source.partition("_")[2] if block(source) >= 0 else source, []).append(at)
    for kind, where in kinds.items():
        name, colour, dash, symbol = STYLE.get(kind, (safe(kind), GREY, "solid", "x"))
        if block(result.sources[where[0]]) >= 0:
            x: list[float] = [block(result.sources[at]) for at in where]
            y = norms[where]
            name = f"{name} of the block"
        else:
            x, y = [first - 0.5, last + 0.5], norms[[where[0]] * 2]
        canvas.traces.append(_line(panel, x, y, name, colour, dash, symbol))


def _line(
    panel: Panel,
    x: list[float] | list[int],
    y: Array,
    name: str,
    colour: str,
    dash: str,
    symbol: str,
) -> go.Scatter:
    level = isinstance(x[0], float)
    where = "" if level else "block %{x}: "
    return go.Scatter(
        x=x,
        y=np.where(y > 0, y, np.nan),
        xaxis=panel.x,
        yaxis=panel.y,
        mode="lines" if level or len(x) > 60 else "lines+markers",
        line={"color": colour, "width": 2, "dash": dash},
        marker={"color": colour, "size": 6, "symbol": symbol},
        name=name,
        showlegend=True,
        hovertemplate=f"<b>{name}</b><br>{where}%{{y:.4g}}<extra></extra>",
    )

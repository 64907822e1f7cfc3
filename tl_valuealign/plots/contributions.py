"""What each head's vectors are made of, block by block, and what becomes of the embedding."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign.contributions import BIAS, ContributionResult
from tl_valuealign.intervals import withheld
from tl_valuealign.plots.canvas import Canvas, Look, Panel
from tl_valuealign.plots.common import (
    ATTENTION,
    EMBED,
    FAINT,
    FULL_STREAM,
    GREY,
    KIND,
    MLP,
    Array,
    known,
    mean_over_heads,
    safe,
    thinned,
)
from tl_valuealign.shapes import typed

LEFT, WIDTH, HEIGHT, BETWEEN, HEADING = 58, 620, 190, 46, 22
NARROW_WIDTH = 270
STRIP, UNDER = 110, 44

# name, colour, and a hatching so that colour never carries the meaning alone
STYLE = {
    "embed": ("token embedding", EMBED, ""),
    "pos_embed": ("positional embedding", "#8a8a3c", "."),
    "attn_out": ("attention outputs", ATTENTION, "/"),
    "mlp_out": ("MLP outputs", MLP, "\\"),
    "mixer_out": ("other mixers’ outputs", "#5f7f9e", "x"),
    BIAS: ("bias", GREY, "-"),
}


@typed
def plot_contributions(result: ContributionResult) -> go.Figure:
    """Signed shares stacked by block, one panel per role, means over heads.

    What lies above zero minus what lies below it is 1 in every block. The strips at the foot show
    how far the rest of the stream points along the embedding (cosine, with 95% intervals) and how
    much of the embedding there is in the stream.
    """
    return draw_contributions(result, Look())


def draw_contributions(result: ContributionResult, look: Look) -> go.Figure:
    """The same in any look."""
    p = result.provenance
    canvas = Canvas(
        "What each head’s query, key and value are made of",
        [
            f"{safe(p['model_name'])} · {p['n_tokens']:,} tokens in {p['n_sequences']:,} sequences",
            "signed share ⟨v_s, v⟩ / ⟨v, v⟩, mean over heads; the shares of a block sum to 1",
            withheld(result.n_sequences),
        ],
        look,
    )
    across = NARROW_WIDTH if look.narrow else WIDTH
    canvas.subtitle = [line for line in canvas.subtitle if line]
    kinds = {role: result.by_kind(role) for role in result.roles}
    low, high = _range(kinds)
    for number, role in enumerate(result.roles):
        top = number * (HEADING + HEIGHT + BETWEEN) + HEADING
        panel = canvas.panel(
            LEFT,
            top,
            across,
            HEIGHT,
            x=_blocks(result, across, labels=False),
            y={"range": [low, high], "title": {"text": "share"}, "showgrid": True, "nticks": 6},
        )
        name = KIND.get(role, "heads")
        canvas.note(f"<b>{safe(role)}</b>  {name}", LEFT, top - 5, yanchor="bottom")
        for kind, values in kinds[role].items():
            canvas.traces.append(_bars(panel, result, role, kind, values.numpy(), number == 0))
        for level, dash in ((0.0, "solid"), (1.0, "dot")):
            canvas.shapes.append(_level(panel, level, dash))
    top = len(result.roles) * (HEADING + HEIGHT + BETWEEN) + HEADING
    for number, (words, line) in enumerate(_fate(result)):
        strip = canvas.panel(
            LEFT,
            top,
            across,
            STRIP,
            x=_blocks(result, across, labels=number == 1),
            y={"title": {"text": ""}, "showgrid": True, "nticks": 5},
        )
        canvas.note(f"<b>Embedding</b>  {words}", LEFT, top - 5, yanchor="bottom")
        canvas.shapes.append(_level(strip, 0.0, "solid"))
        canvas.traces.append(line.update(xaxis=strip.x, yaxis=strip.y))
        top += STRIP + BETWEEN + HEADING
    canvas.layout |= {"barmode": "relative", "bargap": 0.15}
    return canvas.figure(LEFT + across + 8, top - BETWEEN - HEADING + UNDER)


def _blocks(result: ContributionResult, width: float, *, labels: bool) -> dict[str, Any]:
    count = len(result.layers)
    shown = thinned(count, width / count, 10 + 8 * len(str(max(result.layers))))
    return {
        "range": [-0.5, count - 0.5],
        "tickvals": shown,
        "ticktext": [str(result.layers[i]) for i in shown],
        "title": {"text": "into block" if labels else ""},
    }


def _range(kinds: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """Room for the tallest stack on either side of zero."""
    highs, lows = [1.0], [0.0]
    for by_kind in kinds.values():
        means = np.stack([np.nan_to_num(mean_over_heads(v.numpy())) for v in by_kind.values()])
        highs.append(float(np.where(means > 0, means, 0).sum(0).max()))
        lows.append(float(np.where(means < 0, means, 0).sum(0).min()))
    return min(lows) * 1.08 - 0.02, max(highs) * 1.08


def _bars(
    panel: Panel, result: ContributionResult, role: str, kind: str, values: Array, legend: bool
) -> go.Bar:
    name, colour, hatching = STYLE.get(kind, (safe(kind), GREY, "+"))
    behind = np.stack([np.asarray(result.layers), _extreme(values, -1), _extreme(values, 1)], -1)
    return go.Bar(
        x=list(range(len(values))),
        y=mean_over_heads(values),
        xaxis=panel.x,
        yaxis=panel.y,
        name=name,
        legendgroup=kind,
        showlegend=legend,
        marker={
            "color": colour,
            "line": {"width": 0},
            "pattern": {
                "shape": hatching,
                "fillmode": "overlay",
                "size": 5,
                "solidity": 0.18,
                "fgcolor": "white",
            },
        },
        customdata=behind,
        hovertemplate=(
            f"<b>into block %{{customdata[0]:.0f}} · {safe(role)} · {name}</b><br>"
            "share %{y:+.3f}, heads from %{customdata[1]:+.3f} to %{customdata[2]:+.3f}"
            "<extra></extra>"
        ),
    )


def _extreme(values: Array, sign: int) -> Array:
    """Smallest (−1) or largest (+1) over heads, [layer]; NaN where all are missing."""
    filled = np.where(np.isnan(values), -np.inf, sign * values).max(-1)
    return np.where(np.isfinite(filled), sign * filled, np.nan)


def _level(panel: Panel, value: float, dash: str) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": f"{panel.x} domain",
        "x0": 0,
        "x1": 1,
        "yref": panel.y,
        "y0": value,
        "y1": value,
        "line": {"color": GREY if dash == "solid" else FAINT, "width": 1.2, "dash": dash},
    }


def _fate(result: ContributionResult) -> list[tuple[str, go.Scatter]]:
    """What becomes of the embedding before each block, in words and as a line."""
    fate = result.embedding
    x = list(range(len(result.layers)))
    width = fate.rest_cosine_half_width.numpy()
    lines = (
        ("cosine with the rest", fate.rest_cosine.numpy(), FULL_STREAM, "solid"),
        ("amount (1: as written)", fate.kept.numpy(), EMBED, "dash"),
    )
    return [
        (
            words,
            go.Scatter(
                x=x,
                y=y,
                mode="lines+markers" if len(x) < 40 else "lines",
                line={"color": colour, "width": 2, "dash": dash},
                marker={"size": 5},
                error_y={"array": width, "width": 2, "thickness": 1}
                if dash == "solid" and len(known(width))
                else None,
                name=words,
                showlegend=False,
                customdata=list(result.layers),
                hovertemplate=f"<b>into block %{{customdata}}</b><br>{words} %{{y:.3f}}"
                "<extra></extra>",
            ),
        )
        for words, y, colour, dash in lines
    ]

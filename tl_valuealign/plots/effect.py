"""Does it matter? The change of loss against what a head's geometry would lead one to expect."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_valuealign import arguments
from tl_valuealign.causal import SubstitutionResult
from tl_valuealign.contributions import ContributionResult
from tl_valuealign.errors import InputError
from tl_valuealign.identity import IdentityResult
from tl_valuealign.intervals import withheld
from tl_valuealign.plots.canvas import Canvas, Look
from tl_valuealign.plots.common import GREY, SEQUENTIAL, Array, known, safe, source_words, thinned
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.shapes import typed

LEFT, WIDTH, HEIGHT, UNDER = 66, 540, 380, 52
NARROW_WIDTH = 250


@dataclass(frozen=True)
class Against:
    """The horizontal axis: a figure per layer and head, [layer, head]."""

    words: str
    layers: tuple[int, ...]
    values: Array
    chance: float | None


@typed
def plot_effect(
    effect: SubstitutionResult,
    against: ValueAlignmentResult | ContributionResult | IdentityResult,
    *,
    role: str | None = None,
    source: str = "embed",
    threshold: float | None = None,
) -> go.Figure:
    """Change of the next-token loss of each unit against alignment, share or identity.

    One point per head or block (a block's figure is the mean over its heads), bars for 95%
    intervals, colour for depth.

    Args:
        against: the result to take the horizontal axis from: alignment of ``source``, its signed
            share, or the share of variance that token identity explains.
        role: whose figure to take; None for the role that was substituted.
        threshold: of an alignment; None for the first.

    Raises ``InputError`` if ``effect`` is of one set, or ``against`` is of another model or lacks a
    role, layer or source.
    """
    return draw_effect(effect, against, role, source, threshold, Look())


def draw_effect(
    effect: SubstitutionResult,
    against: ValueAlignmentResult | ContributionResult | IdentityResult,
    role: str | None,
    source: str,
    threshold: float | None,
    look: Look,
) -> go.Figure:
    """The same in any look."""
    if effect.units == ("set",):
        raise InputError(
            "effect: this is one number for a whole set; substitute with by='layer' or by='head'"
        )
    arguments.same_model("against", effect.provenance, against.provenance)
    role = effect.roles[0] if role is None else role
    axis = _axis(against, role, source, threshold)
    x = np.array([_at(axis, layer, head) for layer, head in _places(effect)])
    limits = _limits(x, axis.chance)
    p = effect.provenance
    canvas = Canvas(
        f"What it costs to give {'/'.join(map(safe, effect.roles))} heads {given_words(effect)}",
        [
            f"{safe(p['model_name'])} · {effect.n_tokens:,} predicted tokens in "
            f"{effect.n_sequences:,} sequences · loss without substitution "
            f"{effect.base_loss:.3f} nats",
            withheld(effect.n_sequences) or "bars: 95% intervals over sequences",
        ],
        look,
    )
    across = NARROW_WIDTH if look.narrow else WIDTH
    panel = canvas.panel(
        LEFT,
        8,
        across,
        HEIGHT,
        x={"title": {"text": axis.words}, "showgrid": True, "range": limits},
        y={
            "title": {"text": "change of next-token loss (nats)"},
            "showgrid": True,
            "zeroline": True,
            "zerolinecolor": GREY,
        },
    )
    canvas.traces.append(_points(effect, x, role, axis, panel.x, panel.y))
    if axis.chance is not None:
        canvas.shapes.append(
            {
                "type": "line",
                "xref": panel.x,
                "yref": f"{panel.y} domain",
                "x0": axis.chance,
                "x1": axis.chance,
                "y0": 0,
                "y1": 1,
                "line": {"color": GREY, "dash": "dot", "width": 1.5},
            }
        )
        at = (axis.chance - limits[0]) / (limits[1] - limits[0]) * across
        canvas.note(
            f"{axis.chance:.2f} chance", LEFT + at + 4, 10, font={"size": 11, "color": GREY}
        )
    first, last = min(effect.layers), max(effect.layers)
    shown = [first + at for at in thinned(last - first + 1, HEIGHT / (last - first + 1), 24)]
    canvas.layout["coloraxis"] = {
        "colorscale": SEQUENTIAL,
        "cmin": first,
        "cmax": max(last, first + 1),
        "colorbar": {
            "title": {"text": "layer"},
            "tickvals": shown,
            "ticktext": [str(layer) for layer in shown],
        },
    }
    width = canvas.colour_bar(LEFT + across + 20, 8, HEIGHT)
    return canvas.figure(width, 8 + HEIGHT + UNDER)


def given_words(effect: SubstitutionResult) -> str:
    """What the heads read instead of the stream."""
    return {"mean": "the mean stream", "random": "random directions"}.get(
        effect.source, f"the {source_words(effect.source)} alone"
    )


def _limits(x: Array, chance: float | None) -> list[float]:
    """Limits of the horizontal axis, chance inside."""
    values = np.concatenate([known(x), known([] if chance is None else [chance])])
    if not len(values):
        return [0.0, 1.0]
    low, high = float(values.min()), float(values.max())
    room = 0.06 * (high - low or 1.0)
    return [low - room, high + room]


def _places(effect: SubstitutionResult) -> list[tuple[int, int | None]]:
    return [
        (layer, head)
        for layer, head in zip(effect.unit_layers, effect.unit_heads, strict=True)
        if layer is not None
    ]


def _axis(against: Any, role: str, source: str, threshold: float | None) -> Against:
    if isinstance(against, ValueAlignmentResult):
        values = against.alignment(role, source, threshold)
        chance = known(against.role(role).chance[against.threshold_index(threshold)])
        words = f"alignment of the {source_words(source)} with {safe(role)}"
        return Against(
            words, against.layers, values.numpy(), float(chance.mean()) if len(chance) else None
        )
    if isinstance(against, ContributionResult):
        words = f"signed share of the {source_words(source)} in {safe(role)}"
        return Against(words, against.layers, against.share(role, source).numpy(), None)
    words = f"share of {safe(role)} variance that token identity explains"
    return Against(words, against.layers, against.role(role).share.numpy(), None)


def _at(axis: Against, layer: int, head: int | None) -> float:
    if layer not in axis.layers:
        raise InputError(
            f"layer {layer} was substituted but is not in the result to draw against, which has "
            f"{axis.layers[0]} to {axis.layers[-1]}"
        )
    row = axis.values[axis.layers.index(layer)]
    if head is None:
        return float(known(row).mean()) if len(known(row)) else float("nan")
    if head >= len(row):
        raise InputError(
            f"head {head} was substituted but role has {len(row)} heads in the result to draw "
            f"against; pass role=... of the substituted heads"
        )
    return float(row[head])


def _points(
    effect: SubstitutionResult, x: Array, role: str, axis: Against, xaxis: str, yaxis: str
) -> go.Scatter:
    width = effect.half_width.numpy()
    behind = np.stack([effect.delta.numpy() - width, effect.delta.numpy() + width], -1)
    interval = "<br>95% interval %{customdata[0]:+.4f} to %{customdata[1]:+.4f}"
    return go.Scatter(
        x=x,
        y=effect.delta.numpy(),
        xaxis=xaxis,
        yaxis=yaxis,
        mode="markers",
        marker={
            "color": [layer for layer, _ in _places(effect)],
            "coloraxis": "coloraxis",
            "size": 9 if len(x) < 60 else 6,
            "line": {"color": "rgba(127,127,127,0.8)", "width": 0.5},
        },
        error_y={"array": width, "thickness": 1, "width": 2, "color": "rgba(127,127,127,0.55)"}
        if len(known(width))
        else None,
        text=list(effect.units),
        customdata=behind,
        showlegend=False,
        hovertemplate=(
            f"<b>%{{text}} · {safe(role)}</b><br>{axis.words} %{{x:.3f}}<br>loss %{{y:+.4f}} nats"
            f"{interval if len(known(width)) else ''}<extra></extra>"
        ),
    )

"""Models or checkpoints side by side: layer means over depth, and one mean per model."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.colors
import plotly.graph_objects as go

from tl_valuealign.describe import METRIC_WORDS
from tl_valuealign.plots.canvas import Canvas, Panel
from tl_valuealign.plots.common import (
    ATTENTION,
    EMBED,
    FULL_STREAM,
    GREY,
    KIND,
    MLP,
    SEQUENTIAL,
    count_of,
    known,
    safe,
    share,
    thinned,
)
from tl_valuealign.result import FULL

LEFT, BETWEEN, HEADING, WIDTH, HEIGHT, UNDER, LABELS = 62, 34, 24, 330, 190, 34, 44
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
DEPTH_COLUMNS = (("embed", "token embedding, layer means"), (FULL, "full stream, layer means"))
MEANS = {
    "embed": ("embedding, mean over layers", EMBED, "circle"),
    FULL: ("full stream, mean over layers", FULL_STREAM, "diamond"),
    "attn_out": ("attention outputs, mean over layers", ATTENTION, "square"),
    "mlp_out": ("MLP outputs, mean over layers", MLP, "triangle-up"),
}


def draw_comparison(frame: pd.DataFrame, threshold: float, *, relative: bool) -> go.Figure:
    """The table of :func:`tl_valuealign.compare` at one threshold: a row of panels per role.

    Embedding and full stream over depth, a curve per model; then every kind of source against the
    models in their order. All panels share one scale. Chance is dotted, in the colour of the curve
    it belongs to.
    """
    frame = frame[frame["threshold"] == threshold]
    labels, roles = list(frame["model"].unique()), list(frame["role"].unique())
    metrics = ", ".join(METRIC_WORDS[metric] for metric in frame["metric"].unique())
    canvas = Canvas(
        "Alignment of embedding and full stream with the heads, model by model",
        [
            f"{count_of(len(labels), 'models')}, {safe(labels[0])} to {safe(labels[-1])} · "
            f"directions carrying {share(threshold)} of squared singular values",
            metrics + (", divided by chance" if relative else ""),
        ],
    )
    value = "relative" if relative else "alignment"
    styles = {label: _style(number, len(labels)) for number, label in enumerate(labels)}
    y = _value_axis(frame, value, relative)
    for row, role in enumerate(roles):
        part, top = frame[frame["role"] == role], HEADING + row * (HEADING + HEIGHT + UNDER)
        last = row == len(roles) - 1
        for column, (source, words) in enumerate(DEPTH_COLUMNS):
            panel = _panel(canvas, column, top, _depth_axis(last), y, column == 0)
            heading = f"<b>{safe(role)}</b>  {KIND.get(role, '')} · {words}"
            canvas.note(heading, panel.left, top - 5, yanchor="bottom")
            chosen = part[part["source"] == source]
            _curves(canvas, panel, chosen, styles, value, legend=row == column == 0)
        panel = _panel(canvas, 2, top, _model_axis(labels, last), y, False)
        heading = f"<b>{safe(role)}</b>  means over layers, model by model"
        canvas.note(heading, panel.left, top - 5, yanchor="bottom")
        _means(canvas, panel, part, labels, value, legend=row == 0)
    width = LEFT + 3 * (WIDTH + BETWEEN) - BETWEEN
    height = len(roles) * (HEADING + HEIGHT + UNDER) + LABELS
    return canvas.figure(width + 8, height)


def _style(number: int, count: int) -> dict[str, Any]:
    """Colours in the order of the models, mid tones of the scale; a marker as well."""
    place = 0.22 + 0.58 * number / max(count - 1, 1)
    colour = plotly.colors.sample_colorscale(SEQUENTIAL, [place])[0]
    return {"color": colour, "symbol": SYMBOLS[number % len(SYMBOLS)]}


def _panel(
    canvas: Canvas, column: int, top: float, x: dict[str, Any], y: dict[str, Any], first: bool
) -> Panel:
    title = {"text": y["title"]["text"] if first else ""}
    left = LEFT + column * (WIDTH + BETWEEN)
    return canvas.panel(
        left, top, WIDTH, HEIGHT, x=x, y=y | {"showticklabels": first, "title": title}
    )


def _value_axis(frame: pd.DataFrame, value: str, relative: bool) -> dict[str, Any]:
    drawn = frame[frame["source"].isin([*MEANS])]
    values = known(np.concatenate([drawn[value], [1.0] if relative else drawn["chance"]]))
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    room = 0.06 * max(high - low, 0.02)
    words = "alignment over chance" if relative else "alignment"
    return {"range": [low - room, high + room], "showgrid": True, "title": {"text": words}}


def _depth_axis(last: bool) -> dict[str, Any]:
    return {
        "range": [-0.03, 1.03],
        "tickvals": [0, 0.25, 0.5, 0.75, 1],
        "ticktext": ["first", "¼", "½", "¾", "last"],
        "title": {"text": "depth" if last else ""},
    }


def _model_axis(labels: list[str], last: bool) -> dict[str, Any]:
    shown = thinned(len(labels), WIDTH / max(len(labels), 1), 15)
    return {
        "range": [-0.5, len(labels) - 0.5],
        "tickvals": shown,
        "ticktext": [safe(labels[place], 16) for place in shown],
        "tickangle": -40,
        "showticklabels": last,
    }


def _curves(
    canvas: Canvas,
    panel: Panel,
    frame: pd.DataFrame,
    styles: dict[str, dict[str, Any]],
    value: str,
    *,
    legend: bool,
) -> None:
    if value != "alignment":
        line = {"dash": "dot", "width": 1.5, "color": GREY}
        canvas.traces.append(_line(panel, [0, 1], [1, 1], line))
    for label, style in styles.items():
        rows = frame[frame["model"] == label]
        if value == "alignment":
            line = {"dash": "dot", "width": 1, "color": style["color"]}
            canvas.traces.append(_line(panel, rows["depth"], rows["chance"], line))
        name = safe(label, 32)
        behind = rows[["layer", "chance", "lowest", "highest", "relative", "n_heads", "boxed"]]
        canvas.traces.append(
            _line(
                panel,
                rows["depth"],
                rows[value],
                {"width": 2, "color": style["color"]},
                mode="lines+markers",
                marker={"size": 6 if len(rows) <= 24 else 4, **style},
                name=name,
                legendgroup=name,
                showlegend=legend,
                hoverinfo=None,
                customdata=behind.to_numpy(),
                hovertemplate=f"<b>{name}</b> · block %{{customdata[0]}}<br>"
                "%{y:.3f}, heads %{customdata[2]:.3f} to %{customdata[3]:.3f}<br>"
                "chance %{customdata[1]:.3f} (%{customdata[4]:.2f}× chance)<br>"
                "full stream above embedding in %{customdata[6]} of %{customdata[5]} heads"
                "<extra></extra>",
            )
        )
    if legend:
        line = {"dash": "dot", "width": 1.5, "color": GREY}
        words = "chance" if value != "alignment" else "chance, in each curve’s colour"
        canvas.traces.append(_line(panel, [None], [None], line, name=words, showlegend=True))


def _means(
    canvas: Canvas,
    panel: Panel,
    frame: pd.DataFrame,
    labels: list[str],
    value: str,
    *,
    legend: bool,
) -> None:
    places = list(range(len(labels)))
    by_kind = frame.groupby(["source", "model"])[[value, "chance"]].mean()
    chance = by_kind.loc["embed", "chance"].reindex(labels)
    chance = chance if value == "alignment" else np.ones(len(labels))
    line = {"dash": "dot", "width": 1.5, "color": GREY}
    canvas.traces.append(_line(panel, places, chance, line, mode="lines"))
    for source, (name, colour, symbol) in MEANS.items():
        if source not in by_kind.index.get_level_values("source"):
            continue
        means = by_kind.loc[source].reindex(labels)
        canvas.traces.append(
            _line(
                panel,
                places,
                means[value],
                {"width": 2, "color": colour, "dash": "solid" if source == "embed" else "dash"},
                mode="lines+markers",
                marker={"size": 7, "color": colour, "symbol": symbol},
                name=name,
                legendgroup=name,
                showlegend=legend,
                hoverinfo=None,
                customdata=np.column_stack([[safe(label) for label in labels], means["chance"]]),
                hovertemplate=f"<b>%{{customdata[0]}}</b><br>{name}: %{{y:.3f}}<br>"
                "chance %{customdata[1]:.3f}<extra></extra>",
            )
        )


def _line(panel: Panel, x: Any, y: Any, line: dict[str, Any], **options: Any) -> go.Scatter:
    return go.Scatter(
        x=list(x),
        y=list(y),
        xaxis=panel.x,
        yaxis=panel.y,
        line=line,
        **{"showlegend": False, "hoverinfo": "skip", "mode": "lines"} | options,
    )

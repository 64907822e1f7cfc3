"""Small grids of sources (down) by heads (across), one per block: shared by two figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tl_valuealign.errors import InputError
from tl_valuealign.plots.canvas import Canvas, Panel
from tl_valuealign.plots.common import GREY, Array, safe, source_words, thinned
from tl_valuealign.plots.grid import ZERO, Cells, draw_cells, draw_gaps, fit, head_axis
from tl_valuealign.result import FULL, ValueAlignmentResult

LEFT, BETWEEN, HEADING, UNDER = 92, 26, 38, 54
APART = 9  # pixels between groups of sources
TALL = 13  # pixels that a row with a label of its own needs
NARROWEST = 88

# layer row, sources of a group (FULL may be one) → colour, numbers behind; [source, head(, field)]
Values = Callable[[int, Sequence[str]], tuple[Array, Array]]


@dataclass(frozen=True)
class Group:
    """Sources of one kind, in order; rows are ``step`` cells high, from ``top`` cells downwards."""

    title: str
    sources: list[str]
    top: float
    step: float = 1.0

    @property
    def bottom(self) -> float:
        return self.top + self.step * len(self.sources)

    @property
    def first(self) -> float:
        """Centre of the first row; the axis counts cells from −0.5."""
        return self.top + self.step / 2 - 0.5


def default_layers(result: ValueAlignmentResult) -> list[int]:
    """Six blocks spread evenly over the second half: 12, 14, …, 22 of 24."""
    half = list(result.layers[len(result.layers) // 2 :])
    count = min(6, len(half))
    return [half[i * len(half) // count] for i in range(count)]


def layer_rows(result: ValueAlignmentResult, layers: Sequence[int] | None) -> list[int]:
    """Rows of the layer axis. Raises ``InputError`` naming the layers there are."""
    wanted = default_layers(result) if layers is None else list(layers)
    absent = [layer for layer in wanted if layer not in result.layers]
    if absent or not wanted:
        what = f"layer {absent[0]!r} is not in this result" if absent else "no layer was given"
        first, last = result.layers[0], result.layers[-1]
        raise InputError(
            f"{what}, which has {len(result.layers)} from {first} to {last}: "
            f"pass layers=({last},), or analyse the block you want"
        )
    return [result.layers.index(layer) for layer in wanted]


def by_kind(
    result: ValueAlignmentResult, rows: Sequence[int], *, full: bool
) -> dict[str, list[str]]:
    """Embedding first, then attention outputs, then the rest; only what some block can see."""
    latest = max(result.layers[row] for row in rows)
    kinds: dict[str, list[str]] = {"": [FULL] if full else []}
    for source in result.sources:
        if block(source) < latest:
            kind = source.partition("_")[2] if block(source) >= 0 else ""
            kinds.setdefault(kind, []).append(source)
    return kinds


def groups(kinds: dict[str, list[str]], cell: float) -> list[Group]:
    """Kinds of sources one below the other, a little apart, named rows tall enough to name."""
    titles = {"attn_out": "attention output of block", "mlp_out": "MLP output of block"}
    found: list[Group] = []
    for kind, members in kinds.items():
        top = found[-1].bottom + APART / cell if found else 0.0
        step = max(1.0, TALL / cell) if kind == "" else 1.0
        found.append(Group(titles.get(kind, kind), members, top, step))
    return found


def block(source: str) -> int:
    """The block that wrote a source; −1 for what precedes all blocks."""
    number = source.partition("_")[0]
    return int(number) if number.isdigit() else -1


def draw_rows(
    canvas: Canvas,
    result: ValueAlignmentResult,
    role: str,
    rows: Sequence[int],
    values: Values,
    template: Callable[[str], str],
    *,
    summary: Callable[[int], str] = lambda row: "",
    full: bool = False,
) -> tuple[float, float, float]:
    """One grid per block; returns the width and height that they take, and a grid's height."""
    kinds = by_kind(result, rows, full=full)
    heads = result.role(role).numerical_rank.shape[1]
    cells = fit(sum(map(len, kinds.values())), heads, 230, 440)
    cells = replace(cells, width=max(cells.width, -(-NARROWEST // heads)))
    found = groups(kinds, cells.height)
    length = found[-1].bottom
    down = round(length * cells.height) + 2
    fitting = max(1, (canvas.look.page - LEFT - 110) // (cells.across + BETWEEN))
    fitting = 1 if canvas.look.narrow else min(fitting, 4 if len(rows) <= 4 else 3)
    columns = -(-len(rows) // -(-len(rows) // fitting))  # lines of equal length, no stragglers
    row_height = HEADING + down + UNDER
    means = [summary(row) for row in rows]
    fits = max(map(len, means)) * 5.9 < cells.across and all(means)
    for place, row in enumerate(rows):
        line, column = divmod(place, columns)
        left = LEFT + column * (cells.across + BETWEEN)
        top = line * row_height + HEADING
        panel = canvas.panel(
            left,
            top,
            cells.across,
            down,
            x=head_axis(heads, cells.width),
            y=_axis(found, length, cells.height, labels=column == 0),
        )
        layer = result.layers[row]
        below = (
            f"<br><span style='font-size:11px;color:{GREY}'>{means[place]}</span>" if fits else ""
        )
        canvas.note(f"into block <b>{layer}</b>{below}", left, top - 5, yanchor="bottom")
        if column == 0:
            _titles(canvas, found, left, top, cells.height)
        for group in found:
            _group(canvas, panel, result, role, row, group, values, template, cells)
    lines = -(-len(rows) // columns)
    across = min(columns, len(rows)) * (cells.across + BETWEEN) - BETWEEN
    return LEFT + across, lines * row_height, down


def _group(
    canvas: Canvas,
    panel: Panel,
    result: ValueAlignmentResult,
    role: str,
    row: int,
    group: Group,
    values: Values,
    template: Callable[[str], str],
    cells: Cells,
) -> None:
    z, behind = values(row, group.sources)
    missing = ~np.isfinite(z)
    layer = result.layers[row]
    place: dict[str, Any] = {
        "role": role,
        "layer": layer,
        "first_row": group.first,
        "step": group.step,
    }
    # Outputs of one kind differ by their block's number alone, far shorter than words.
    wrote = np.array([block(source) for source in group.sources], dtype=np.float64)
    number = np.broadcast_to(wrote[:, None, None], (*z.shape, 1))
    if group.title:
        words, text = f"{safe(group.title)} %{{customdata[{behind.shape[-1]}]}}", None
    else:
        words = "%{text}"
        text = [[safe(source_words(source))] * z.shape[1] for source in group.sources]
    if not missing.all():
        draw_cells(
            canvas,
            panel,
            z,
            np.concatenate([behind, number], axis=-1),
            template(words),
            text=text,
            gap=1 if min(cells.width, cells.height) >= 12 else 0,
            **place,
        )
    zero = (result.role(role).n_directions[0, row].numpy() == 0)[None] & (wrote < layer)[:, None]
    words = words.replace(f"[{behind.shape[-1]}]", "[0]")
    for gaps, reason in (
        (missing & ~zero, f"not upstream of block {layer}"),
        (missing & zero, ZERO),
    ):
        told = f"<b>L{layer}H%{{x}} · {safe(role)} · {words}</b><br>{reason}<extra></extra>"
        draw_gaps(canvas, panel, gaps, number, told, text=text, **place)


def _axis(found: list[Group], length: float, cell: float, *, labels: bool) -> dict[str, object]:
    ticks: list[float] = []
    words: list[str] = []
    short = {"embed": "embedding", "pos_embed": "positions", FULL: "full stream"}
    for group in found:
        every = thinned(len(group.sources), cell, 15)
        if not group.title:
            every = list(range(len(group.sources)))
        for place in every:
            source = group.sources[place]
            ticks.append(group.first + place * group.step)
            words.append(short.get(source, str(block(source))))
    return {
        "range": [length - 0.5 + 1 / cell, -0.5 - 1 / cell],
        "tickvals": ticks,
        "ticktext": words,
        "showticklabels": labels,
    }


def _titles(canvas: Canvas, found: list[Group], left: float, top: float, cell: float) -> None:
    for group in found:
        if group.title:
            middle = (group.top + group.bottom) / 2
            text = group.title
            if len(group.sources) * cell < 7 * len(text):
                text = text.partition(" ")[0]
            canvas.note(
                text,
                left - 34,
                top + 1 + middle * cell,
                textangle=-90,
                xanchor="right",
                yanchor="middle",
            )

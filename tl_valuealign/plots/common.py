"""What every figure shares: palette, scales, words for the subtitle, and safe text."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.colors
from numpy.typing import NDArray

from tl_valuealign.describe import METRIC_WORDS
from tl_valuealign.result import ValueAlignmentResult

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# Mid tones that read on white and on near-black alike; colour never carries a meaning alone.
GREY = "#7d7d7d"
FAINT = "rgba(127,127,127,0.25)"
MISSING = "rgba(127,127,127,0.30)"
BOX = "#ff24c8"
EMBED = "#d1730b"
FULL_STREAM = "#3b7dd8"
ATTENTION = "#1a9a76"
MLP = "#a45bc4"

SEQUENTIAL = plotly.colors.sequential.Viridis
DIVERGING = plotly.colors.diverging.RdBu[::-1]

Array = NDArray[np.float64]

KIND = {
    "Q": "query heads",
    "K": "key heads",
    "V": "value heads",
    "OV": "value-output circuits",
}


def safe(text: object, limit: int = 60) -> str:
    """Text that plotly shows as it is: no HTML, no ``%{...}`` template, no ``$...$`` formula."""
    plain = str(text)
    if len(plain) > limit:
        plain = plain[: limit - 1] + "…"
    return escape(plain, quote=False).replace("%{", "%&#123;").replace("$", "&#36;")


def subtitle(result: ValueAlignmentResult, index: int | None, *notes: str) -> list[str]:
    """Lines under a title: model, tokens, threshold; then what a cell shows, and notes."""
    p = result.provenance
    what = [safe(p["model_name"]), f"{p['n_tokens']:,} tokens in {p['n_sequences']:,} sequences"]
    if index is not None:
        part = share(result.thresholds[index])
        what.append(f"directions carrying {part} of squared singular values")
    return [" · ".join(what), *(note for note in notes if note)]


def metric_words(result: ValueAlignmentResult, relative: bool = False) -> str:
    """What a cell of an alignment figure shows."""
    over = ", divided by chance (log scale)" if relative else ""
    return f"colour: {METRIC_WORDS[result.metric]}{over}"


def share(value: float) -> str:
    """0.9 → ``90%``, 0.125 → ``12.5%``."""
    return f"{value * 100:.4g}%"


def source_words(source: str) -> str:
    """``3_attn_out`` → ``attention output of block 3``."""
    if source == "full":
        return "full stream"
    if source == "embed":
        return "token embedding"
    if source == "pos_embed":
        return "positional embedding"
    block, _, kind = source.partition("_")
    names = {"attn_out": "attention output", "mlp_out": "MLP output"}
    return f"{names[kind]} of block {block}" if kind in names else source


def known(values: Any) -> Array:
    """What is finite, as a flat array."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return flat[np.isfinite(flat)]


def mean_over_heads(values: Any) -> Array:
    """[layer, head] → [layer]; NaN where a whole layer is missing."""
    array = np.asarray(values, dtype=np.float64)
    present = np.isfinite(array)
    total = np.where(present, array, 0).sum(axis=-1)
    count = present.sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def alignment_range(parts: Iterable[Any]) -> tuple[float, float]:
    """Round limits that hold 99% of the values; figures that share ``parts`` share a scale."""
    values = np.concatenate([known(part) for part in parts])
    if not len(values):
        return 0.0, 1.0
    low, high = (float(limit) for limit in np.percentile(values, [0.5, 99.5]))
    step = 0.05 if high - low > 0.2 else 0.02 if high - low > 0.06 else 0.01
    low = max(math.floor(low / step + 1e-9) * step, 0.0)
    high = min(math.ceil(high / step - 1e-9) * step, 1.0)
    return (0.0 if low <= 0.15 * high else low), max(high, low + step)


def value_scale(low: float, high: float, chance: float | None) -> dict[str, Any]:
    """A sequential colour axis whose bar also marks where chance lies."""
    ticks, words = _ticks(low, high)
    if chance is not None and math.isfinite(chance):
        room = 0.12 * (high - low)
        kept = [(t, w) for t, w in zip(ticks, words, strict=True) if abs(t - chance) > room]
        ticks = [t for t, _ in kept] + [chance]
        words = [w for _, w in kept] + [f"{chance:.2f} <b>chance</b>"]
    return {
        "colorscale": SEQUENTIAL,
        "cmin": low,
        "cmax": high,
        "colorbar": {"tickvals": ticks, "ticktext": words},
    }


def relative_scale(log_ratios: Iterable[Any]) -> dict[str, Any]:
    """A diverging colour axis for log2(value / chance), symmetric, holding 99.5% of the values."""
    values = np.concatenate([known(part) for part in log_ratios])
    reach = float(np.percentile(np.abs(values), 99.5)) if len(values) else 1.0
    reach = max(math.ceil(reach * 4 - 1e-9) / 4, 0.25)
    if reach > 3:
        every = max(int(reach) // 4, 1)
        ratios = [2.0**power for power in range(-20 * every, 20 * every + 1, every)]
    elif reach > 1.5:
        ratios = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
    elif reach > 0.75:
        ratios = [0.4, 0.5, 0.7, 1, 1.4, 2, 2.5]
    else:
        ratios = [0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4, 1.6]
    ratios = [ratio for ratio in ratios if abs(math.log2(ratio)) <= reach]
    return {
        "colorscale": DIVERGING,
        "cmin": -reach,
        "cmax": reach,
        "colorbar": {
            "tickvals": [math.log2(ratio) for ratio in ratios],
            "ticktext": [f"{r:.3g}×" if r != 1 else "1× <b>chance</b>" for r in ratios],
        },
    }


def plain(value: float) -> str:
    """A round number as people write it: 0.05, 2, 500, 3·10⁶ beyond that."""
    if 1e-4 <= value < 1e5:
        return f"{value:,.4f}".rstrip("0").rstrip(".")
    exponent = math.floor(math.log10(value) + 1e-9)
    digits = f"{value / 10**exponent:.3g}"
    return f"{'' if digits == '1' else digits + '·'}10<sup>{exponent}</sup>"


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from 10**low to 10**high: 1, 2, 5 a decade, or 1, or fewer, about eight."""
    decades = high - low
    steps = (1, 2, 5) if decades <= 2.5 else (1, 3) if decades <= 4 else (1,)
    every = max(1, math.ceil(decades / 9))
    exponents = range(math.floor(low), math.ceil(high) + 1)
    ticks = [digit * 10.0**power for power in exponents if power % every == 0 for digit in steps]
    return [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]


def _ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    span = high - low
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0) if span / s <= 6)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [i * step for i in range(first, last + 1)]
    return ticks, [f"{tick:.2f}" for tick in ticks]


def thinned(count: int, spacing: float, room: float) -> list[int]:
    """Every 1st, 2nd, 5th, 10th … of ``count`` positions, ``spacing`` apart, ``room`` for each."""
    if count == 0:
        return []
    for step in (1, 2, 4, 5, 8, 10, 16, 20, 50, 100, 200, 500, 1000):
        if step * spacing >= room:
            return list(range(0, count, step))
    return [0]


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number != 1 else f"1 {noun.removesuffix('s')}"


def listed(items: Sequence[object]) -> str:
    """``1``, ``1 and 2``, ``1, 2 and 3``."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

"""Ratios of times measured in turns, so that what else the machine does weighs on both sides."""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """One line of the table. ``target``: the figure is to be at most (or, ``at_least``) this."""

    group: str
    what: str
    figure: float
    low: float
    high: float
    target: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        met = self.figure >= self.target if self.at_least else self.figure <= self.target
        return "met" if met else "missed"

    def cells(self) -> list[str]:
        sign = "≥" if self.at_least else "≤"
        target = "" if self.target is None else f"{sign} {self.target:g}"
        spread = "" if self.low == self.high else f"{self.low:.3g} to {self.high:.3g}"
        figure = f"{self.figure:.3g}"
        return [self.group, self.what, figure, spread, target, self.verdict, self.note]


def row(group: str, what: str, figures: Sequence[float], **options: object) -> Row:
    """The median of several figures, with their range."""
    return Row(group, what, statistics.median(figures), min(figures), max(figures), **options)


def seconds(function: Callable[[], object]) -> float:
    """Time of one call, the device waited for: of the wall clock, or on a single thread of the
    processor, which does not count what other programs take meanwhile."""
    clock = time.perf_counter if torch.get_num_threads() > 1 else time.process_time
    _wait()
    start = clock()
    function()
    _wait()
    return clock() - start


def in_turns(functions: dict[str, Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    """Seconds of every function in every round. The first round warms up and is dropped where
    there is more than one."""
    found = []
    for _ in range(rounds + (rounds > 1)):
        found.append({name: seconds(function) for name, function in functions.items()})
    return found[-rounds:]


def ratios(times: Sequence[dict[str, float]], top: str, bottom: str) -> list[float]:
    return [each[top] / each[bottom] for each in times]


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """p of time ~ size^p by least squares on logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(each) for each in times]
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    head = ["group", "figure of", "median", "range", "target", "", "note"]
    cells = [head, *(each.cells() for each in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def machine() -> dict[str, object]:
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def write(rows: Sequence[Row], path: Path) -> None:
    document = {"machine": machine(), "rows": [asdict(r) | {"verdict": r.verdict} for r in rows]}
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

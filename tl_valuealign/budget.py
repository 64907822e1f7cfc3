"""What a run will hold in memory, known before it starts, and the engine and device that fit."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tl_valuealign.engines import REPLICATES
from tl_valuealign.errors import ResourceError
from tl_valuealign.kept import sums_device
from tl_valuealign.moments import KINDS
from tl_valuealign.shapes import METRICS
from tl_valuealign.symmetric import UpperRows

# The model's own activations, and everybody else on the machine, need room as well.
USABLE = 0.8


@dataclass(frozen=True)
class Plan:
    """An engine, the second moments it keeps, where these live, and bytes for each device.

    ``rebuilt``: directions are made from the weights each time they are needed.
    """

    engine: str
    rebuilt: bool
    kinds: tuple[str, ...]
    home: torch.device
    needed: dict[torch.device, int]

    @property
    def n_bytes(self) -> int:
        return sum(self.needed.values())

    def __str__(self) -> str:
        parts = [f"{_gigabytes(size)} on {device}" for device, size in self.needed.items()]
        how = ", directions rebuilt" if self.rebuilt else ""
        how += f", second moments on {self.home}" if self.kinds else ""
        return f"{self.engine} engine{how}: {', '.join(parts)}"


def choose(
    metric: str,
    *,
    keep_moments: bool,
    d_model: int,
    n_sources: int,
    n_layers: int,
    heads: Sequence[tuple[int, int]],
    n_thresholds: int,
    dtype: torch.dtype,
    place: torch.device,
    batch_tokens: int,
    model_device: torch.device,
) -> Plan:
    """The first plan that fits, cheapest in time first. ``heads``: (heads, d_head) of every role.

    Every plan holds the streams of one batch of ``batch_tokens`` where the model is.
    ``energy`` and ``pooled`` prefer second moments, 2 d² floats a stream of which symmetry saves
    nearly half; ``norm`` needs every token and takes moments for the projected squared norms
    alone. Where the directions do not fit, they are rebuilt from the weights for every batch.
    Raises ``ResourceError`` naming every plan with its figure where none fits.
    """
    place, model_device = (torch.empty(0, device=each).device for each in (place, model_device))
    slots = n_sources + n_layers
    one_kind = slots * UpperRows(d_model).packed * 8
    columns = sum(count * width for count, width in heads)
    block = columns * d_model * dtype.itemsize
    factors = n_layers * sum(count * width**2 for count, width in heads) * dtype.itemsize
    cells = n_thresholds * sum(count for count, _ in heads)
    sums = len(METRICS) * n_layers * cells * (3 * (n_sources + 1) * 8 + 2 * REPLICATES * 4)
    homes = list(dict.fromkeys((sums_device(place), torch.device("cpu"))))

    def plan(engine: str, kinds: Sequence[str], home: torch.device, rebuilt: bool = False) -> Plan:
        needed = {place: 0, home: 0, model_device: 0}
        needed[model_device] += slots * batch_tokens * d_model * dtype.itemsize
        needed[home] += len(kinds) * one_kind
        if engine == "tokens":
            needed[place] += sums + (factors + 3 * block if rebuilt else n_layers * block)
        if keep_moments:
            needed[home] += n_layers * block
        sizes = {device: size for device, size in needed.items() if size}
        return Plan(engine, rebuilt, tuple(kinds), home, sizes)

    if keep_moments:
        engine = "tokens" if metric == "norm" else "moments"
        plans = [plan(engine, KINDS, home) for home in homes]
    elif metric == "norm":
        plans = [
            plan("tokens", *where, rebuilt)
            for rebuilt in (False, True)
            for where in (*((("pooled",), home) for home in homes), ((), place))
        ]
    else:
        plans = [plan("moments", KINDS, home) for home in homes]
        plans += [plan("tokens", (), place, rebuilt) for rebuilt in (False, True)]
    room = {device: available(device) for each in plans for device in each.needed}
    for each in plans:
        if all(size <= USABLE * room[device] for device, size in each.needed.items()):
            return each
    free = ", ".join(f"{_gigabytes(size)} on {device}" for device, size in room.items())
    raise ResourceError(
        f"no way to run this fits the memory that is free ({free}). {'; '.join(map(str, plans))}. "
        f"Ask for fewer layers=..., roles=... or components=..., a smaller batch_size=..., or "
        f"choose another device=..."
    )


def available(device: torch.device) -> float:
    """Bytes that can be had on a device; infinite where nobody can tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    if device.type != "cpu":
        return float("inf")
    known = [size for size in (_unused(), _container_limit()) if size is not None]
    return min(known, default=float("inf"))


def _unused() -> float | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return None


def _container_limit() -> float | None:
    """What is left under a control group's limit (version 2)."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = (root / "memory.current").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else float(limit) - float(used)


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"

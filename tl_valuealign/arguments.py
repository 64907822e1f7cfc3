"""Validation of plain arguments: an error says what, got, expected and how to mend it."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from tl_valuealign.errors import InputError

LONGEST = 100_000


def choices(
    name: str, given: Any, allowed: Sequence[str], *, empty: bool = False
) -> tuple[str, ...]:
    """``given`` as a tuple without repeats, all of them ``allowed``."""
    items = (given,) if isinstance(given, str) else _sequence(name, given)
    for item in items:
        if not isinstance(item, str) or item not in allowed:
            raise InputError(f"{name}: {item!r} is unknown; use any of {', '.join(allowed)}")
    if not items and not empty:
        raise InputError(f"{name} is empty; give at least one of {', '.join(allowed)}")
    return tuple(dict.fromkeys(items))


def texts(name: str, given: Any) -> tuple[str, ...]:
    """One or more strings."""
    items = (given,) if isinstance(given, str) else _sequence(name, given)
    for item in items:
        if not isinstance(item, str):
            raise InputError(f"{name}: expected strings, got {item!r}")
    return items


def shares(name: str, given: Any) -> tuple[float, ...]:
    """Distinct numbers in (0, 1]."""
    items = _sequence(name, (given,) if isinstance(given, Real) else given)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Real) or not 0 < float(item) <= 1:
            raise InputError(f"{name}: {item!r} is no share of squared singular value in (0, 1]")
    if not items:
        raise InputError(f"{name} is empty; give at least one share, such as 0.9")
    return tuple(dict.fromkeys(float(item) for item in items))


def blocks(name: str, given: Any, available: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Block numbers in ascending order, all with attention; None for every one."""
    if given is None:
        return tuple(available)
    items = _sequence(name, (given,) if _whole(given) else given)
    for item in items:
        if not _whole(item) or not 0 <= item < n_layers:
            raise InputError(
                f"{name}: {item!r} is no block of this model, whose blocks are 0 to {n_layers - 1}"
            )
        if item not in available:
            raise InputError(
                f"{name}: block {item} has no attention; blocks that have are "
                f"{', '.join(map(str, available))}"
            )
    if not items:
        raise InputError(f"{name} is empty; leave it out to measure every block")
    return tuple(sorted({int(item) for item in items}))


def count(name: str, given: Any) -> int:
    """A whole number of at least 1."""
    if not _whole(given) or given < 1:
        raise InputError(f"{name}: expected a whole number of at least 1, got {given!r}")
    return int(given)


def seed(name: str, given: Any) -> int:
    """A whole number that torch takes as a seed."""
    if not _whole(given) or not -(2**63) <= given < 2**63:
        raise InputError(f"{name}: expected a whole number that fits 64 bits, got {given!r}")
    return int(given)


def number(name: str, given: Any, low: float, high: float) -> float:
    """A number from ``low`` up to, but not including, ``high``."""
    if isinstance(given, bool) or not isinstance(given, Real) or not low <= float(given) < high:
        raise InputError(
            f"{name}: expected a number of at least {low} and under {high}, got {given!r}"
        )
    return float(given)


def ids(name: str, given: Any, d_vocab: int) -> tuple[int, ...]:
    """Distinct token ids in ascending order."""
    if isinstance(given, torch.Tensor):
        given = given.flatten().tolist()
    items = _sequence(name, given, most=max(LONGEST, 2 * d_vocab))
    for item in items:
        if not _whole(item) or not 0 <= item < d_vocab:
            raise InputError(
                f"{name}: {item!r:.40} is no token id here; ids are 0 to {d_vocab - 1}"
            )
    if not items:
        raise InputError(f"{name} is empty; leave it out to take the whole vocabulary")
    return tuple(sorted({int(item) for item in items}))


def flag(name: str, given: Any) -> bool:
    """True or False and nothing that merely passes for one: "no" would."""
    if not isinstance(given, (bool, np.bool_)):
        raise InputError(f"{name}: expected True or False, got {given!r}")
    return bool(given)


def heads(name: str, given: Any, n_heads: int) -> tuple[int, ...] | None:
    """Head numbers in ascending order; None stays None and means every head."""
    if given is None:
        return None
    items = _sequence(name, (given,) if _whole(given) else given)
    for item in items:
        if not _whole(item) or not 0 <= item < n_heads:
            raise InputError(f"{name}: {item!r} is no head here; heads are 0 to {n_heads - 1}")
    if not items:
        raise InputError(f"{name} is empty; leave it out to take every head")
    return tuple(sorted({int(item) for item in items}))


def measured(role: str, roles: Iterable[str]) -> str:
    """``role`` if it is one of a result's ``roles``."""
    if role not in roles:
        raise InputError(f"role {role!r} is not in this result, which has {', '.join(roles)}")
    return role


def threshold_index(given: float | None, thresholds: Sequence[float], asker: str) -> int:
    """Place of a threshold among those that ``asker`` computed; None is the first."""
    if given is None:
        return 0
    for index, value in enumerate(thresholds):
        if abs(value - given) < 1e-9:
            return index
    raise InputError(
        f"threshold {given!r} is not in this result, which has "
        f"{', '.join(map(str, thresholds))}; ask for it with "
        f"{asker}(..., thresholds=({given!r},))"
    )


def same_model(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ``InputError`` unless two provenances (or tables' attrs) are of the same weights."""
    expected, got = mine["model_hash"], theirs.get("model_hash")
    if got is None:
        raise InputError(
            f"{name}: it does not say which weights it is about (``attrs['model_hash']`` is gone, "
            f"as from a table that was stored and read back); pass the function's own answer"
        )
    if got != expected:
        raise InputError(
            f"{name}: it is about other weights ({str(got)[:12]}…) than the result "
            f"({expected[:12]}…); ask the further questions of the model that was analysed"
        )


def device(name: str, given: Any, default: torch.device) -> torch.device:
    """A device that holds tensors on this machine."""
    if given is None:
        return default
    try:
        place = torch.device(given)
        torch.empty(0, device=place)
    except (RuntimeError, TypeError, ValueError, OverflowError, AssertionError) as error:
        raise InputError(f"{name}: {given!r} is not available here: {error}") from error
    if place.type == "meta":
        raise InputError(f"{name}: the meta device holds no numbers; use cpu or an accelerator")
    return place


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _sequence(name: str, given: Any, most: int = LONGEST) -> tuple[Any, ...]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InputError(f"{name}: expected a sequence, got {given!r}")
    try:
        items = tuple(islice(given, most + 1))
    except TypeError as error:  # a tensor of no axis calls itself iterable
        raise InputError(f"{name}: expected a sequence, got {given!r}") from error
    if len(items) > most:
        raise InputError(f"{name}: expected a short sequence, got more than {most:,} items")
    return items

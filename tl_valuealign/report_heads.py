"""What a head's panel shows beside its numbers: decoded directions, and tokens in context."""

import math
from numbers import Integral, Real
from typing import Any

import pandas as pd

from tl_valuealign import arguments
from tl_valuealign.errors import InputError
from tl_valuealign.extremes import BEFORE, STREAMS
from tl_valuealign.report_pack import array, fractions
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.shapes import ROLES

SIDES = ("positive", "negative")
SHOWN = 5  # tokens at either end
COLUMNS = ("role", "layer", "head", "direction", "share", "positive", "negative")


def tokens_in_context(result: ValueAlignmentResult) -> dict[str, Any] | None:
    """Per role and stream the most and least aligned tokens, [side, layer, head, rank, place] ids
    with [side, layer, head, rank] alignments; None where the run kept no single tokens. The
    embedding's tokens stand without context, in one place."""
    extremes = result.extremes
    if extremes is None:
        return None
    roles = {}
    for role, found in extremes.roles.items():
        # [side, pair, layer, rank, head, ...] → [pair, side, layer, head, rank, ...]
        ids = found.contexts.permute(1, 0, 2, 4, 3, 5)[:, :, :, :, :SHOWN].numpy()
        values = found.values.permute(1, 0, 2, 4, 3)[..., :SHOWN].numpy()
        places = {"embed": slice(BEFORE, BEFORE + 1), "full": slice(None)}
        roles[role] = {
            stream: {
                "ids": array(ids[pair][..., places[stream]]),
                "values": fractions(values[pair]),
            }
            for pair, stream in enumerate(STREAMS)
        }
    return {"roles": roles, "ranks": SHOWN, "before": BEFORE, "words": extremes.words}


def decoded_directions(
    result: ValueAlignmentResult, table: pd.DataFrame
) -> dict[str, dict[str, list[list[Any]]]]:
    """Rows of ``decode_directions`` by role and head.

    Raises ``InputError`` if the table lacks a column or is about other weights.
    """
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing:
        raise InputError(
            f"directions: column {missing[0]!r} is missing; pass what "
            "decode_directions(model, role=...) returns, or several of these concatenated"
        )
    arguments.same_model("directions", result.provenance, table.attrs)
    found: dict[str, dict[str, list[list[Any]]]] = {}
    for row in table[list(COLUMNS)].itertuples(index=False, name=None):
        role, layer, head, direction, share, positive, negative = row
        _require_row(row)
        rows = found.setdefault(role, {}).setdefault(f"{int(layer)},{int(head)}", [])
        if any(known[0] == direction for known in rows):
            raise InputError(f"directions: {role} L{layer}H{head} has direction {direction} twice")
        rows.append([direction, round(float(share), 4), positive[:SHOWN], negative[:SHOWN]])
    return found


def _require_row(row: tuple[Any, ...]) -> None:
    """Raise ``InputError`` naming the first entry that is not what ``decode_directions`` writes."""
    role, layer, head, direction, share, *ends = row
    where = f"{role} L{layer}H{head}"
    for name, holds, expected, got in (
        ("role", role in ROLES, f"one of {', '.join(ROLES)}", role),
        ("layer", isinstance(layer, Integral), "a whole number", layer),
        ("head", isinstance(head, Integral), "a whole number", head),
        ("direction", isinstance(direction, str), "a string", direction),
        ("share", isinstance(share, Real) and math.isfinite(share), "a finite number", share),
        *(
            (name, _strings(end), "a list of strings", end)
            for name, end in zip(SIDES, ends, strict=True)
        ),
    ):
        if not holds:
            raise InputError(f"directions: {where}: {name} is {got!r:.60}, expected {expected}")


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)

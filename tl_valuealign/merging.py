"""Two results over different text as one."""

import hashlib

import torch

from tl_valuealign.errors import InputError
from tl_valuealign.result import ValueAlignmentResult, assemble
from tl_valuealign.role_result import Checks, Spectra


def merge(mine: ValueAlignmentResult, other: ValueAlignmentResult) -> ValueAlignmentResult:
    """See :meth:`ValueAlignmentResult.merge`."""
    for what, ours, theirs in (
        ("model weights", mine.provenance["model_hash"], other.provenance["model_hash"]),
        ("roles", tuple(mine.roles), tuple(other.roles)),
        ("sources", mine.sources, other.sources),
        ("layers", mine.layers, other.layers),
        ("thresholds", mine.thresholds, other.thresholds),
        ("metric", mine.metric, other.metric),
        ("skip_first", mine.provenance["skip_first"], other.provenance["skip_first"]),
        ("engine", mine.provenance["engine"], other.provenance["engine"]),
    ):
        if ours != theirs:
            raise InputError(
                f"these results differ in {what}: {ours!r} and {theirs!r}; only runs of the "
                f"same weights with the same options over different text can be merged"
            )
    sums = mine.sums + other.sums
    worst = Checks(
        torch.maximum(mine.checks.decomposition, other.checks.decomposition),
        mine.checks.decomposition_tolerance,
        {
            role: torch.maximum(error, other.checks.read_in[role])
            for role, error in mine.checks.read_in.items()
        },
        mine.checks.read_in_tolerance,
    )
    spectra = {name: Spectra.of(values) for name, values in mine.roles.items()}
    extremes = None
    if mine.extremes is not None and other.extremes is not None:
        extremes = mine.extremes + other.extremes
    moments = None
    if mine.moments is not None and other.moments is not None:
        moments = mine.moments + other.moments
    text = {
        "text": [*mine.provenance["text"], *other.provenance["text"]],
        "text_hash": _hash_of_both(mine.provenance["text_hash"], other.provenance["text_hash"]),
        "n_tokens": sums.n_tokens,
        "n_sequences": sums.n_sequences,
        "zero_norm_tokens": sums.zero_norm_tokens()[:, 0].to(torch.int64).tolist(),
    }
    for count in ("n_tokens_read", "n_texts", "n_items_split_into_windows", "n_bos_prepended"):
        text[count] = mine.provenance[count] + other.provenance[count]
    return assemble(
        spectra,
        sums,
        sources=mine.sources,
        layers=mine.layers,
        thresholds=mine.thresholds,
        metric=mine.metric,
        checks=worst,
        provenance=mine.provenance | text,
        extremes=extremes,
        moments=moments,
    )


def _hash_of_both(mine: str, theirs: str) -> str:
    """The same for either order of merging, as the figures are."""
    return hashlib.sha256("".join(sorted((mine, theirs))).encode()).hexdigest()

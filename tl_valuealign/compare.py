"""Several results side by side: models, or checkpoints of one model along its training."""

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tl_valuealign.errors import InputError
from tl_valuealign.result import FULL, ValueAlignmentResult

if TYPE_CHECKING:
    import plotly.graph_objects as go

DIFFERENCES = ("roles", "thresholds", "metric", "skip_first", "text")
_HINTS = {
    "roles": "the roles that all have are compared",
    "thresholds": "the thresholds that all have are compared",
    "metric": "result.with_metric(...) reads a run with another metric without running it again",
    "skip_first": "position 0 often carries an attention sink and moves every mean",
    "text": "models with different tokenizers never see the same ids, even of the same passages",
}


class Comparison(NamedTuple):
    """What :func:`compare` returns; unpacks as ``frame, figure = compare(...)``."""

    dataframe: pd.DataFrame
    figure: "go.Figure"

    def to_dataframe(self) -> pd.DataFrame:
        """The same table, under the name that every result of the package has for it."""
        return self.dataframe

    def __repr__(self) -> str:
        labels = ", ".join(map(repr, self.dataframe["model"].unique()))
        return f"Comparison of {labels}: .dataframe ({len(self.dataframe)} rows) and .figure"


def compare(
    results: Mapping[str, ValueAlignmentResult],
    *,
    threshold: float | None = None,
    relative: bool = False,
    allow: Iterable[str] = (),
) -> Comparison:
    """One table and one figure over several results, in the order in which they are given.

    Args:
        results: labels (a model's name, a training step) and their results, two or more.
        threshold: which one the figure shows; None for the first. The table has all.
        relative: draw alignment divided by chance, so that models whose heads keep different
            numbers of directions can be read against each other.
        allow: differences in measuring to accept, any of "roles", "thresholds", "metric",
            "skip_first" and "text" (the ids that were read).

    Returns:
        ``.dataframe``: one row per model, role, threshold, source and layer, with the columns
        model, role, threshold, metric, source, layer, depth (0 at the first block, 1 at the last),
        n_heads, alignment (mean over heads), lowest and highest (over heads), chance, relative
        (alignment over chance) and boxed (heads whose full stream exceeds the embedding). The
        source is "embed", "pos_embed", "attn_out" and "mlp_out" (means over all of a kind that are
        upstream) or "full". ``.figure``: a plotly Figure, chance beside every curve.

    Raises:
        InputError: fewer than two results, or results measured differently in a way that ``allow``
            does not name.

    Warns:
        UserWarning: two labels hold the very same weights.
    """
    from tl_valuealign.plots.compare import draw_comparison

    results = _validated(results)
    accepted = tuple([allow] if isinstance(allow, str) else allow)
    for name in accepted:
        if name not in DIFFERENCES:
            raise InputError(f"allow: {name!r} is unknown; use any of {', '.join(DIFFERENCES)}")
    _refuse_differences(results, accepted)
    _warn_of_twins(results)
    first = next(iter(results.values()))
    roles = _common("roles", [tuple(result.roles) for result in results.values()])
    thresholds = _common("thresholds", [result.thresholds for result in results.values()])
    shown = (
        thresholds[0] if threshold is None else first.thresholds[first.threshold_index(threshold)]
    )
    if shown not in thresholds:
        raise InputError(
            f"threshold {threshold!r} is not in every result; all have "
            f"{', '.join(map(str, thresholds))}"
        )
    frame = pd.concat(
        [
            _rows(label, result, role, value)
            for label, result in results.items()
            for role in roles
            for value in thresholds
        ],
        ignore_index=True,
    )
    return Comparison(frame, draw_comparison(frame, shown, relative=relative))


def _validated(results: Any) -> dict[str, ValueAlignmentResult]:
    if not isinstance(results, Mapping):
        raise InputError(
            f'compare takes labelled results, {{"label": result, ...}}; got '
            f"{type(results).__name__}"
        )
    for label, result in results.items():
        if not isinstance(result, ValueAlignmentResult):
            raise InputError(
                f"compare: {label!r} is a {type(result).__name__}, expected what "
                f"analyze_value_alignment or load returns"
            )
    if len(results) < 2:
        raise InputError(f"compare: got {len(results)} result, expected two or more")
    return {str(label): result for label, result in results.items()}


def _measured(result: ValueAlignmentResult) -> dict[str, Any]:
    """How a result was measured, by the names of ``DIFFERENCES``."""
    provenance = result.provenance
    return {
        "roles": sorted(result.roles),
        "thresholds": sorted(result.thresholds),
        "metric": result.metric,
        "skip_first": provenance["skip_first"],
        "text": (", ".join(provenance["text"]), provenance["n_tokens"], provenance["text_hash"]),
    }


def _refuse_differences(
    results: Mapping[str, ValueAlignmentResult], accepted: tuple[str, ...]
) -> None:
    first, *others = results
    expected = _measured(results[first])
    for label in others:
        found = _measured(results[label])
        for name in DIFFERENCES:
            if found[name] != expected[name] and name not in accepted:
                raise InputError(
                    f"compare: {first!r} and {label!r} differ in {name}: "
                    f"{_words(expected[name])} and {_words(found[name])}. Analyse both alike, or "
                    f"accept it with allow=({', '.join(map(repr, (*accepted, name)))},): "
                    f"{_HINTS[name]}"
                )


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        text, tokens, digest = value
        return f"{text} ({tokens:,} tokens, sha256 {digest[:12]}…)"
    return ", ".join(map(str, value)) if isinstance(value, list) else repr(value)


def _warn_of_twins(results: Mapping[str, ValueAlignmentResult]) -> None:
    seen: dict[str, str] = {}
    for label, result in results.items():
        digest = result.provenance["model_hash"]
        if digest in seen:
            warnings.warn(
                f"compare: {seen[digest]!r} and {label!r} have identical weights (sha256 "
                f"{digest[:12]}…): was one checkpoint loaded twice?",
                UserWarning,
                stacklevel=3,
            )
        seen.setdefault(digest, label)


def _common(name: str, each: list[tuple[Any, ...]]) -> list[Any]:
    common = [value for value in each[0] if all(value in other for other in each)]
    if not common:
        raise InputError(f"compare: the results have no {name} in common: {each}")
    return common


def _rows(label: str, result: ValueAlignmentResult, role: str, threshold: float) -> pd.DataFrame:
    """Layer rows of one model, role and threshold, source after source."""
    values, index = result.role(role), result.threshold_index(threshold)
    chance = values.chance[index].nanmean(-1).numpy()
    layers = np.array(result.layers)
    parts = []
    for source, alignment in _groups(result, values.by_source[index], values.full[index]):
        mean = alignment.nanmean((0, 2)).numpy()
        flat = alignment.transpose(0, 1).flatten(1)
        parts.append(
            pd.DataFrame(
                {
                    "model": label,
                    "role": role,
                    "threshold": threshold,
                    "metric": result.metric,
                    "source": source,
                    "layer": layers,
                    "depth": layers / max(result.provenance["n_layers"] - 1, 1),
                    "n_heads": values.full.shape[-1],
                    "alignment": mean,
                    "lowest": _extreme(flat, -1),
                    "highest": _extreme(flat, 1),
                    "chance": chance,
                    "relative": mean / chance,
                    "boxed": (values.excess[index] > 0).sum(-1).numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def _groups(
    result: ValueAlignmentResult, by_source: Tensor, full: Tensor
) -> Iterable[tuple[str, Tensor]]:
    """Kinds of source with their alignments [source, layer, head], the full stream last."""
    kinds: dict[str, list[int]] = {}
    for number, source in enumerate(result.sources):
        block, _, kind = source.partition("_")
        kinds.setdefault(kind if block.isdigit() else source, []).append(number)
    yield from ((kind, by_source[numbers]) for kind, numbers in kinds.items())
    yield FULL, full[None]


def _extreme(flat: Tensor, sign: int) -> Any:
    """Lowest (−1) or highest (1) of each row that is not NaN; NaN where all are."""
    found = (sign * flat).nan_to_num(-torch.inf).amax(-1)
    return torch.where(found.isinf(), torch.nan, sign * found).numpy()

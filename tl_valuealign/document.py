"""A result as a JSON document beside named tensors, and back. What comes back is validated.

Tensors are replaced by ``{"tensor": name}``, dataclasses by ``{"fields": …}`` and dictionaries that
hold either by ``{"items": …}``; everything else is a ``{"value": …}`` of plain JSON.
"""

from typing import Any

import torch
from torch import Tensor

from tl_valuealign.errors import InputError
from tl_valuealign.extremes import Extremes, RoleExtremes
from tl_valuealign.moments import Moments
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.role_result import Checks, RoleResult
from tl_valuealign.shapes import METRICS, ROLES
from tl_valuealign.sums import RoleSums, Sums

MAX_LABELS = 100_000
DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32, torch.bool)
PROVENANCE = {
    "model_name": str,
    "model_hash": str,
    "n_heads": int,
    "n_key_value_heads": int,
    "d_model": int,
    "readable_dim": int,
    "n_tokens": int,
    "n_sequences": int,
    "text": list,
    "skip_first": bool,
    "engine": str,
}


def to_document(result: ValueAlignmentResult) -> tuple[Any, dict[str, Tensor]]:
    """The document and the tensors it refers to, contiguous and on the CPU."""
    tensors: dict[str, Tensor] = {}
    return _flatten(result, "", tensors), tensors


def from_document(document: Any, tensors: dict[str, Tensor]) -> ValueAlignmentResult:
    """The result again.

    Raises ``InputError``, ``TypeError``, ``KeyError`` or typeguard's ``TypeCheckError`` for
    anything else than a document of :func:`to_document`.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"tensor {name!r:.80} is stored as {tensor.dtype}")
    left = dict(tensors)
    data = _unflatten(document, left)
    if left:
        raise InputError(f"it has tensors that nothing refers to, such as {next(iter(left))!r:.80}")
    for axis in ("sources", "layers", "thresholds"):
        if not isinstance(data[axis], list) or len(data[axis]) > MAX_LABELS:
            raise InputError(f"{axis} is no list of at most {MAX_LABELS:,} labels")
    sums = data["sums"]
    roles = {name: RoleSums(**part) for name, part in sums["roles"].items()}
    result = ValueAlignmentResult(
        roles={name: RoleResult(**values) for name, values in data["roles"].items()},
        sources=tuple(data["sources"]),
        layers=tuple(data["layers"]),
        thresholds=tuple(data["thresholds"]),
        metric=data["metric"],
        norms=data["norms"],
        full_norms=data["full_norms"],
        checks=Checks(**data["checks"]),
        sums=Sums(**(sums | {"roles": roles})),
        provenance=data["provenance"],
        extremes=_extremes(data.get("extremes")),
        moments=None if data.get("moments") is None else Moments(**data["moments"]),
    )
    _validate(result)
    return result


def _flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if hasattr(value, "__dataclass_fields__"):
        fields = {key: getattr(value, key) for key in value.__dataclass_fields__}
        kept = {key: _flatten(item, f"{name}/{key}", tensors) for key, item in fields.items()}
        return {"fields": kept}
    if isinstance(value, dict) and any(
        isinstance(item, Tensor) or hasattr(item, "__dataclass_fields__") for item in value.values()
    ):
        kept = {key: _flatten(item, f"{name}/{key}", tensors) for key, item in value.items()}
        return {"items": kept}
    return {"value": value}


def _unflatten(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Takes every tensor that is referred to out of ``tensors``: none serves twice."""
    if "tensor" in node:
        return tensors.pop(node["tensor"])
    if "value" in node:
        return node["value"]
    inner = node["fields"] if "fields" in node else node["items"]
    return {key: _unflatten(item, tensors) for key, item in inner.items()}


def _extremes(data: Any) -> Extremes | None:
    if data is None:
        return None
    roles = {name: RoleExtremes(**part) for name, part in data["roles"].items()}
    return Extremes(roles, data["words"])


def _validate(result: ValueAlignmentResult) -> None:
    """What types and shapes of single fields leave open: labels, and shapes of one field by
    another's."""
    _require("sources", all(type(name) is str for name in result.sources))
    _require("layers", all(type(layer) is int and layer >= 0 for layer in result.layers))
    _require("layers", list(result.layers) == sorted(set(result.layers)))
    _require("thresholds", all(type(t) is float and 0 < t <= 1 for t in result.thresholds))
    for name in ("sources", "layers", "thresholds"):
        labels = getattr(result, name)
        _require(name, 0 < len(labels) == len(set(labels)))
    _require("metric", result.metric in METRICS)
    _require("roles", bool(result.roles) and set(result.roles) <= set(ROLES))
    for key, kind in PROVENANCE.items():
        _require(f"provenance[{key!r}]", type(result.provenance.get(key)) is kind)
    _require("provenance['text']", all(type(text) is str for text in result.provenance["text"]))
    _validate_shapes(result)


def _validate_shapes(result: ValueAlignmentResult) -> None:
    sums, checks = result.sums, result.checks
    t, s, la = len(result.thresholds), len(result.sources) + 1, len(result.layers)
    m = len(METRICS)
    for name in ("norms", "full_norms"):
        _require(name, getattr(result, name).dtype == torch.float64)
    for name in ("denominators", "replicate_denominators", "norms"):
        _require(f"sums.{name}", getattr(sums, name).dtype == torch.float64)
    _require("sums.roles", sums.roles.keys() == result.roles.keys())
    _require("sums.denominators", sums.denominators.shape == (2, m, s, la))
    _require("sums.norms", sums.norms.shape == (s, la))
    _require("sums.n_tokens", sums.n_tokens >= 1 and sums.n_sequences >= 1)
    replicates = sums.replicate_denominators.shape
    _require("sums.replicate_denominators", replicates == (2, m, replicates[2], la))
    _require("checks.decomposition", checks.decomposition.shape == (la,))
    # A run that keeps its moments checks every role, whichever were asked for.
    _require("checks.read_in", checks.read_in.keys() >= result.roles.keys())
    for error in checks.read_in.values():
        _require("checks.read_in", error.shape == (la,))
    for name, values in result.roles.items():
        heads, part = values.full.shape[-1], sums.roles[name]
        floats = (field for field in vars(values).values() if field.is_floating_point())
        _require(f"roles[{name!r}]", all(field.dtype == torch.float64 for field in floats))
        _require(f"roles[{name!r}].alignment", part.alignment.shape == (3, m, t, s, la, heads))
        _require(f"roles[{name!r}].projected", part.projected.shape == (s, la, heads))
        _require(
            f"roles[{name!r}].replicates",
            part.replicates.shape == (2, m, replicates[2], t, la, heads),
        )
    if result.moments is not None:
        _require("moments", len(result.moments.energy) == s - 1 + la)
    if result.extremes is not None:
        words = result.extremes.words
        _require("extremes", set(result.extremes.roles) <= set(result.roles))
        _require("extremes.words", all(type(w) is str for pair in words.items() for w in pair))


def _require(what: str, holds: bool) -> None:
    if not holds:
        raise InputError(f"{what} does not fit the rest of the file")

"""Results on disk: one safetensors file, tensors plus a JSON document. Nothing is ever executed."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from typeguard import TypeCheckError

from tl_valuealign.errors import InputError, StorageError
from tl_valuealign.extremes import Extremes, RoleExtremes
from tl_valuealign.moments import Moments
from tl_valuealign.result import Checks, RoleResult, ValueAlignmentResult
from tl_valuealign.sums import RoleSums, Sums


FORMAT = "tl_valuealign"
VERSION = 1
MAX_HEADER_BYTES = 32 * 2**20
MAX_LABELS = 100_000


def save(result: ValueAlignmentResult, path: Any, *, overwrite: bool = False) -> None:
    """Write ``result`` to ``path`` atomically: the old file or the whole new one, never a part.

    Raises ``StorageError`` if the path is a directory, exists while ``overwrite`` is false, or
    cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise StorageError(f"{target} is a directory; give a file name such as {target / 'result.safetensors'}")
    if target.exists() and not overwrite:
        raise StorageError(f"{target} exists; pass overwrite=True to replace it")
    tensors: dict[str, Tensor] = {}
    document = _flatten(result, "", tensors)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "document": json.dumps(document),
    }
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {target}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Any) -> ValueAlignmentResult:
    """Read a result written by ``result.save``; bit-identical to what was saved.

    Raises ``StorageError`` if the file is missing, foreign, truncated, damaged or of another
    format version. Memory is bounded by the size of the file.
    """
    source = Path(path)
    if not source.is_file():
        raise StorageError(f"{source} is not a file")
    with open(source, "rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
    if header_bytes > min(MAX_HEADER_BYTES, source.stat().st_size):
        raise StorageError(
            f"{source} is no result of tl_valuealign, or is damaged: its header claims "
            f"{header_bytes} bytes in a file of {source.stat().st_size}"
        )
    try:
        with safe_open(source, framework="pt") as file:
            document = _document(source, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise StorageError(f"{source} is damaged or no safetensors file: {error}") from error
    try:
        return _rebuild(document, tensors)
    except (KeyError, TypeError, TypeCheckError, InputError, AttributeError, ValueError) as error:
        raise StorageError(
            f"{source} says it is a result of tl_valuealign but does not hold one: {error}"
        ) from error


def _document(source: Path, metadata: dict[str, str]) -> Any:
    if metadata.get("format") != FORMAT:
        raise StorageError(f"{source} is a safetensors file, but no result of tl_valuealign")
    if metadata.get("version") != str(VERSION):
        raise StorageError(
            f"{source} has format version {metadata.get('version')!r}; this package reads "
            f"version {VERSION}: analyse again, or install the release that wrote it"
        )
    try:
        return json.loads(metadata["document"])
    except (KeyError, ValueError, RecursionError) as error:
        raise StorageError(f"{source} is damaged: its description is not JSON ({error})") from error


def _flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Replace tensors by references, collecting them; dataclasses and dicts become dicts."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if hasattr(value, "__dataclass_fields__"):
        fields = {key: getattr(value, key) for key in value.__dataclass_fields__}
        return {
            "fields": {key: _flatten(item, f"{name}/{key}", tensors) for key, item in fields.items()}
        }
    if isinstance(value, dict) and any(
        isinstance(item, Tensor) or hasattr(item, "__dataclass_fields__") for item in value.values()
    ):
        return {
            "items": {key: _flatten(item, f"{name}/{key}", tensors) for key, item in value.items()}
        }
    return {"value": value}


def _unflatten(node: Any, tensors: dict[str, Tensor]) -> Any:
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "value" in node:
        return node["value"]
    inner = node["fields"] if "fields" in node else node["items"]
    return {key: _unflatten(item, tensors) for key, item in inner.items()}


def _rebuild(document: Any, tensors: dict[str, Tensor]) -> ValueAlignmentResult:
    data = _unflatten(document, tensors)
    for axis in ("sources", "layers", "thresholds"):
        if len(data[axis]) > MAX_LABELS:
            raise InputError(f"{len(data[axis])} {axis} are more than any model has")
    sums = data["sums"]
    return ValueAlignmentResult(
        roles={name: RoleResult(**values) for name, values in data["roles"].items()},
        sources=tuple(data["sources"]),
        layers=tuple(data["layers"]),
        thresholds=tuple(data["thresholds"]),
        metric=data["metric"],
        norms=data["norms"],
        full_norms=data["full_norms"],
        checks=Checks(**data["checks"]),
        sums=Sums(
            **(sums | {"roles": {name: RoleSums(**part) for name, part in sums["roles"].items()}})
        ),
        provenance=data["provenance"],
        extremes=_extremes(data.get("extremes")),
        moments=None if data.get("moments") is None else Moments(**data["moments"]),
    )


def _extremes(data: Any) -> Extremes | None:
    if data is None:
        return None
    roles = {name: RoleExtremes(**part) for name, part in data["roles"].items()}
    return Extremes(roles, data["words"])


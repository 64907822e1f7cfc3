"""Results on disk: one safetensors file, tensors plus a JSON document. Nothing is ever executed."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from typeguard import TypeCheckError

from tl_valuealign.document import from_document, to_document
from tl_valuealign.errors import InputError, StorageError
from tl_valuealign.result import ValueAlignmentResult

FORMAT = "tl_valuealign"
VERSION = 1
MAX_HEADER_BYTES = 32 * 2**20
MAX_TENSORS = 10_000


def save(result: ValueAlignmentResult, path: Any, *, overwrite: bool = False) -> None:
    """Write ``result`` to ``path`` atomically: the old file or the whole new one, never a part.

    Raises ``StorageError`` if the path is a directory, exists while ``overwrite`` is false, or
    cannot be written.
    """
    target = _path(path)
    try:
        folder, taken = target.is_dir(), target.exists()
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error}") from error
    if folder:
        raise StorageError(
            f"{target} is a directory; give a file name such as {target / 'result.safetensors'}"
        )
    if taken and not overwrite:
        raise StorageError(f"{target} exists; pass overwrite=True to replace it")
    document, tensors = to_document(result)
    metadata = {"format": FORMAT, "version": str(VERSION), "document": json.dumps(document)}
    temporary = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode  # what the umask grants; safetensors would grant the owner
        save_file(tensors, temporary, metadata=metadata)
        temporary.chmod(mode)
        os.replace(temporary, target)
    except (OSError, ValueError, SafetensorError) as error:
        raise StorageError(f"cannot write {target}: {error}") from error
    finally:
        _remove(temporary)


def load(path: Any) -> ValueAlignmentResult:
    """Read a result written by ``result.save``; bit-identical to what was saved.

    Raises ``StorageError`` if the file is missing, foreign, truncated, damaged or of another
    format version. Memory is bounded by the size of the file.
    """
    source = _path(path)
    try:
        if not source.is_file():
            raise StorageError(f"{source} is not a file")
        with open(source, "rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > min(MAX_HEADER_BYTES, source.stat().st_size):
            raise StorageError(
                f"{source} is no result of tl_valuealign, or is damaged: its header claims "
                f"{header_bytes} bytes in a file of {source.stat().st_size}"
            )
        with safe_open(source, framework="pt") as file:
            document = _document(source, file.metadata() or {})
            if len(file.keys()) > MAX_TENSORS:
                raise StorageError(f"{source} holds more tensors than a result has")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except OSError as error:
        raise StorageError(f"cannot read {source}: {error}") from error
    except (SafetensorError, TypeError, RuntimeError) as error:
        raise StorageError(f"{source} is damaged or no safetensors file: {error}") from error
    try:
        return from_document(document, tensors)
    except (
        KeyError,
        TypeError,
        TypeCheckError,
        InputError,
        AttributeError,
        ValueError,
        RecursionError,
    ) as error:
        why = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise StorageError(
            f"{source} says it is a result of tl_valuealign but does not hold one: {why:.300}"
        ) from error


def _path(given: Any) -> Path:
    try:
        return Path(given)
    except TypeError as error:
        raise StorageError(f"a path is needed, got {given!r:.80}") from error


def _remove(temporary: Path) -> None:
    try:
        temporary.unlink(missing_ok=True)
    except (OSError, ValueError):  # no such folder: then nothing was written there either
        return


def _document(source: Path, metadata: dict[str, str]) -> Any:
    if metadata.get("format") != FORMAT:
        raise StorageError(f"{source} is a safetensors file, but no result of tl_valuealign")
    if metadata.get("version") != str(VERSION):
        raise StorageError(
            f"{source} has format version {metadata.get('version')!r:.40}; this package reads "
            f"version {VERSION}: analyse again, or install the release that wrote it"
        )
    try:
        return json.loads(metadata["document"])
    except (KeyError, ValueError, RecursionError) as error:
        raise StorageError(f"{source} is damaged: its description is not JSON ({error})") from error

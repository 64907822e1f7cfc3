"""The bundled text: what an analysis reads when the caller brings no data.

Forty-odd short passages of many kinds, written for this package: prose, talk, code, mathematics,
tables and nine other languages. They come in an order in which the first dozen already touch
the main kinds, because a token limit keeps only the first ones.
"""

import hashlib
import re
from importlib.resources import files

PASSAGES_VERSION = "1"


def _read() -> tuple[tuple[str, str], ...]:
    """(kind, text) of every passage; a line ``=== kind`` opens one."""
    text = files("tl_valuealign").joinpath("passages.txt").read_text(encoding="utf-8")
    pieces = re.split(r"^=== (.+)\n", text, flags=re.MULTILINE)[1:]
    return tuple(
        (kind, passage.strip("\n")) for kind, passage in zip(pieces[::2], pieces[1::2], strict=True)
    )


_KINDS_AND_TEXTS = _read()

PASSAGE_KINDS: tuple[str, ...] = tuple(kind for kind, _ in _KINDS_AND_TEXTS)
PASSAGES: tuple[str, ...] = tuple(text for _, text in _KINDS_AND_TEXTS)


def passages_hash() -> str:
    """SHA-256 (hex) over the texts in their order, each closed by a zero byte."""
    digest = hashlib.sha256()
    for text in PASSAGES:
        digest.update(text.encode("utf-8") + b"\0")
    return digest.hexdigest()

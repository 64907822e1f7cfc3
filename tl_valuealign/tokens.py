"""Whatever the caller hands in, as batches of right-padded ids with a keep mask."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tl_valuealign.errors import InputError
from tl_valuealign.passages import PASSAGES, PASSAGES_VERSION
from tl_valuealign.shapes import KeepMask, TokenIds, check_fields

MAX_WINDOW = 1024
RANDOM_SEQUENCES = 16
RANDOM_LENGTH = 128


@dataclass(frozen=True)
class Batch:
    """ids and keep [sequence, position], right-padded with id 0.

    ``seeds``: one whole number a sequence, made from its ids.
    """

    ids: TokenIds
    keep: KeepMask
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self)

    def without_first(self) -> "Batch":
        """The same ids with position 0 of every sequence left out of what counts."""
        keep = self.keep.clone()
        keep[:, 0] = False
        return Batch(self.ids, keep, self.seeds)


@dataclass
class Corpus:
    """A stream of rows of ids. Its counts and hash are complete once it has been read through.

    ``bos``: the id put before every window of a string unless it begins the text, else None.
    ``n_prepended``: how many that were. ``n_items``: texts that were read, each one or more rows;
    ``n_split``: those cut into several. ``n_empty``: items without a token (empty strings, rows
    masked altogether), left out. ``opening``: the first row that has any token, once it has been
    read.
    """

    description: str
    rows: Iterator[Tensor]
    bos: int | None = None
    n_tokens: int = 0
    n_sequences: int = 0
    n_prepended: int = 0
    n_items: int = 0
    n_split: int = 0
    n_empty: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    opening: Batch | None = None

    def batches(
        self, batch_size: int, max_tokens: int | None, share: tuple[int, int] = (0, 1)
    ) -> Iterator[Batch]:
        """Rows in order, ``batch_size`` at a time, exactly ``max_tokens`` tokens in all.

        Of ``share`` = (rank, processes) only rows rank, rank + processes, … are handed out; the
        counts and the hash are those of all rows.

        Raises ``InputError`` if there is not one token.
        """
        pending: list[tuple[Tensor, int]] = []
        for row in self.rows:
            row = row if max_tokens is None else row[: max_tokens - self.n_tokens]
            self.n_tokens += len(row)
            self.n_sequences += 1
            own = hashlib.sha256(row.numpy().tobytes()).digest()
            self.digest.update(own)
            numbered = (row, int.from_bytes(own[:7], "little"))
            if self.opening is None and len(row):
                self.opening = _pad([numbered])
            if (self.n_sequences - 1) % share[1] == share[0]:
                pending.append(numbered)
            if len(pending) == batch_size:
                yield _pad(pending)
                pending = []
            if self.n_tokens == max_tokens:
                break
        if pending:
            yield _pad(pending)
        if not self.n_tokens:
            raise InputError(
                f"no tokens to read in {self.description}: every row is empty or masked"
            )


def _pad(numbered: list[tuple[Tensor, int]]) -> Batch:
    rows = [row for row, _ in numbered]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    keep = torch.arange(ids.shape[1])[None] < lengths[:, None]
    return Batch(ids, keep, tuple(seed for _, seed in numbered))


def read(
    data: Any,
    *,
    tokenizer: Any,
    prepend_bos: bool,
    n_ctx: int,
    d_vocab: int,
    attention_mask: Any = None,
) -> Corpus:
    """Make a corpus of ``data`` (see ``analyze_value_alignment``); nothing is tokenised yet.

    Rows keep only unmasked tokens, so left padding, right padding and none are the same text.
    Raises ``InputError`` here for a kind of data that cannot be read, and while reading for ids
    out of range, strings without a tokenizer and masks that do not fit.
    """
    if attention_mask is not None and not isinstance(data, (Tensor, np.ndarray)):
        raise InputError(
            f"attention_mask goes with a tensor of ids [batch, pos], got data of type "
            f"{type(data).__name__}; leave the mask out, text is padded and masked for you"
        )
    if data is None and tokenizer is None:
        rows = _random_rows(d_vocab, n_ctx)
        return Corpus("seeded random ids (the model has no tokenizer)", iter(rows))
    if data is None:
        description, items = f"bundled passages {PASSAGES_VERSION}", iter(PASSAGES)
    else:
        description, items = _items(data, attention_mask)
    bos = getattr(tokenizer, "bos_token_id", None) if prepend_bos else None
    corpus = Corpus(description, iter(()), bos)
    corpus.rows = _rows(items, corpus, tokenizer, n_ctx, d_vocab)
    return corpus


def _items(data: Any, mask: Any) -> tuple[str, Iterator[Any]]:
    """A description of the data and an iterator over strings and 1-D id tensors."""
    if isinstance(data, str):
        return "the given string", iter((data,))
    if isinstance(data, (Tensor, np.ndarray)):
        return "the given ids", _tensor_rows(data, mask)
    if isinstance(data, (list, tuple)) and data and all(_is_int(item) for item in data):
        return "the given ids", iter((_int64(data),))
    if isinstance(data, Mapping):
        raise InputError(
            f"data is a mapping ({type(data).__name__}) with keys {_keys(data)}; pass one of its "
            f"values: data=batch['input_ids'] with attention_mask=batch['attention_mask'], or a "
            f"column of texts such as dataset['text']"
        )
    if isinstance(data, (bytes, bytearray, Set)) or not isinstance(data, Iterable):
        raise InputError(
            f"data of type {type(data).__name__} cannot be read; pass a string, a list of strings, "
            f"a tensor of ids [batch, pos] or [pos], or an iterable of these in a fixed order"
        )
    kind = f"{len(data)} given items" if isinstance(data, (list, tuple)) else "a given stream"
    return kind, _flatten(data)


def _flatten(data: Iterable[Any]) -> Iterator[Any]:
    for item in data:
        if isinstance(item, str):
            yield item
        elif isinstance(item, (Tensor, np.ndarray)):
            yield from _tensor_rows(item, None)
        elif isinstance(item, (list, tuple)) and all(isinstance(each, str) for each in item):
            yield from item
        elif isinstance(item, (list, tuple)) and all(_is_int(each) for each in item):
            yield _int64(item)
        else:
            hint = ""
            if isinstance(item, Mapping):
                hint = f" with keys {_keys(item)}: pass one of its values"
            raise InputError(
                f"an item of the data is a {type(item).__name__}{hint}; expected a string or ids "
                f"[pos] or [batch, pos]"
            )


def _keys(mapping: Mapping[Any, Any]) -> str:
    return ", ".join(repr(key) for key in list(mapping)[:6]) or "none"


def _int64(numbers: Any) -> Tensor:
    try:
        return torch.tensor(numbers, dtype=torch.int64)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise InputError(f"ids must be whole numbers of 64 bits: {error}") from error


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _tensor_rows(given: Any, mask: Any) -> Iterator[Tensor]:
    ids = _on_cpu("ids", given)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"ids must be whole numbers, got a tensor of {ids.dtype}")
    if ids.ndim not in (1, 2):
        raise InputError(f"ids must be [batch, pos] or [pos], got shape {tuple(ids.shape)}")
    ids = ids.to(torch.int64)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if mask is not None:
        mask = _on_cpu("attention_mask", mask)
        if mask.shape != ids.shape:
            raise InputError(
                f"attention_mask has shape {tuple(mask.shape)}, ids have {tuple(ids.shape)}; they "
                f"must be the same"
            )
        keep = mask == 1
        if not bool((keep | (mask == 0)).all()):
            raise InputError(
                "attention_mask holds other numbers than 1 (text) and 0 (padding); an additive "
                "mask of zeros and large negative numbers is another thing: pass (mask == 0)"
            )
    for number, (row, kept) in enumerate(
        zip(torch.atleast_2d(ids), torch.atleast_2d(keep), strict=True)
    ):
        inside = kept.nonzero()[:, 0]
        if len(inside) and int(inside[-1] - inside[0]) + 1 != len(inside):
            raise InputError(
                f"attention_mask has a gap inside row {number}; padding may stand before or after "
                f"the text only. Split the row at the gap"
            )
        yield row[kept]


def _on_cpu(name: str, given: Any) -> Tensor:
    """A plain tensor on the CPU, wherever it was; ``InputError`` for what holds no such numbers."""
    try:
        given = torch.as_tensor(given)
        if given.layout != torch.strided or given.is_quantized:
            raise InputError(f"{name}: a plain tensor is needed, got layout {given.layout}")
        return given.detach().cpu()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: cannot be read as a tensor of numbers ({error})") from error


def _rows(
    items: Iterator[Any], corpus: Corpus, tokenizer: Any, n_ctx: int, d_vocab: int
) -> Iterator[Tensor]:
    """Ids of every item, cut into windows that the model can read."""
    for number, item in enumerate(items):
        begins = False
        if isinstance(item, str):
            ids, begins = _tokenize(item, corpus.bos, tokenizer, number)
            window, bos = min(n_ctx or MAX_WINDOW, MAX_WINDOW), corpus.bos
        else:
            ids, bos, window = item, None, n_ctx or max(1, len(item))
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < d_vocab:
            bad = ids[(ids < 0) | (ids >= d_vocab)][0]
            raise InputError(
                f"item {number} holds the id {int(bad)}, outside this model's vocabulary of "
                f"{d_vocab}; were the ids made with another tokenizer?"
            )
        pieces = ids.split(window - (bos is not None)) if len(ids) else (ids,) * begins
        corpus.n_items += bool(pieces)
        corpus.n_split += len(pieces) > 1
        corpus.n_empty += not pieces
        for place, piece in enumerate(pieces):
            if bos is not None:
                corpus.n_prepended += not (begins and place == 0)
                piece = torch.cat([torch.tensor([bos]), piece])
            yield piece


def _tokenize(text: str, bos: int | None, tokenizer: Any, number: int) -> tuple[Tensor, bool]:
    """Ids of a string without a leading BOS, and whether the string had one."""
    if tokenizer is None:
        raise InputError(
            f"item {number} is a string but the model has no tokenizer; pass ids "
            f"[batch, pos], or load the model with its tokenizer"
        )
    try:
        found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except (TypeError, UnicodeError) as error:
        raise InputError(f"item {number} cannot be tokenised: {error}") from error
    ids = torch.tensor(found, dtype=torch.int64)
    begins = bos is not None and bool(len(ids)) and int(ids[0]) == bos
    return ids[1:] if begins else ids, begins


def _random_rows(d_vocab: int, n_ctx: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    length = min(RANDOM_LENGTH, n_ctx or RANDOM_LENGTH)
    return torch.randint(d_vocab, (RANDOM_SEQUENCES, length), generator=generator)

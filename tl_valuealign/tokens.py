"""Whatever the caller hands in, as batches of right-padded ids with a keep mask."""

import hashlib
from collections.abc import Iterable, Iterator
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

    ``bos``: the id put before every string that did not begin with it, else None.
    """

    description: str
    rows: Iterator[Tensor]
    bos: int | None = None
    n_tokens: int = 0
    n_sequences: int = 0
    n_prepended: int = 0
    n_split: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def batches(self, batch_size: int, max_tokens: int | None) -> Iterator[Batch]:
        """Rows in order, ``batch_size`` at a time, exactly ``max_tokens`` tokens in all.

        Raises ``InputError`` if there is not one token.
        """
        pending: list[tuple[Tensor, int]] = []
        for row in self.rows:
            room = None if max_tokens is None else max_tokens - self.n_tokens
            if room == 0:
                break
            row = row[:room]
            self.n_tokens += len(row)
            self.n_sequences += 1
            own = hashlib.sha256(row.numpy().tobytes()).digest()
            self.digest.update(own)
            pending.append((row, int.from_bytes(own[:7], "little")))
            if len(pending) == batch_size:
                yield _pad(pending)
                pending = []
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
        return "the given ids", _tensor_rows(torch.as_tensor(data), mask)
    if isinstance(data, (list, tuple)) and data and all(_is_int(item) for item in data):
        return "the given ids", iter((torch.tensor(data),))
    if isinstance(data, (bytes, dict)) or not isinstance(data, Iterable):
        raise InputError(
            f"data of type {type(data).__name__} cannot be read; pass a string, a list of strings, "
            f"a tensor of ids [batch, pos] or [pos], or an iterable of these"
        )
    kind = f"{len(data)} given items" if isinstance(data, (list, tuple)) else "a given stream"
    return kind, _flatten(data)


def _flatten(data: Iterable[Any]) -> Iterator[Any]:
    for item in data:
        if isinstance(item, str):
            yield item
        elif isinstance(item, (Tensor, np.ndarray)):
            yield from _tensor_rows(torch.as_tensor(item), None)
        elif isinstance(item, (list, tuple)) and all(isinstance(each, str) for each in item):
            yield from item
        elif isinstance(item, (list, tuple)) and all(_is_int(each) for each in item):
            yield torch.tensor(item, dtype=torch.int64)
        else:
            raise InputError(
                f"an item of the data is a {type(item).__name__}; expected a string or ids "
                f"[pos] or [batch, pos]"
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _tensor_rows(ids: Tensor, mask: Any) -> Iterator[Tensor]:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"ids must be whole numbers, got a tensor of {ids.dtype}")
    if ids.ndim not in (1, 2):
        raise InputError(f"ids must be [batch, pos] or [pos], got shape {tuple(ids.shape)}")
    ids = ids.detach().cpu().to(torch.int64)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if mask is not None:
        mask = torch.as_tensor(mask)
        if mask.shape != ids.shape:
            raise InputError(
                f"attention_mask has shape {tuple(mask.shape)}, ids have {tuple(ids.shape)}; they "
                f"must be the same"
            )
        keep = mask.detach().cpu() != 0
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


def _rows(
    items: Iterator[Any], corpus: Corpus, tokenizer: Any, n_ctx: int, d_vocab: int
) -> Iterator[Tensor]:
    """Ids of every item, cut into windows that the model can read."""
    for number, item in enumerate(items):
        if isinstance(item, str):
            ids, bos = _tokenize(item, corpus, tokenizer, number)
            window = min(n_ctx or MAX_WINDOW, MAX_WINDOW)
        else:
            ids, bos, window = item, None, n_ctx or len(item)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < d_vocab:
            bad = ids[(ids < 0) | (ids >= d_vocab)][0]
            raise InputError(
                f"item {number} holds the id {int(bad)}, outside this model's vocabulary of "
                f"{d_vocab}; were the ids made with another tokenizer?"
            )
        pieces = ids.split(max(1, window - (bos is not None))) if len(ids) else ()
        corpus.n_split += len(pieces) > 1
        for piece in pieces:
            if bos is not None:
                corpus.n_prepended += 1
                piece = torch.cat([torch.tensor([bos]), piece])
            yield piece


def _tokenize(
    text: str, corpus: Corpus, tokenizer: Any, number: int
) -> tuple[Tensor, int | None]:
    """Ids of a string, and the BOS id to put before each of its windows if it is not there."""
    if tokenizer is None:
        raise InputError(
            f"item {number} is a string but the model has no tokenizer; pass ids "
            f"[batch, pos], or load the model with its tokenizer"
        )
    ids = torch.tensor(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64
    )
    begins = bool(len(ids)) and int(ids[0]) == corpus.bos
    return ids, None if begins else corpus.bos


def _random_rows(d_vocab: int, n_ctx: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    length = min(RANDOM_LENGTH, n_ctx or RANDOM_LENGTH)
    return torch.randint(d_vocab, (RANDOM_SEQUENCES, length), generator=generator)

"""The opening that every question to a model shares: validate, tokenise, quieten, self-check."""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tl_valuealign import arguments, tokens
from tl_valuealign._version import VERSION
from tl_valuealign.adapter import ModelView
from tl_valuealign.errors import InputError, ModelError
from tl_valuealign.notes import notes_on
from tl_valuealign.selfcheck import Verified, verify
from tl_valuealign.spectra import require_finite
from tl_valuealign.sums import MIN_SEQUENCES
from tl_valuealign.tokens import Batch, Corpus


@dataclass
class Session:
    """A model whose streams and matrices have been checked on the text it is about to read.

    ``roles`` and ``layers`` are validated; ``place`` is where tensors of the caller live;
    ``opening`` is the sequence the checks were made on, ``first`` the first batch, both with
    position 0.
    """

    view: ModelView
    roles: tuple[str, ...]
    layers: tuple[int, ...]
    corpus: Corpus
    place: torch.device
    verified: Verified
    opening: Batch
    first: Batch | None
    skip_first: bool
    progress: bool
    _following: Iterator[Batch]

    def batches(self) -> Iterator[Batch]:
        """Every batch once, under a progress bar; position 0 left out where that was asked."""
        with tqdm(desc="reading", unit=" tokens", delay=1, disable=not self.progress) as bar:
            own = () if self.first is None else (self.first,)
            for batch in itertools.chain(own, self._following):
                bar.update(int(batch.keep.sum()))
                yield batch.without_first() if self.skip_first else batch

    def require_tokens(self, count: int, *, needed: int = 1) -> None:
        """Raise ``InputError`` if fewer than ``needed`` tokens were left to measure."""
        if count < needed:
            why = "skip_first=True leaves position 0 out and every sequence has just one"
            raise InputError(
                f"no tokens left of {self.corpus.description}: "
                f"{why if self.skip_first else 'every sequence is too short'}; pass longer text"
            )

    def require_finite(self, norms: Tensor, sources: Sequence[str]) -> None:
        """Raise ``ModelError`` naming the first stream that held NaN or infinite entries.

        ``norms``: Σ_t ‖x̄_t‖ [source and full stream, layer].
        """
        bad = (~norms.isfinite()).nonzero()
        if len(bad):
            number, place = bad[0].tolist()
            full = f"the full stream before block {self.layers[place]}"
            self.require_finite_tokens([*sources, full][number], norms[number, place])

    def require_finite_tokens(self, what: str, values: Tensor) -> None:
        """Raise ``ModelError`` naming ``what`` where its values at kept tokens are not finite."""
        if not bool(values.isfinite().all()):
            raise ModelError(
                f"{what} has NaN or infinite entries at some token of "
                f"{self.corpus.description}: the model leaves the range of "
                f"{str(self.view.dtype).removeprefix('torch.')} there; try bfloat16 or float32"
            )

    def model_facts(self) -> dict[str, Any]:
        """What was measured, with what, and in which state it was found."""
        view = self.view
        return {
            "model_name": view.name,
            "model_class": type(view.model).__name__,
            "model_hash": view.model_hash(),
            "n_layers": view.n_layers,
            "n_heads": view.n_heads("Q"),
            "n_key_value_heads": view.n_heads("V"),
            "d_model": view.d_model,
            "d_head": view.d_head("V"),
            "readable_dim": view.d_model - self.verified.centred,
            "input_norm": sorted({norm.describe() for norm in self.verified.norms.values()}),
            "notes": notes_on(view),
            "dtype": str(view.dtype).removeprefix("torch."),
            "device": str(view.device),
            "versions": {"tl_valuealign": VERSION}
            | {name: version(name) for name in ("transformer-lens", "transformers", "torch")},
        }

    def text_facts(self, n_tokens: int, n_sequences: int) -> dict[str, Any]:
        """Which text was read; complete once :meth:`batches` is exhausted.

        Warns where intervals would rest on windows of a few long texts.
        """
        corpus = self.corpus
        if corpus.n_split and corpus.n_items < MIN_SEQUENCES <= n_sequences:
            warnings.warn(
                f"{corpus.description}: {corpus.n_items} text(s) read in {n_sequences} windows. "
                f"Intervals take windows as independent, which those of one text are not, so they "
                f"are too narrow; pass {MIN_SEQUENCES} or more texts for honest ones",
                stacklevel=4,
            )
        return {
            "text": [corpus.description],
            "text_hash": corpus.digest.hexdigest(),
            "n_tokens": n_tokens,
            "n_sequences": n_sequences,
            "n_tokens_read": corpus.n_tokens,
            "n_texts": corpus.n_items,
            "n_items_split_into_windows": corpus.n_split,
            "n_items_empty": corpus.n_empty,
            "bos_id": corpus.bos,
            "n_bos_prepended": corpus.n_prepended,
            "skip_first": self.skip_first,
        }


@contextmanager
def open_session(
    model: Any,
    data: Any,
    *,
    roles: Sequence[str],
    allowed_roles: Sequence[str],
    layers: Sequence[int] | None,
    attention_mask: Any,
    skip_first: bool,
    batch_size: int,
    max_tokens: int | None,
    device: Any,
    progress: bool,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Session]:
    """Open ``model`` for reading ``data``: in eval mode, without gradients, checked and later put
    back as it was. Of the text this process reads the ``share`` of rank and number of processes.

    Raises ``InputError``, ``ModelError`` and ``SelfCheckError``, as ``analyze_value_alignment``.
    """
    view = ModelView(model)
    roles = arguments.choices("roles", roles, allowed_roles)
    layers = arguments.blocks("layers", layers, view.attention_layers, view.n_layers)
    view.choose(layers)
    for layer, role in itertools.product(layers, roles):
        # Before the first pass, which would carry them into every later stream.
        weight = view.weight(layer, "V" if role == "OV" else role)
        require_finite(weight, role=role, layer=layer)
    batch_size = arguments.count("batch_size", batch_size)
    max_tokens = None if max_tokens is None else arguments.count("max_tokens", max_tokens)
    place = arguments.device("device", device, view.device)
    skip_first = arguments.flag("skip_first", skip_first)
    progress = arguments.flag("progress", progress)
    corpus = tokens.read(
        data,
        tokenizer=view.tokenizer,
        prepend_bos=view.prepends_bos,
        n_ctx=view.n_ctx,
        d_vocab=view.d_vocab,
        attention_mask=attention_mask,
    )
    batches = corpus.batches(batch_size, max_tokens, share)
    with view.quiet():
        # Of several processes one may get no sequence, yet all check the same opening.
        first = next(batches, None)
        opening = corpus.opening
        if opening is None:
            raise InputError(f"no tokens to read in {corpus.description}")
        verified = verify(view, opening.ids, opening.keep, layers, roles)
        yield Session(
            view,
            roles,
            layers,
            corpus,
            place,
            verified,
            opening,
            first,
            skip_first,
            progress,
            batches,
        )

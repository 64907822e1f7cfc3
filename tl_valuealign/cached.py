"""Activations that the caller already has, read in place of forward passes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tl_valuealign.adapter import ModelView
from tl_valuealign.errors import InputError, SelfCheckError
from tl_valuealign.selfcheck import PROBE_TOKENS, TOLERANCES
from tl_valuealign.tokens import Batch


class CachedStreams:
    """The needed part of an ``ActivationCache`` (or any mapping), handed out batch by batch.

    ``names`` are hooks whose activations are [batch, pos, d_model], or [pos, d_model] for one
    sequence; ``data`` the ids [batch, pos] or [pos] that the cache was computed from, with their
    ``attention_mask``, both already accepted by ``tokens.read``. ``share``: as in
    ``Corpus.batches``. Raises ``InputError`` naming what is missing or of another shape.
    """

    def __init__(
        self,
        view: ModelView,
        cache: Any,
        data: Any,
        attention_mask: Any,
        names: Sequence[str],
        share: tuple[int, int] = (0, 1),
    ) -> None:
        ids = _ids(data)
        mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
        kept = (mask.cpu() != 0).reshape(ids.shape)
        lengths = kept.sum(1)
        if view.n_ctx and int(lengths.max()) > view.n_ctx:
            raise InputError(
                f"cache: a sequence of {int(lengths.max())} tokens is longer than the model's "
                f"context of {view.n_ctx}"
            )
        self.view, self.names = view, list(names)
        self.all_rows = lengths.nonzero()[:, 0]
        self.rows = self.all_rows[share[0] :: share[1]]
        self.starts, self.lengths = kept.int().argmax(1), lengths
        self.ids, self.next = ids, 0
        self.streams = _needed(cache, self.names, (*ids.shape, view.d_model))

    def take(self, batch: Batch) -> dict[str, Tensor]:
        """Activations of the batch that follows, aligned with its right-padded ids.

        Raises ``SelfCheckError`` where the embedding in the cache is not that of the ids.
        """
        rows = self.rows[self.next : self.next + len(batch.ids)]
        self.next += len(batch.ids)
        found = self._rows(rows, batch.ids.shape[1])
        _, embedded = self.view.run(batch.ids, [], stop_at_layer=0)
        name = self.view.resid_pre(0)
        self._compare(name, found[name], embedded, batch.keep, rows)
        return found

    def verify(self, last: int) -> None:
        """Run the model on the first and on the shortest sequence and compare every stream.

        Call inside ``view.quiet()``. Raises ``SelfCheckError`` naming the hook and the difference.
        """
        first = self.all_rows[0]
        shortest = self.all_rows[self.lengths[self.all_rows].argmin()]
        for row in dict.fromkeys((int(first), int(shortest))):
            width = min(int(self.lengths[row]), PROBE_TOKENS)
            start = int(self.starts[row])
            ids = self.ids[row : row + 1, start : start + width]
            final = self.view.resid_pre(last)
            own, stopped = self.view.run(
                ids, [name for name in self.names if name != final], stop_at_layer=last
            )
            rows, keep = torch.tensor([row]), torch.ones_like(ids, dtype=torch.bool)
            for name, value in self._rows(rows, width).items():
                self._compare(name, value, stopped if name == final else own[name], keep, rows)

    def _rows(self, rows: Tensor, width: int) -> dict[str, Tensor]:
        """[sequence, position, d_model] of some rows, their text moved to position 0."""
        last = self.ids.shape[1] - 1
        places = (self.starts[rows, None] + torch.arange(width)).clamp(max=last)
        return {
            name: value[rows[:, None].to(value.device), places.to(value.device)]
            for name, value in self.streams.items()
        }

    def _compare(
        self, name: str, cached: Tensor, own: Tensor | None, keep: Tensor, rows: Tensor
    ) -> None:
        if own is None:
            raise SelfCheckError(f"the model never reached {name}, so the cache cannot be checked")
        dtype, kept = self.view.compute_dtype, keep.to(own.device)
        got, want = cached.to(own.device, dtype), own.to(dtype)
        error = torch.linalg.vector_norm(got - want, dim=-1)
        size = torch.linalg.vector_norm(want, dim=-1)
        ratio = torch.where(error == 0, 0.0, error / size)
        # The mean over tokens: in half precision one token of a small output may be all rounding.
        mean = torch.where(kept, ratio, 0.0).sum(1) / kept.sum(1).clamp(min=1)
        worst, tolerance = int(mean.nan_to_num(torch.inf).argmax()), TOLERANCES[self.view.dtype]
        if not float(mean[worst]) <= tolerance:
            raise SelfCheckError(
                f"cache: {name} of sequence {int(rows[worst])} is {float(mean[worst]):.2g} of its "
                f"size away from what this model computes on these tokens (tolerance "
                f"{tolerance:g}). The cache is of other tokens or other weights (another "
                f"checkpoint, or before weight processing), was made with hooks that are gone, in "
                f"train mode, or on padded ids without their attention_mask"
            )


def _ids(data: Any) -> Tensor:
    """Ids [batch, pos]. Raises ``InputError`` for text: what a cache was made from is ids."""
    if isinstance(data, (list, tuple)) and data and all(isinstance(i, int) for i in data):
        data = torch.tensor(data)
    if not isinstance(data, (Tensor, np.ndarray)) or data.ndim not in (1, 2):
        raise InputError(
            f"cache: pass as data the ids [batch, pos] or [pos] that the cache was computed from, "
            f"such as tokens = model.to_tokens(text); got {type(data).__name__}"
        )
    ids = torch.as_tensor(data).detach().cpu()
    return ids[None] if ids.ndim == 1 else ids


def _needed(cache: Any, names: Sequence[str], shape: tuple[int, ...]) -> dict[str, Tensor]:
    if not isinstance(cache, Mapping) and not (
        hasattr(cache, "keys") and hasattr(cache, "__getitem__")
    ):
        raise InputError(
            f"cache: expected the ActivationCache of model.run_with_cache(tokens), got "
            f"{type(cache).__name__}"
        )
    held = set(cache.keys())
    missing = [name for name in names if name not in held]
    if missing:
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        endings = sorted({name.rpartition(".")[2] for name in names})
        raise InputError(
            f"cache: {len(missing)} of the {len(names)} hooks that this analysis reads are not in "
            f"it: {', '.join(missing[:6])}{more}. Cache them with model.run_with_cache(tokens, "
            f"names_filter=lambda name: name.endswith({tuple(endings)!r})), or ask for fewer "
            f"layers=... or components=..."
        )
    found = {}
    for name in names:
        value = cache[name]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise InputError(f"cache: {name} is no tensor of activations, but {type(value)}")
        value = value.detach()
        # A cache of one sequence may have no batch axis; positions may be cached once for all.
        value = value[None] if value.ndim == 2 else value
        if name == "hook_pos_embed" and value.shape[1:] == shape[1:]:
            value = value.expand(shape)
        if tuple(value.shape) != shape:
            raise InputError(
                f"cache: {name} has shape {tuple(cache[name].shape)}, expected [batch, pos, "
                f"d_model] = {list(shape)} as the ids have it; pass the same ids that "
                f"run_with_cache got, prepended BOS included"
            )
        found[name] = value
    return found

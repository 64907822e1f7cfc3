"""The tokens of the analysed text that align most and least with each head, in their context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_valuealign.errors import InputError
from tl_valuealign.shapes import check_fields
from tl_valuealign.tokens import Batch

# "side": largest, smallest. "pair": embedding, full stream. "place": the token and what surrounds
# it; OUTSIDE stands for what is not text.
ExtremeValues = Float[Tensor, "side pair layer rank head"]
ExtremeContexts = Int[Tensor, "side pair layer rank head place"]

RANKS, BEFORE, AFTER = 8, 8, 4
OUTSIDE = -1
STREAMS = ("embed", "full")


@dataclass(frozen=True)
class RoleExtremes:
    """One role's extreme tokens at the first threshold.

    values: ‖U_kᵀ x̄‖ / ‖x̄‖, best first; NaN where the text had fewer tokens. contexts: ids around
    each, the token itself at place ``BEFORE``.
    """

    values: ExtremeValues
    contexts: ExtremeContexts

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Extremes:
    """Extreme tokens of every role, and the text of every id among them.

    The embedding's alignment depends on the token alone, so it is listed once a token; so is the
    token at position 0, which has no context. ``words`` has ids as decimal strings.
    """

    roles: dict[str, RoleExtremes]
    words: dict[str, str]

    def __post_init__(self) -> None:
        check_fields(self)

    def __add__(self, other: "Extremes") -> "Extremes":
        """Those of both texts together."""
        roles = {}
        for name, mine in self.roles.items():
            theirs = other.roles[name]
            values = torch.cat([mine.values, theirs.values], dim=3)
            contexts = torch.cat([mine.contexts, theirs.contexts], dim=3)
            roles[name] = RoleExtremes(*_best(_without_repeats(values, contexts), contexts))
        return Extremes(roles, self.words | other.words)

    def table(self, role: str, layer: int, head: int, stream: str) -> pd.DataFrame:
        """Rows of one head, ``layer`` being a place on the layer axis."""
        found, pair = self.roles[role], STREAMS.index(stream)
        rows: list[dict[str, Any]] = []
        for side, name in enumerate(("largest", "smallest")):
            values = found.values[side, pair, layer, :, head].tolist()
            contexts = found.contexts[side, pair, layer, :, head].tolist()
            for rank, (value, ids) in enumerate(zip(values, contexts, strict=True)):
                if ids[BEFORE] != OUTSIDE:
                    rows.append(
                        {
                            "end": name,
                            "rank": rank,
                            "alignment": value,
                            "token": self._text(ids[BEFORE : BEFORE + 1]),
                            "before": self._text(ids[:BEFORE]),
                            "after": self._text(ids[BEFORE + 1 :]),
                            "id": ids[BEFORE],
                        }
                    )
        columns = ["end", "rank", "alignment", "token", "before", "after", "id"]
        return pd.DataFrame(rows, columns=columns)

    def _text(self, ids: Sequence[int]) -> str:
        return "".join(self.words.get(str(i), f"⟨{i}⟩") for i in ids if i != OUTSIDE)


class ExtremeTracker:
    """Keeps the extremes of a run; what it holds does not grow with the text.

    ``shapes``: (thresholds, heads) of every role, in the order of the cells that are offered.
    """

    def __init__(
        self, roles: Sequence[str], shapes: Sequence[tuple[int, ...]], n_layers: int, d_vocab: int
    ) -> None:
        self.roles = roles
        self.heads = [heads for _, heads in shapes]
        self.cells: list[int] = []
        start = 0
        for thresholds, heads in shapes:
            self.cells += range(start, start + heads)
            start += thresholds * heads
        shape = (2, 2, n_layers, RANKS, sum(self.heads))
        self.values = torch.full(shape, torch.nan)
        self.contexts = torch.full((*shape, BEFORE + 1 + AFTER), OUTSIDE, dtype=torch.int32)
        self.seen = torch.zeros(2, d_vocab, dtype=torch.bool)

    def start_batch(self, batch: Batch) -> None:
        """Announce the batch whose tokens, flattened and in order, are offered next."""
        ids, keep = batch.ids, batch.keep
        padded = torch.nn.functional.pad(ids.to(torch.int32), (BEFORE, AFTER), value=OUTSIDE)
        # Position 0 may be left out of what counts, but it is context all the same.
        inside = keep.int().flip(1).cummax(1).values.flip(1) > 0
        padded[:, BEFORE : BEFORE + ids.shape[1]][~inside] = OUTSIDE
        self.table = padded.unfold(1, BEFORE + 1 + AFTER, 1)[keep]
        own, begins = ids[keep], keep.nonzero()[:, 1] == 0
        self.fresh = (
            self._first_seen(0, own, torch.ones_like(begins)),
            self._first_seen(1, own, begins) | ~begins,
        )

    def _first_seen(self, pair: int, ids: Tensor, among: Tensor) -> Tensor:
        """Whether each token, among those flagged, is the first of its kind in the whole text."""
        places = torch.arange(len(ids))[among]
        kinds, inverse = ids[among].unique(return_inverse=True)
        first = torch.full((len(kinds),), len(ids)).scatter_reduce(0, inverse, places, "amin")
        fresh = torch.zeros(len(ids), dtype=torch.bool)
        fresh[first[~self.seen[pair, kinds]]] = True
        self.seen[pair, kinds] = True
        return fresh

    def offer(self, pair: int, layer: int, start: int, captured: Tensor) -> None:
        """Shares of squared norm [token, cell] of the tokens from ``start`` on.

        ``pair``: 0 for the embedding, 1 for the full stream.
        """
        fresh = self.fresh[pair][start : start + len(captured)]
        # A token whose stream is zero has no direction.
        fresh = fresh & (captured > 0).any(1).cpu()
        if not bool(fresh.any()):
            return
        places = fresh.nonzero()[:, 0]
        shares = captured[places.to(captured.device)][:, self.cells].float()
        for side in (0, 1):
            found = shares.topk(min(RANKS, len(places)), dim=0, largest=side == 0)
            contexts = self.table[start + places[found.indices.cpu()]]
            values = torch.cat([self.values[side, pair, layer], found.values.sqrt().cpu()])
            contexts = torch.cat([self.contexts[side, pair, layer], contexts])
            order = _order(values, side, dim=0)
            self.values[side, pair, layer] = values.gather(0, order)
            wide = order[..., None].expand(*order.shape, contexts.shape[-1])
            self.contexts[side, pair, layer] = contexts.gather(0, wide)

    def finish(self, tokenizer: Any) -> Extremes:
        """The extremes, decoded where there is a tokenizer."""
        values, contexts = self.values.split(self.heads, -1), self.contexts.split(self.heads, -2)
        roles = {
            role: RoleExtremes(v.clone(), c.clone())
            for role, v, c in zip(self.roles, values, contexts, strict=True)
        }
        words: dict[str, str] = {}
        if tokenizer is not None:
            ids = self.contexts.unique().tolist()
            words = {str(i): str(tokenizer.decode([i])) for i in ids if i != OUTSIDE}
        return Extremes(roles, words)


def _order(values: Tensor, side: int, dim: int) -> Tensor:
    """Indices of the ``RANKS`` best, NaN last."""
    worst = -torch.inf if side == 0 else torch.inf
    known = values.nan_to_num(worst)
    return known.argsort(dim=dim, descending=side == 0, stable=True).narrow(dim, 0, RANKS)


def _best(values: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.stack([_order(values[side], side, dim=2) for side in (0, 1)])
    wide = order[..., None].expand(*order.shape, contexts.shape[-1])
    kept, around = values.gather(3, order), contexts.gather(3, wide)
    return kept, around.masked_fill(kept.isnan()[..., None], OUTSIDE)


def _without_repeats(values: Tensor, contexts: Tensor) -> Tensor:
    """NaN for later occurrences of a token that counts once."""
    token = contexts[..., BEFORE]
    once = contexts[..., BEFORE - 1] == OUTSIDE
    once[:, 0] = True
    same = token[:, :, :, :, None] == token[:, :, :, None]
    same &= once[:, :, :, :, None] & once[:, :, :, None]
    earlier = torch.ones(token.shape[3], token.shape[3], dtype=torch.bool).tril(-1)
    repeated = (same & earlier[:, :, None]).any(4)
    return values.masked_fill(repeated, torch.nan)


def require(extremes: Extremes | None, role: str, stream: str) -> Extremes:
    """``extremes`` if they hold the role and stream; ``InputError`` saying why not otherwise."""
    if extremes is None:
        raise InputError(
            "this result kept no single tokens (it was read from second moments, or made by an "
            "earlier release); analyse again with the per-token engine"
        )
    if not isinstance(role, str) or role not in extremes.roles:
        raise InputError(f"role {role!r} was not measured; there are {', '.join(extremes.roles)}")
    if stream not in STREAMS:
        raise InputError(f"stream {stream!r} is not kept token by token; use 'embed' or 'full'")
    return extremes

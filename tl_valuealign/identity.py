"""Is a value a lookup? The share of each head's q, k, v variance that token identity explains.

With N vectors of G distinct tokens, the variance within tokens is SS_within / (N − G), the whole
SS_total / (N − 1), and the share is one minus their ratio (the adjusted R² of a one-way layout,
Kelley's ε²). It is 1 where a vector follows from the token alone, and 0 on average where token and
vector are independent. Wherever it is near 1, values could be read from a table of one row a
token, which is what arXiv 2606.02780 gives a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_valuealign import arguments
from tl_valuealign.adapter import HEAD_HOOKS
from tl_valuealign.errors import InputError
from tl_valuealign.labelled import long_frame
from tl_valuealign.parts import as_heads
from tl_valuealign.session import Session, open_session
from tl_valuealign.shapes import PerHead, check_fields
from tl_valuealign.tokens import Batch


@dataclass(frozen=True)
class RoleIdentity:
    """One role's shares, float64.

    share: variance between tokens over all variance, corrected for how few vectors a token has;
    slightly negative values are chance. total: all variance, Σ_t ‖v_t − v̄‖² / (N − 1). Both NaN
    where no token occurs twice.
    """

    share: PerHead
    total: PerHead

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class IdentityResult:
    """How much of each head's vectors is a lookup by token; ``.V`` is [layer, head].

    n_tokens: N, vectors that were compared. n_distinct: G. shuffled: whether the ids had been
    permuted, as a control.
    """

    roles: dict[str, RoleIdentity]
    layers: tuple[int, ...]
    n_tokens: int
    n_distinct: int
    shuffled: bool
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        check_fields(self)

    def role(self, name: str) -> RoleIdentity:
        """One role. Raises ``InputError`` naming the roles that were measured."""
        return self.roles[arguments.measured(name, self.roles)]

    @property
    def Q(self) -> PerHead:
        return self.role("Q").share

    @property
    def K(self) -> PerHead:
        return self.role("K").share

    @property
    def V(self) -> PerHead:
        return self.role("V").share

    def to_dataframe(self) -> pd.DataFrame:
        """One row per role, layer and head: share, total."""
        return long_frame(self.roles, {"layer": self.layers}, ("share", "total"))


@torch.inference_mode(False)  # as in analyze_value_alignment
@torch.no_grad()
def token_identity(
    model: Any,
    data: Any = None,
    *,
    roles: Sequence[str] = ("Q", "K", "V"),
    layers: Sequence[int] | None = None,
    attention_mask: Any = None,
    skip_first: bool = True,
    shuffle: bool = False,
    batch_size: int = 8,
    max_tokens: int | None = None,
    progress: bool = True,
) -> IdentityResult:
    """Share of the variance of each head's q, k and v (before rotary) between token ids.

    Position 0 has no context, so there every model is a lookup; it is left out unless
    ``skip_first=False``. ``shuffle=True`` permutes the ids over the vectors of each batch with a
    fixed seed: the control that should give about 0. Variance within tokens is taken from those
    that occur more than once, so rare tokens are judged by frequent ones. Memory is one vector
    per head and distinct token.

    Args: as in :func:`tl_valuealign.analyze_value_alignment`; roles any of "Q", "K", "V".

    Raises:
        InputError: an argument or the text cannot be used, or no token occurs twice.
        ModelError, SelfCheckError: as ``analyze_value_alignment``.
    """
    shuffle = arguments.flag("shuffle", shuffle)
    opened = open_session(
        model,
        data,
        roles=roles,
        allowed_roles=("Q", "K", "V"),
        layers=layers,
        attention_mask=attention_mask,
        skip_first=skip_first,
        batch_size=batch_size,
        max_tokens=max_tokens,
        device=None,
        progress=progress,
    )
    n_sequences = 0
    generator = torch.Generator().manual_seed(0)
    with opened as session:
        view = session.view
        names = {
            (role, layer): view.hook(layer, HEAD_HOOKS[role])
            for role in session.roles
            for layer in session.layers
        }
        groups = GroupSums(view.d_vocab)
        for batch in session.batches():
            n_sequences += int(batch.keep.any(1).sum())
            found, _ = view.run(
                batch.ids, list(names.values()), stop_at_layer=max(session.layers) + 1
            )
            ids = batch.ids[batch.keep]
            if shuffle:
                ids = ids[torch.randperm(len(ids), generator=generator)]
            groups.add(ids, _vectors(session, names, found, batch))
    session.require_tokens(groups.n)
    if groups.n == groups.n_distinct:
        raise InputError(
            f"no token occurs twice in {session.corpus.description} ({groups.n} tokens), so the "
            f"variance within tokens is unknown; pass longer text"
        )
    share, total = groups.finish()
    rows: dict[str, list[int]] = {role: [] for role in session.roles}
    for place, (role, _) in enumerate(names):
        rows[role].append(place)
    ends = torch.tensor([view.n_heads(role) for role, _ in names]).cumsum(0).tolist()
    parts = list(zip([0, *ends], ends, strict=False))
    return IdentityResult(
        roles={
            role: RoleIdentity(
                torch.stack([share[slice(*parts[place])] for place in places]),
                torch.stack([total[slice(*parts[place])] for place in places]),
            )
            for role, places in rows.items()
        },
        layers=session.layers,
        n_tokens=groups.n,
        n_distinct=groups.n_distinct,
        shuffled=shuffle,
        provenance=session.model_facts() | session.text_facts(groups.n, n_sequences),
    )


def _vectors(
    session: Session, names: dict[tuple[str, int], str], found: Any, batch: Batch
) -> list[Tensor]:
    """Vectors [token, head, d_head] of every role and layer, in the order of ``names``."""
    vectors = []
    for (role, _), name in names.items():
        activation = found[name]
        kept = activation[batch.keep.to(activation.device)].to(session.view.compute_dtype)
        session.require_finite_tokens(name, kept)
        vectors.append(as_heads(kept[None], session.view.n_heads(role))[0].cpu())
    return vectors


class GroupSums:
    """Sums of vectors by token id, of many heads at once.

    Vectors are taken relative to the mean of the first batch, so that what is large and constant
    does not cancel the variance away.
    """

    def __init__(self, d_vocab: int) -> None:
        self.places = torch.full((d_vocab,), -1, dtype=torch.int64)
        self.n = self.n_distinct = 0
        self.counts = torch.zeros(0, dtype=torch.int64)
        self.centres: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.squares: list[Tensor] = []
        self.sizes: list[Tensor] = []

    def add(self, ids: Tensor, vectors: Sequence[Tensor]) -> None:
        """ids [token]; vectors [token, head, d_head], one tensor per role and layer."""
        if not len(ids):
            return
        fresh = ids.unique()
        fresh = fresh[self.places[fresh] < 0]
        self.places[fresh] = torch.arange(self.n_distinct, self.n_distinct + len(fresh))
        self.n_distinct += len(fresh)
        self.n += len(ids)
        self.counts = _grown(self.counts, self.n_distinct)
        self.counts += self.places[ids].bincount(minlength=self.n_distinct)
        if not self.sums:
            self.centres = [v.mean(0) for v in vectors]
            self.sums = [v.new_zeros(0, *v.shape[1:]) for v in vectors]
            self.squares = [torch.zeros(v.shape[1], dtype=torch.float64) for v in vectors]
            self.sizes = [torch.zeros(v.shape[1], dtype=torch.float64) for v in vectors]
        for number, (v, centre) in enumerate(zip(vectors, self.centres, strict=True)):
            relative = v - centre
            self.sums[number] = _grown(self.sums[number], self.n_distinct)
            self.sums[number].index_add_(0, self.places[ids], relative)
            self.squares[number] += relative.double().square().sum((0, 2))
            self.sizes[number] += v.double().square().sum((0, 2))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Share explained and total variance, each [Σ heads]."""
        shares, totals = [], []
        for sums, squares, sizes in zip(self.sums, self.squares, self.sizes, strict=True):
            wide = sums.double()
            mean = wide.sum(0).square().sum(-1) / self.n
            between = (wide.square().sum(-1) / self.counts[:, None]).sum(0)
            total = (squares - mean) / (self.n - 1)
            within = (squares - between).clamp(min=0) / (self.n - self.n_distinct)
            # A head whose vectors vary by rounding alone has nothing to explain.
            eps = torch.finfo(sums.dtype).eps
            varies = total > (16 * eps) ** 2 * sizes / self.n
            shares.append(torch.where(varies, 1 - within / total, torch.nan))
            totals.append(total)
        return torch.cat(shares), torch.cat(totals)


def _grown(values: Tensor, length: int) -> Tensor:
    """``values`` with zeros appended along the first axis."""
    more = length - len(values)
    return torch.cat([values, values.new_zeros(more, *values.shape[1:])]) if more else values

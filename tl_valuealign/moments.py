"""The second-moment engine: whatever is quadratic in a stream follows from one d × d sum of it.

‖U_kᵀ x̄‖² summed over tokens is ⟨Σ x̄ x̄ᵀ, U_k U_kᵀ⟩, and ‖x̄ A‖² likewise. So ``energy`` needs
Σ x̄x̄ᵀ/‖x̄‖², ``pooled`` and the projected squared norms need Σ x̄x̄ᵀ, and every role, head and
threshold is asked of them once, after the text has been read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_valuealign.kept import (
    UNKNOWN_REPLICATES,
    KeptTokens,
    StreamSums,
    sums_device,
    unit_rows,
)
from tl_valuealign.shapes import METRICS, StreamBatch, check_fields, typed
from tl_valuealign.spectra import Directions
from tl_valuealign.sums import RoleSums, Sums
from tl_valuealign.symmetric import UpperRows
from tl_valuealign.tokens import Batch

KINDS = ("energy", "pooled")
# Tokens this far above the median norm are summed in float64. In float32 one token of 1,000 times
# the norm would round away the sixth digit of all others; at 8 times it takes one bit or two.
HEAVY = 8.0
PLAIN_NORMS = (1e-12, 1e15)

PackedMoments = Float[Tensor, "slot packed"]
RoleDirections = Float[Tensor, "layer head d_model direction"]
RoleSpectrum = Float[Tensor, "layer head direction"]


@dataclass(frozen=True)
class Moments:
    """Second moments of every stream and all input directions: enough to ask again (CPU).

    ``energy``: Σ x̄x̄ᵀ/‖x̄‖², ``pooled``: Σ x̄x̄ᵀ, float64, in the layout of
    :class:`~tl_valuealign.symmetric.UpperRows`; slots are the sources, then the full stream of
    every layer. ``directions`` and ``singular_values`` hold every role that the model has.
    """

    energy: PackedMoments
    pooled: PackedMoments
    directions: dict[str, RoleDirections]
    singular_values: dict[str, RoleSpectrum]

    def __post_init__(self) -> None:
        check_fields(self)

    def __add__(self, other: "Moments") -> "Moments":
        """Those of both texts together."""
        return replace(self, energy=self.energy + other.energy, pooled=self.pooled + other.pooled)


class MomentSums:
    """Running second moments, ``flat`` [slot, packed] of each kind in float64."""

    def __init__(
        self,
        d_model: int,
        n_sources: int,
        n_layers: int,
        *,
        kinds: Sequence[str] = KINDS,
        device: torch.device,
    ) -> None:
        self.layout = UpperRows(d_model)
        self.kinds, self.n_sources, self.n_layers = tuple(kinds), n_sources, n_layers
        shape = (n_sources + n_layers, self.layout.packed)
        self.flat = [
            torch.zeros(shape, dtype=torch.float64, device=sums_device(device)) for _ in kinds
        ]

    @classmethod
    def of(cls, moments: Moments, d_model: int, n_sources: int) -> "MomentSums":
        """Kept moments, to be asked again."""
        n_layers = len(moments.energy) - n_sources
        sums = cls(d_model, n_sources, n_layers, kinds=(), device=torch.device("cpu"))
        sums.kinds, sums.flat = KINDS, [moments.energy, moments.pooled]
        return sums

    def kept(self, blocks: Iterable[Sequence[Directions]], roles: Sequence[str]) -> Moments:
        """Both kinds beside the directions, on the CPU."""
        heads = list(zip(*blocks, strict=True))
        directions = [torch.stack([h.directions for h in role]).cpu() for role in heads]
        spectra = [torch.stack([h.singular_values for h in role]).cpu() for role in heads]
        energy, pooled = (self.flat[self.kinds.index(kind)].cpu() for kind in KINDS)
        return Moments(
            energy,
            pooled,
            dict(zip(roles, directions, strict=True)),
            dict(zip(roles, spectra, strict=True)),
        )

    def add(self, stream: int, flat: Tensor, norms: Tensor, unit: Tensor, first: int) -> None:
        """Add x̄ [token, d_model] with its norms [token] and unit rows; ``first`` is the layer's
        place where the stream is the full one."""
        slot = stream + first if stream == self.n_sources else stream
        for kind, sums in zip(self.kinds, self.flat, strict=True):
            if kind == "energy":
                self.layout.add_outer(sums[slot], unit)
                continue
            heavy = _heavy(norms) if flat.dtype != torch.float64 else norms < 0
            if not bool(heavy.any()):
                self.layout.add_outer(sums[slot], flat)
                continue
            few = flat[heavy].to(sums)
            self.layout.add_outer(sums[slot], flat.masked_fill(heavy[:, None], 0))
            self.layout.add_outer(sums[slot], few)

    def ask(
        self,
        blocks: Iterable[Sequence[Directions]],
        roles: Sequence[str],
        upstream: Tensor,
        *,
        captured: bool = True,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Per role Σ‖U_kᵀx̄‖² in each metric's weighting [metric, threshold, stream, layer, head]
        and Σ‖x̄A‖² [stream, layer, head], on the CPU.

        NaN where ``upstream`` [source, layer] is false, and in metrics that need other moments;
        in all of them where not ``captured``. Sources stand in the order of being written, so a
        layer reads the first so many.
        """
        kinds = self.kinds if captured else ("pooled",)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for place, block in enumerate(blocks):
            count = int(upstream[:, place].sum())
            streams = [*range(count), self.n_sources]
            forms = self._forms(kinds, place, count, block, captured)
            first = 0
            for role, head in zip(roles, block, strict=True):
                if role not in found:
                    found[role] = _unknown(head, self.n_sources + 1, upstream.shape[1])
                alignment, projected = found[role]
                mine = slice(first, first + head.n_directions.shape[1])
                projected[streams, place] = forms["pooled"][:, -1, mine]
                first = mine.stop
                none = (head.n_directions == 0).cpu()[:, None]
                for kind in kinds if captured else ():
                    values = forms[kind][:, : len(none), mine].transpose(0, 1)
                    values = torch.where(none, torch.nan, values)
                    alignment[METRICS.index(kind)][:, streams, place] = values
        return found

    def _forms(
        self,
        kinds: Sequence[str],
        place: int,
        upstream: int,
        block: Sequence[Directions],
        captured: bool,
    ) -> dict[str, Tensor]:
        """Quadratic forms of one layer's streams by kind, [stream, cell, head] over all roles.

        The streams are the first ``upstream`` sources and the layer's full stream; the cells, where
        ``captured``, one for each threshold, and for "pooled" last ‖x̄A‖².
        """
        full, like = self.n_sources + place, self.flat[0]
        widest = max(head.singular_values.shape[-1] for head in block)
        directions, weights = [], []
        for head in block:
            missing = (0, widest - head.singular_values.shape[-1])
            squares = head.singular_values.square()[None]
            cells = torch.cat([_inside(head), squares]) if captured else squares
            directions.append(pad(head.directions.to(like), missing))
            weights.append(pad(cells.to(like), missing))
        groups = []
        for kind in kinds:
            sums, asked = self.flat[self.kinds.index(kind)], len(weights[0]) - (kind == "energy")
            groups += [(sums[:upstream], asked), (sums[full : full + 1], asked)]
        found = self.layout.forms(groups, torch.cat(directions), torch.cat(weights, dim=1))
        pairs = zip(kinds, found[::2], found[1::2], strict=True)
        return {kind: torch.cat(parts).clamp(min=0).cpu() for kind, *parts in pairs}


def _unknown(head: Directions, n_streams: int, n_layers: int) -> tuple[Tensor, Tensor]:
    thresholds, heads = head.n_directions.shape
    shape = (n_streams, n_layers, heads)
    alignment = torch.full((len(METRICS), thresholds, *shape), torch.nan, dtype=torch.float64)
    return alignment, torch.full(shape, torch.nan, dtype=torch.float64)


def _inside(head: Directions) -> Tensor:
    """1 for the directions within each threshold, [threshold, head, direction]."""
    rank = torch.arange(head.singular_values.shape[-1], device=head.n_directions.device)
    return (rank < head.n_directions[..., None]).to(torch.float64)


def _heavy(norms: Tensor) -> Tensor:
    low, high = PLAIN_NORMS
    return (norms > HEAVY * norms.median()) | (norms > high) | ((norms < low) & (norms > 0))


class MomentEngine:
    """Eats batches like :class:`~tl_valuealign.engines.TokenEngine`, for all but ``norm``.

    ``blocks`` are the directions of every target block, looked at only when reading is over. Keeps
    nothing per sequence, so there are no standard errors.
    """

    watch = None
    withheld = "the second-moment engine keeps no sums per sequence, so there are no intervals"

    def __init__(
        self,
        blocks: Iterable[Sequence[Directions]],
        roles: Sequence[str],
        moments: MomentSums,
        *,
        centred: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks, self.roles, self.moments = blocks, roles, moments
        self.centred, self.dtype, self.device = centred, dtype, device
        self.streams = StreamSums(moments.n_sources + 1, moments.n_layers, device)

    @property
    def n_tokens(self) -> int:
        return self.streams.n_tokens

    def start_batch(self, batch: Batch) -> None:
        """Announce the batch whose streams follow."""
        self.kept = KeptTokens(batch, centred=self.centred, dtype=self.dtype, device=self.device)
        self.streams.start_batch(self.kept)

    @typed
    def add(self, stream: int, x: StreamBatch, blocks: Sequence[int]) -> None:
        """Add one batch of a stream, which ``blocks`` (places on the layer axis) read."""
        flat, norms = self.kept.rows(x)
        self.streams.add(stream, norms, self.kept, blocks)
        self.moments.add(stream, flat, norms, unit_rows(flat, norms), blocks[0] if blocks else 0)

    def additive(self) -> list[Tensor]:
        """Every running sum: what processes add up."""
        return [*self.streams.additive(), *self.moments.flat]

    def finish(self, upstream: Tensor) -> Sums:
        """The sums, on the CPU; NaN where ``upstream`` [source, layer] is false, a head is zero,
        or second moments cannot tell."""
        found = self.moments.ask(self.blocks, self.roles, upstream)
        return self.streams.finish(
            {role: without_sequences(*sums) for role, sums in found.items()}, None
        )


def without_sequences(alignment: Tensor, projected: Tensor) -> RoleSums:
    """Sums of one role from :meth:`MomentSums.ask`: NaN wherever sequences would be told apart."""
    metrics, thresholds, _, layers, heads = alignment.shape
    unknown = torch.full_like(alignment, torch.nan)
    replicates = torch.full((2, metrics, UNKNOWN_REPLICATES, thresholds, layers, heads), torch.nan)
    return RoleSums(torch.stack([alignment, unknown, unknown]), projected, replicates)

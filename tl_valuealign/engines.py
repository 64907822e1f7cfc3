"""The per-token engine: project every stream on every head's directions and sum over tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_valuealign.shapes import METRICS, StreamBatch, typed
from tl_valuealign.sums import RoleSums, Sums
from tl_valuealign.tokens import Batch

CHUNK_TOKENS = 512
REPLICATES = 200


@dataclass(frozen=True)
class HeadDirections:
    """One role in one block: U [head, d_model, direction], s [head, direction], k per threshold."""

    directions: Tensor
    singular_values: Tensor
    n_directions: Tensor


class PackedBlock:
    """All roles' directions of one block side by side: one matrix product reads them all.

    ``columns`` [d_model, Σ directions]; squared projections times ``gather``
    [Σ directions, cell] give, per token, the captured squared norm of every (role, threshold,
    head), then ‖x̄ A‖² of every (role, head).
    """

    def __init__(self, roles: Sequence[HeadDirections], dtype: torch.dtype, device: torch.device):
        self.shapes = [tuple(role.n_directions.shape) for role in roles]
        self.zero = [role.n_directions.cpu() == 0 for role in roles]
        self.n_cells = sum(t * h for t, h in self.shapes)
        columns, captured, projected = [], [], []
        for role in roles:
            heads, d_model, width = role.directions.shape
            columns.append(role.directions.permute(1, 0, 2).reshape(d_model, -1))
            rank = torch.arange(width, device=role.n_directions.device)
            inside = rank < role.n_directions[..., None]
            own = torch.eye(heads, device=rank.device, dtype=torch.float64)
            inside = torch.einsum("thk,hg->hktg", inside.double(), own)
            captured.append(inside.reshape(heads * width, -1))
            weights = torch.einsum("hk,hg->hkg", role.singular_values.square(), own)
            projected.append(weights.reshape(heads * width, -1))
        place = {"dtype": dtype, "device": device}
        self.columns = torch.cat(columns, dim=1).to(**place)
        self.gather = torch.cat(
            [torch.block_diag(*captured), torch.block_diag(*projected)], dim=1
        ).to(**place)

    def cells(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Captured share [token, cell] and ‖x̂ A‖² [token, role head] of unit streams."""
        squared = (streams @ self.columns).square_() @ self.gather
        return squared[:, : self.n_cells], squared[:, self.n_cells :]


class TokenEngine:
    """Sums over tokens and sequences, of every stream against every block that can read it.

    Streams are numbered as ``sources`` with the full stream last. Memory does not depend on how
    many tokens are read.
    """

    metrics = METRICS

    def __init__(
        self,
        blocks: Sequence[Sequence[HeadDirections]],
        roles: Sequence[str],
        n_sources: int,
        *,
        centred: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.packs = [PackedBlock(block, dtype, device) for block in blocks]
        self.roles, self.centred, self.dtype, self.device = roles, centred, dtype, device
        # Sums stay in float64, which MPS lacks.
        self.home = torch.device("cpu") if device.type == "mps" else device
        shape = (len(METRICS), n_sources + 1, len(blocks))
        t = self.packs[0].shapes[0][0]
        heads = [h for _, h in self.packs[0].shapes]

        def zeros(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.home)

        self.alignment = [zeros(3, shape[0], t, *shape[1:], h) for h in heads]
        self.projected = [zeros(*shape[1:], h) for h in heads]
        self.replicates = [
            zeros(2, shape[0], REPLICATES, t, shape[2], h, dtype=torch.float32) for h in heads
        ]
        self.denominators = zeros(2, *shape)
        self.replicate_denominators = zeros(2, shape[0], REPLICATES, shape[2])
        self.norms = zeros(*shape[1:])
        self.n_tokens = self.n_sequences = 0

    def start_batch(self, batch: Batch) -> None:
        """Announce the batch whose streams follow."""
        kept = batch.keep.to(self.device)
        self.mask = None if bool(batch.keep.all()) else kept
        sequence = kept.nonzero()[:, 0]
        self.n_rows = len(batch.keep)
        one_hot = torch.nn.functional.one_hot(sequence, self.n_rows).T
        self.rows = one_hot.to(self.dtype).split(CHUNK_TOKENS, dim=1)
        self.membership = one_hot.to(device=self.home, dtype=torch.float64)
        self.n_tokens += len(sequence)
        self.n_sequences += int(batch.keep.any(1).sum())
        drawn = [bootstrap_weights(seed) for seed in batch.seeds]
        self.weights = torch.stack(drawn, dim=1).to(self.home)

    @typed
    def add(self, stream: int, x: StreamBatch, blocks: Sequence[int]) -> None:
        """Project one batch of a stream on the directions of ``blocks`` (places on the layer axis).

        A source's norms do not depend on the block and are summed for all of them.
        """
        flat = self._kept(x)
        norms = self._norms(flat)
        unit = _unit(flat, norms)
        exact = norms.to(self.membership)
        counted, squared = (exact > 0).to(exact), exact.square()
        per_row = torch.stack([counted, counted, squared]) @ self.membership.T
        full = stream == self.denominators.shape[2] - 1
        targets = list(blocks) if full else list(range(len(self.packs)))
        self.norms[stream, targets] += exact.sum()
        self.denominators[0, :, stream][:, targets] += per_row.sum(-1, keepdim=True)
        self.denominators[1, :, stream][:, targets] += per_row.square().sum(-1, keepdim=True)
        pair = 1 if full else 0 if stream == 0 else None
        if pair is not None:
            drawn = per_row @ self.weights.T
            self.replicate_denominators[pair][:, :, targets] += drawn[:, :, None]
        for block in blocks:
            self._project(stream, block, unit, norms, per_row, pair)

    def _project(
        self,
        stream: int,
        block: int,
        unit: Tensor,
        norms: Tensor,
        per_row: Tensor,
        pair: int | None,
    ) -> None:
        pack = self.packs[block]
        sums = torch.zeros(
            (len(METRICS), self.n_rows, pack.n_cells), dtype=torch.float64, device=self.home
        )
        projected = torch.zeros(sum(h for _, h in pack.shapes), dtype=torch.float64)
        projected = projected.to(self.home)
        largest = norms.max().clamp(min=torch.finfo(norms.dtype).tiny)
        for chunk, rows in enumerate(self.rows):
            part = slice(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
            captured, squared = pack.cells(unit[part])
            relative = (norms[part] / largest).square().to(self.dtype)
            scale = largest.to(torch.float64).square().to(self.home)
            sums[0] += (rows @ captured.sqrt()).to(sums)
            sums[1] += (rows @ captured).to(sums)
            sums[2] += ((rows * relative) @ captured).to(sums) * scale
            projected += (relative @ squared).to(projected) * scale
        at = 0
        done = 0
        for role, (t, heads) in enumerate(pack.shapes):
            mine = sums[:, :, at : at + t * heads].unflatten(-1, (t, heads))
            at += t * heads
            totals = self.alignment[role][:, :, :, stream, block]
            totals[0] += mine.sum(1)
            totals[1] += mine.square().sum(1)
            totals[2] += (mine * per_row[:, :, None, None]).sum(1)
            self.projected[role][stream, block] += projected[done : done + heads]
            done += heads
            if pair is not None:
                drawn = torch.einsum("rs,msth->mrth", self.weights, mine)
                self.replicates[role][pair, :, :, :, block] += drawn.float()

    def finish(self, upstream: Tensor) -> Sums:
        """The sums, on the CPU; NaN where ``upstream`` [source, layer] is false or a head is zero."""
        present = torch.cat([upstream, torch.ones_like(upstream[:1])])
        roles = {}
        for number, name in enumerate(self.roles):
            alignment = self.alignment[number].cpu()
            projected = self.projected[number].cpu()
            alignment[..., ~present, :] = torch.nan
            for block, pack in enumerate(self.packs):
                zero = pack.zero[number][:, None].expand(-1, len(present), -1)
                alignment[:, :, :, :, block][:, :, zero] = torch.nan
            projected[~present] = torch.nan
            roles[name] = RoleSums(alignment, projected, self.replicates[number].cpu())
        return Sums(
            roles,
            self.denominators.cpu(),
            self.replicate_denominators.cpu(),
            self.norms.cpu(),
            self.n_tokens,
            self.n_sequences,
        )

    def _kept(self, x: Tensor) -> Tensor:
        x = x.to(self.device)
        flat = x.flatten(0, 1) if self.mask is None else x[self.mask]
        if flat.dtype != torch.float64:
            flat = flat.to(self.dtype)
        return flat - flat.mean(-1, keepdim=True) if self.centred else flat

    def _norms(self, flat: Tensor) -> Tensor:
        """‖x̄‖ per token, in float64 where there is one: squares of large float32 overflow."""
        wide = flat.dtype if flat.device.type == "mps" else torch.float64
        return torch.linalg.vector_norm(flat, dim=-1, dtype=wide)


def _unit(flat: Tensor, norms: Tensor) -> Tensor:
    """x̄ / ‖x̄‖ in the dtype of x̄; zero stays zero."""
    limits = torch.finfo(flat.dtype)
    safe = torch.where(norms > 0, norms, 1)
    if bool(((safe > limits.max) | (safe < limits.tiny)).any()):
        return (flat.to(norms.dtype) / safe[:, None]).to(flat.dtype)
    return flat / safe.to(flat.dtype)[:, None]


def bootstrap_weights(seed: int) -> Tensor:
    """Exponential weights of one sequence in every replicate, float64 [replicate].

    The seed comes from the sequence's own ids, so that batches, processes, repeats and merged
    runs agree.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(REPLICATES, dtype=torch.float64).exponential_(generator=generator)

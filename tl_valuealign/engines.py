"""The per-token engine: project every stream on every head's directions and sum over tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tl_valuealign.extremes import ExtremeTracker
from tl_valuealign.kept import KeptTokens, StreamSums, sums_device, unit_rows
from tl_valuealign.moments import MomentSums
from tl_valuealign.shapes import METRICS, StreamBatch, typed
from tl_valuealign.spectra import HeadDirections
from tl_valuealign.sums import RoleSums, Sums
from tl_valuealign.tokens import Batch

# Tokens projected at a time: their projections stay in a processor's cache.
CHUNK_TOKENS = {"cpu": 512}
CHUNK_TOKENS_ELSEWHERE = 4096
REPLICATES = 200


class PackedBlock:
    """All roles' directions of one block side by side: one matrix product reads them all.

    ``rows`` [Σ directions, d_model]: of each head only as many as its largest threshold needs,
    unless ``projecting``. Squared projections times ``gather`` [Σ directions, cell] give, per
    token, the captured squared norm of every (role, threshold, head), then, where ``projecting``,
    ‖x̄ A‖² of every (role, head).
    """

    def __init__(
        self,
        roles: Sequence[HeadDirections],
        *,
        projecting: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes = [tuple(role.n_directions.shape) for role in roles]
        self.zero = [role.n_directions.cpu() == 0 for role in roles]
        rows, captured, projected = [], [], []
        for role in roles:
            heads, _, width = role.directions.shape
            rank = torch.arange(width, device=role.n_directions.device)
            inside = (rank < role.n_directions[..., None]).double()
            needed = torch.ones_like(inside[0]) if projecting else inside.amax(0)
            needed = needed.flatten().bool()
            rows.append(role.directions.mT.flatten(0, 1)[needed])
            own = torch.eye(heads, device=rank.device, dtype=torch.float64)
            captured.append(torch.einsum("thk,hg->hktg", inside, own).flatten(2).flatten(0, 1))
            projected.append(
                torch.einsum("hk,hg->hkg", role.singular_values.square(), own).flatten(0, 1)
            )
            captured[-1], projected[-1] = captured[-1][needed], projected[-1][needed]
        gather = torch.block_diag(*captured)
        if projecting:
            gather = torch.cat([gather, torch.block_diag(*projected)], dim=1)
        self.rows = torch.cat(rows).to(dtype=dtype, device=device)
        self.gather = gather.to(dtype=dtype, device=device)


class TokenEngine:
    """Sums over tokens and sequences, of every stream against every block that can read it.

    Streams are numbered as ``sources`` with the full stream last. Memory does not depend on how
    many tokens are read. ``moments`` (of kind "pooled" at least) take the projected squared norms
    over, and leave only the directions that some threshold needs. ``watch`` is shown every token
    of the embedding and of the full stream.
    """

    withheld = ""

    def __init__(
        self,
        blocks: Sequence[Sequence[HeadDirections]],
        roles: Sequence[str],
        n_sources: int,
        *,
        centred: bool,
        dtype: torch.dtype,
        device: torch.device,
        moments: MomentSums | None = None,
        watch: ExtremeTracker | None = None,
    ) -> None:
        self.blocks, self.roles, self.moments, self.watch = blocks, roles, moments, watch
        self.packs = [
            PackedBlock(block, projecting=moments is None, dtype=dtype, device=device)
            for block in blocks
        ]
        self.centred, self.dtype, self.device = centred, dtype, device
        self.home = sums_device(device)
        self.streams = StreamSums(n_sources + 1, len(blocks), device)
        self.n_cells = sum(t * h for t, h in self.packs[0].shapes)
        width = self.packs[0].gather.shape[1]
        size = (n_sources + 1, len(blocks))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=self.home)

        # Cells of all roles stand side by side, as the columns of ``gather``.
        self.alignment = zeros(3, len(METRICS), *size, self.n_cells)
        self.projected = zeros(*size, width - self.n_cells)
        self.replicates = zeros(2, len(METRICS), REPLICATES, len(blocks), self.n_cells).float()
        self.replicate_denominators = zeros(2, len(METRICS), REPLICATES, len(blocks))
        self.chunk = CHUNK_TOKENS.get(device.type, CHUNK_TOKENS_ELSEWHERE)
        widest = max(len(pack.rows) for pack in self.packs)
        self.scratch = torch.empty(self.chunk * widest, dtype=dtype, device=device)
        self.cells = torch.empty(self.chunk, len(blocks), width, dtype=dtype, device=device)

    @property
    def n_tokens(self) -> int:
        return self.streams.n_tokens

    def start_batch(self, batch: Batch) -> None:
        """Announce the batch whose streams follow."""
        self.kept = KeptTokens(batch, centred=self.centred, dtype=self.dtype, device=self.device)
        self.streams.start_batch(self.kept)
        if self.watch is not None:
            self.watch.start_batch(batch)
        member = self.kept.membership.to(dtype=self.dtype, device=self.device)
        self.members = member.split(self.chunk, dim=1)
        drawn = [bootstrap_weights(seed) for seed in batch.seeds]
        self.weights = torch.stack(drawn, dim=1).to(self.home)

    @typed
    def add(self, stream: int, x: StreamBatch, blocks: Sequence[int]) -> None:
        """Project one batch of a stream on the directions of ``blocks`` (places on the layer axis).

        A source's norms do not depend on the block and are summed for all of them.
        """
        flat, norms = self.kept.rows(x)
        per_row = self.streams.add(stream, norms, self.kept, blocks)
        unit = unit_rows(flat, norms)
        full = stream == len(self.streams.norms) - 1
        if self.moments is not None:
            self.moments.add(stream, flat, norms, unit, blocks[0] if full else 0)
        pair = 1 if full else 0 if stream == 0 else None
        sums = self._project(stream, unit, norms, blocks, pair)
        totals = self.alignment[:, :, stream]
        places = list(blocks)
        totals[0][:, places] += sums.sum(1)
        totals[1][:, places] += sums.square().sum(1)
        totals[2][:, places] += (sums * per_row[:, :, None, None]).sum(1)
        if pair is not None:
            drawn = torch.einsum("rs,msbc->mrbc", self.weights, sums)
            self.replicates[pair][:, :, places] += drawn.float()
            where = places if full else slice(None)
            drawn = (per_row @ self.weights.T)[:, :, None]
            self.replicate_denominators[pair][:, :, where] += drawn

    def _project(
        self, stream: int, unit: Tensor, norms: Tensor, blocks: Sequence[int], pair: int | None
    ) -> Tensor:
        """Σ_t of the captured share of every sequence, [metric, sequence, block, cell].

        A chunk of tokens meets all blocks before the next is read.
        """
        n_rows = len(self.members[0])
        shape = (len(METRICS), n_rows, len(blocks), self.n_cells)
        sums = torch.zeros(shape, dtype=torch.float64, device=self.home)
        largest = norms.max().clamp(min=torch.finfo(norms.dtype).tiny)
        scale = largest.to(torch.float64).square().to(self.home)
        chunks = zip(unit.split(self.chunk), norms.split(self.chunk), self.members, strict=True)
        for chunk, (rows, sizes, members) in enumerate(chunks):
            cells = self.cells[: len(rows), : len(blocks)]
            for number, block in enumerate(blocks):
                pack = self.packs[block]
                width = len(pack.rows)
                squared = self.scratch[: len(rows) * width].view(len(rows), width)
                torch.mm(rows, pack.rows.T, out=squared)
                torch.mm(squared.square_(), pack.gather, out=cells[:, number])
                if self.watch is not None and pair is not None:
                    start, shares = chunk * self.chunk, cells[:, number, : self.n_cells]
                    self.watch.offer(pair, block, start, shares)
            captured, projected = cells[..., : self.n_cells], cells[..., self.n_cells :]
            relative = (sizes / largest).square().to(self.dtype)
            sums[0] += torch.einsum("st,tbc->sbc", members, captured.sqrt()).to(sums)
            sums[1] += torch.einsum("st,tbc->sbc", members, captured).to(sums)
            sums[2] += torch.einsum("st,tbc->sbc", members * relative, captured).to(sums) * scale
            if self.moments is None:
                squares = torch.einsum("t,tbh->bh", relative, projected)
                self.projected[stream, list(blocks)] += squares.to(sums) * scale
        return sums

    def additive(self) -> list[Tensor]:
        """Every running sum: what processes add up."""
        own = [self.alignment, self.projected, self.replicates, self.replicate_denominators]
        moments = [] if self.moments is None else self.moments.flat
        return [*self.streams.additive(), *own, *moments]

    def finish(self, upstream: Tensor) -> Sums:
        """The sums, on the CPU; NaN where not ``upstream`` [source, layer] or a head is zero."""
        present = torch.cat([upstream, torch.ones_like(upstream[:1])])
        squares = {}
        if self.moments is not None:
            squares = self.moments.ask(self.blocks, self.roles, upstream, captured=False)
        roles = {}
        cell = head = 0
        for number, name in enumerate(self.roles):
            t, heads = self.packs[0].shapes[number]
            mine = slice(cell, cell + t * heads)
            alignment = self.alignment[..., mine].cpu().unflatten(-1, (t, heads))
            alignment = alignment.permute(0, 1, 4, 2, 3, 5).contiguous()
            alignment[..., ~present, :] = torch.nan
            for block, pack in enumerate(self.packs):
                zero = pack.zero[number][:, None].expand(-1, len(present), -1)
                alignment[:, :, :, :, block][:, :, zero] = torch.nan
            replicates = self.replicates[..., mine].cpu().unflatten(-1, (t, heads))
            if name in squares:
                projected = squares[name][1]
            else:
                projected = self.projected[..., head : head + heads].cpu().clone()
                projected[~present] = torch.nan
            replicates = replicates.permute(0, 1, 2, 4, 3, 5).contiguous()
            roles[name] = RoleSums(alignment, projected, replicates)
            cell, head = cell + t * heads, head + heads
        return self.streams.finish(roles, self.replicate_denominators)


def bootstrap_weights(seed: int) -> Tensor:
    """Exponential weights of one sequence in every replicate, float64 [replicate].

    The seed comes from the sequence's own ids, so that batches, processes, repeats and merged
    runs agree.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(REPLICATES, dtype=torch.float64).exponential_(generator=generator)

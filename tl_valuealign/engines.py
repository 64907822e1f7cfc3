"""The per-token engine: project every stream on every head's directions and sum over tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tl_valuealign.extremes import ExtremeTracker
from tl_valuealign.kept import KeptTokens, StreamSums, sums_device, unit_rows
from tl_valuealign.moments import MomentSums
from tl_valuealign.shapes import METRICS, StreamBatch, typed
from tl_valuealign.spectra import Directions, RebuiltDirections
from tl_valuealign.sums import RoleSums, Sums
from tl_valuealign.tokens import Batch

# Tokens projected at a time: their projections stay in a processor's cache.
CHUNK_TOKENS = {"cpu": 512}
CHUNK_TOKENS_ELSEWHERE = 4096
REPLICATES = 200


class PackedBlock:
    """All roles' directions of one block one under another: one matrix product reads them all.

    ``rows`` [Σ directions, d_model], of each head only as many as its largest threshold needs
    unless ``everything`` is wanted. ``segments`` says of every row what it adds to: thresholds
    stand ``rising``, and (role, threshold, head) holds the directions that this threshold has and
    the one before has not; with ``everything`` the rest counts as one more threshold. ``squares``
    and ``heads``: each row's squared singular value, and its head counted over all roles.
    """

    def __init__(
        self,
        roles: Sequence[Directions],
        rising: Sequence[Tensor],
        *,
        everything: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.roles, self.dtype, self.device = roles, dtype, device
        self.chosen, segments, squares, of_head = [], [], [], []
        self.n_segments = self.n_heads = 0
        for role, order in zip(roles, rising, strict=True):
            heads, width = role.singular_values.shape
            steps = len(order) + everything
            k = role.n_directions.cpu()[order, :, None]
            passed = (torch.arange(width) >= k).sum(0)
            head = torch.arange(heads)[:, None].expand_as(passed)
            segment = torch.where(passed < steps, passed * heads + head, steps * heads).flatten()
            chosen = segment.argsort(stable=True)[: int((passed < steps).sum())]
            self.chosen.append(chosen)
            segments.append(segment[chosen] + self.n_segments)
            squares.append(role.singular_values.cpu().square().flatten()[chosen])
            of_head.append(head.flatten()[chosen] + self.n_heads)
            self.n_segments += steps * heads
            self.n_heads += heads
        self.segments = torch.cat(segments).to(device)
        self.squares, self.heads = torch.cat(squares), torch.cat(of_head)
        self.n_rows = len(self.segments)
        rebuilt = any(isinstance(role, RebuiltDirections) for role in roles)
        self.held = None if rebuilt else self._rows()

    @property
    def rows(self) -> Tensor:
        return self._rows() if self.held is None else self.held

    def _rows(self) -> Tensor:
        picked = [
            role.directions.mT.flatten(0, 1)[chosen.to(role.directions.device)]
            for role, chosen in zip(self.roles, self.chosen, strict=True)
        ]
        return torch.cat(picked).to(dtype=self.dtype, device=self.device)

    def project(self, x: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """Squared projections [row, token] of x [token, d_model], in ``scratch``; their sums over
        segments in ``out`` [segment, token]."""
        squared = scratch[: self.n_rows * len(x)].view(self.n_rows, len(x))
        torch.mm(self.rows, x.T, out=squared).square_()
        out.zero_().index_add_(0, self.segments, squared)
        return squared


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
        blocks: Sequence[Sequence[Directions]],
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
        counts = [
            torch.stack([head.n_directions.cpu() for head in role]).sum((0, 2))
            for role in zip(*blocks, strict=True)
        ]
        rising = [count.argsort(stable=True) for count in counts]
        everything = moments is None
        self.packs = [
            PackedBlock(block, rising, everything=everything, dtype=dtype, device=device)
            for block in blocks
        ]
        self.centred, self.dtype, self.device = centred, dtype, device
        self.home = sums_device(device)
        self.streams = StreamSums(n_sources + 1, len(blocks), device)
        self.steps = [len(order) + everything for order in rising]
        self.heads = [head.n_directions.shape[1] for head in blocks[0]]
        self.cells = _callers_order(rising, self.steps, self.heads)
        size = (n_sources + 1, len(blocks))
        segments = self.packs[0].n_segments

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=self.home)

        self.alignment = zeros(3, len(METRICS), *size, segments)
        self.projected = zeros(*size, self.packs[0].n_heads)
        self.replicates = zeros(2, len(METRICS), REPLICATES, len(blocks), segments).float()
        self.replicate_denominators = zeros(2, len(METRICS), REPLICATES, len(blocks))
        self.chunk = CHUNK_TOKENS.get(device.type, CHUNK_TOKENS_ELSEWHERE)
        if any(pack.held is None for pack in self.packs):
            self.chunk = CHUNK_TOKENS_ELSEWHERE  # few chunks, for each rebuilds all directions
        widest = max(pack.n_rows for pack in self.packs)
        self.scratch = torch.empty(self.chunk * widest, dtype=dtype, device=device)
        self.shares = torch.empty(len(blocks) * segments * self.chunk, dtype=dtype, device=device)

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
        totals, places = self.alignment[:, :, stream], list(blocks)
        totals[0][:, places] += sums.sum(-1)
        totals[1][:, places] += sums.square().sum(-1)
        totals[2][:, places] += (sums * per_row[:, None, None]).sum(-1)
        if pair is not None:
            drawn = torch.einsum("rs,mbcs->mrbc", self.weights, sums)
            self.replicates[pair][:, :, places] += drawn.float()
            where = places if full else slice(None)
            drawn = (per_row @ self.weights.T)[:, :, None]
            self.replicate_denominators[pair][:, :, where] += drawn

    def _project(
        self, stream: int, unit: Tensor, norms: Tensor, blocks: Sequence[int], pair: int | None
    ) -> Tensor:
        """Σ_t of the captured share of every sequence, [metric, block, segment, sequence].

        A chunk of tokens meets all blocks before the next is read.
        """
        n_segments, n_rows = self.alignment.shape[-1], len(self.members[0])
        shape = (len(METRICS), len(blocks), n_segments, n_rows)
        sums = torch.zeros(shape, dtype=torch.float64, device=self.home)
        largest = norms.max().clamp(min=torch.finfo(norms.dtype).tiny)
        scale = largest.to(torch.float64).square().to(self.home)
        chunks = zip(unit.split(self.chunk), norms.split(self.chunk), self.members, strict=True)
        for chunk, (rows, sizes, members) in enumerate(chunks):
            size = len(blocks) * n_segments * len(rows)
            shares = self.shares[:size].view(len(blocks), n_segments, len(rows))
            relative = (sizes / largest).square().to(self.dtype)
            for number, block in enumerate(blocks):
                pack = self.packs[block]
                squared = pack.project(rows, shares[number], self.scratch)
                if self.moments is None:
                    each = (squared @ relative).cpu().to(torch.float64) * pack.squares
                    own = torch.zeros(pack.n_heads, dtype=torch.float64)
                    own.index_add_(0, pack.heads, each)
                    self.projected[stream, block] += own.to(self.home) * scale
            self._accumulate(shares)
            if self.watch is not None and pair is not None:
                for number, block in enumerate(blocks):
                    seen = shares[number][self.cells].T
                    self.watch.offer(pair, block, chunk * self.chunk, seen)
            sums[1] += (shares @ members.T).to(sums)
            sums[2] += (shares @ (members * relative).T).to(sums) * scale
            sums[0] += (shares.sqrt_() @ members.T).to(sums)
        return sums

    def _accumulate(self, shares: Tensor) -> None:
        """Turn what each threshold adds into what it holds, in place."""
        first = 0
        for steps, heads in zip(self.steps, self.heads, strict=True):
            role = shares[:, first : first + steps * heads].unflatten(1, (steps, heads))
            for step in range(1, steps):
                role[:, step] += role[:, step - 1]
            first += steps * heads

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
        thresholds = len(self.blocks[0][0].n_directions)
        sizes = [thresholds * heads for heads in self.heads]
        alignments = self.alignment[..., self.cells].cpu().split(sizes, dim=-1)
        replicates = self.replicates[..., self.cells].cpu().split(sizes, dim=-1)
        projections = self.projected.cpu().split(self.heads, dim=-1)
        roles = {}
        for number, name in enumerate(self.roles):
            shape = (thresholds, self.heads[number])
            alignment = alignments[number].unflatten(-1, shape).movedim(-2, 2).contiguous()
            drawn = replicates[number].unflatten(-1, shape).movedim(-2, 3).contiguous()
            zero = torch.stack([block[number].n_directions.cpu() == 0 for block in self.blocks])
            alignment[..., ~present, :] = torch.nan
            alignment.masked_fill_(zero.transpose(0, 1)[:, None], torch.nan)
            projected = projections[number].clone()
            projected[~present] = torch.nan
            if name in squares:
                projected = squares[name][1]
            roles[name] = RoleSums(alignment, projected, drawn)
        return self.streams.finish(roles, self.replicate_denominators)


def _callers_order(rising: Sequence[Tensor], steps: Sequence[int], heads: Sequence[int]) -> Tensor:
    """Segment of every (role, threshold, head) with the thresholds as the caller has them."""
    cells, first = [], 0
    for order, count, width in zip(rising, steps, heads, strict=True):
        place = order.argsort()[:, None] * width + torch.arange(width)
        cells.append(place.flatten() + first)
        first += count * width
    return torch.cat(cells)


def bootstrap_weights(seed: int) -> Tensor:
    """Exponential weights of one sequence in every replicate, float64 [replicate].

    The seed comes from the sequence's own ids, so that batches, processes, repeats and merged
    runs agree.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(REPLICATES, dtype=torch.float64).exponential_(generator=generator)

"""The machine behind ``substitute_input``: replacement streams, and head vectors made of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tl_valuealign.adapter import HEAD_HOOKS
from tl_valuealign.editing import Edit, next_token_losses
from tl_valuealign.errors import InputError, SelfCheckError
from tl_valuealign.parts import HeadReader, head_readers
from tl_valuealign.result import FULL
from tl_valuealign.selfcheck import TOLERANCES, probe
from tl_valuealign.session import Session
from tl_valuealign.shapes import COMPONENTS
from tl_valuealign.streams import EMBED, MIXER, POS_EMBED, StreamPlan
from tl_valuealign.tokens import Batch

MEAN, RANDOM = "mean", "random"
# A token's loss may move this many tolerances when every head gets its own input back.
LOSS_TOLERANCES = 10.0


class Substitution:
    """Makes the edits that give heads the ``source`` as their input.

    Raises ``InputError`` for a source that is unknown or not upstream of a target block.
    """

    def __init__(
        self, session: Session, source: str, heads: tuple[int, ...] | None, seed: int
    ) -> None:
        self.session, self.view, self.layers = session, session.view, session.layers
        self.source, self.heads, self.seed = source, heads, seed
        self.plan = StreamPlan(session.view, (*COMPONENTS, MIXER), session.layers)
        self._require_upstream(source)
        self.readers = head_readers(session)
        self.means: dict[int, Tensor] = {}

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Measure what the source needs to know about the whole text: the mean normed stream."""
        if self.source != MEAN:
            return
        n = 0
        sums: dict[int, Tensor] = {}
        for batch in batches:
            n += int(batch.keep.sum())
            for layer, stream in self._read(batch.ids, FULL).items():
                normed = self._reader(layer).normed(stream)[batch.keep.to(stream.device)]
                summed = normed.sum(0, dtype=torch.float64).cpu()
                sums[layer] = sums[layer] + summed if layer in sums else summed
        self.session.require_tokens(n)
        self.means = {layer: summed / n for layer, summed in sums.items()}

    def prove(self) -> float:
        """Give all heads their own input back, then a random one, on seeded random ids.

        Returns the largest change of a token's loss under the first; raises ``SelfCheckError`` if
        that is more than rounding, or if the second changes nothing.
        """
        ids, keep = probe(self.view)
        batch = Batch(ids, keep, (self.seed,))
        plain = next_token_losses(self.view, ids, {})
        moved = {}
        for source in (FULL, RANDOM):
            edits = self.edits(keep, self.streams(batch, source), self.layers, self.heads)
            moved[source] = float((next_token_losses(self.view, ids, edits) - plain).abs().max())
        tolerance = LOSS_TOLERANCES * TOLERANCES[self.view.dtype]
        roles = ", ".join(self.session.roles)
        if not moved[FULL] <= tolerance:
            raise SelfCheckError(
                f"roles {roles}: giving every head its own input back changes a token's loss by "
                f"{moved[FULL]:.2g} nats (tolerance {tolerance:g}), so substituted losses would "
                f"mean nothing; a hook of yours edits the heads, or this release of "
                f"transformer-lens does not take edited heads at {HEAD_HOOKS[roles[0]]}"
            )
        if moved[RANDOM] == 0:
            raise SelfCheckError(
                f"roles {roles}: random inputs change no loss at all, so edits at "
                f"{HEAD_HOOKS[roles[0]]} do not reach the computation in this architecture"
            )
        return moved[FULL]

    def streams(self, batch: Batch, source: str | None = None) -> dict[int, Tensor]:
        """Normed replacement input [sequence, position, d_model] of every target block."""
        source = self.source if source is None else source
        if source == MEAN:
            shape = (*batch.ids.shape, self.view.d_model)
            dtype = self.view.compute_dtype
            return {la: self.means[la].to(dtype).expand(shape) for la in self.layers}
        found = self._read(batch.ids, FULL if source == RANDOM else source)
        streams = {}
        for layer in self.layers:
            normed = self._reader(layer).normed(found[layer])
            streams[layer] = self._random(normed, batch, layer) if source == RANDOM else normed
        return streams

    def edits(
        self,
        keep: Tensor,
        streams: Mapping[int, Tensor],
        layers: Sequence[int],
        heads: tuple[int, ...] | None,
    ) -> dict[str, Edit]:
        """Edits of hook_q/k/v that put the streams in place of the heads' own input."""
        return {
            self.view.hook(layer, HEAD_HOOKS[role]): _replace(
                readers[layer], streams[layer], keep, heads
            )
            for role, readers in self.readers.items()
            for layer in layers
        }

    def _reader(self, layer: int) -> HeadReader:
        return next(iter(self.readers.values()))[layer]

    def _require_upstream(self, source: str) -> None:
        if source in (FULL, MEAN, RANDOM):
            return
        labels = self.plan.labels
        if source not in labels:
            raise InputError(
                f"source {source!r} is unknown; use {EMBED!r}, {FULL!r}, {MEAN!r}, {RANDOM!r} or "
                f"an output upstream of every layer, such as {labels[-1]!r}"
            )
        late = ~self.plan.upstream[labels.index(source)]
        if bool(late.any()):
            layer = self.layers[int(late.nonzero()[0])]
            raise InputError(
                f"source {source!r} is not upstream of block {layer}; choose later blocks with "
                f"layers=..."
            )

    def _read(self, ids: Tensor, source: str) -> dict[int, Tensor]:
        """Activations [sequence, position, d_model] that the source is, by target block."""
        view = self.view
        if source == FULL:
            names = {layer: view.resid_pre(layer) for layer in self.layers}
        elif source == EMBED:
            names = dict.fromkeys(self.layers, view.resid_pre(0))
        elif source == POS_EMBED:
            names = dict.fromkeys(self.layers, "hook_pos_embed")
        else:
            names = dict.fromkeys(self.layers, self.plan.hooks[source][1])
        wanted = list(dict.fromkeys(names.values()))
        if source == EMBED and view.adds_positions:
            wanted.append("hook_pos_embed")
        found, _ = view.run(ids, wanted, stop_at_layer=max(self.layers) + 1)
        streams = {layer: found[name] for layer, name in names.items()}
        if source == EMBED and view.adds_positions:
            streams = {la: stream - found["hook_pos_embed"] for la, stream in streams.items()}
        return streams

    def _random(self, normed: Tensor, batch: Batch, layer: int) -> Tensor:
        """Gaussian directions of each token's own length; the same whatever the batches."""
        rows = []
        for own in batch.seeds:
            mixed = (own * 1_000_003 + self.seed * 7_919 + layer) % 2**63
            generator = torch.Generator().manual_seed(mixed)
            rows.append(torch.randn(normed.shape[1:], generator=generator, dtype=torch.float32))
        drawn = self._reader(layer).norm.centre(torch.stack(rows).to(normed))
        return drawn * (normed.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True))


def _replace(
    reader: HeadReader, normed: Tensor, keep: Tensor, heads: tuple[int, ...] | None
) -> Edit:
    """An edit that puts the reader's vectors of ``normed`` in place at kept tokens."""

    def edit(activation: Tensor) -> Tensor:
        count = len(reader.bias)
        wide = activation.unflatten(-1, (count, -1)) if activation.ndim == 3 else activation
        repeat = wide.shape[-2] // count
        vectors = reader.vectors(normed).repeat_interleave(repeat, dim=-2).to(wide)
        chosen = torch.ones(count, dtype=torch.bool)
        if heads is not None:
            chosen = torch.zeros(count, dtype=torch.bool).index_fill(0, torch.tensor(heads), True)
        where = keep[:, :, None] & chosen.repeat_interleave(repeat)
        changed = torch.where(where[..., None].to(wide.device), vectors, wide)
        return changed.reshape(activation.shape)

    return edit

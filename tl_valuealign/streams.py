"""Which hooks carry which source, and the streams of one batch in the order of being written."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tl_valuealign.adapter import ModelView
from tl_valuealign.shapes import COMPONENTS
from tl_valuealign.tokens import Batch

EMBED, POS_EMBED, MIXER = "embed", "pos_embed", "mixer_out"


def written_before(labels: Sequence[str], layers: Sequence[int]) -> Tensor:
    """Whether each source is in the stream before each block, bool [source, layer]."""
    blocks = [-1 if label in (EMBED, POS_EMBED) else int(label.split("_")[0]) for label in labels]
    return torch.tensor([[block < layer for layer in layers] for block in blocks])


class StreamPlan:
    """The sources upstream of the target blocks, and how to read them.

    ``labels``: TransformerLens's own, "embed", "pos_embed" where there is one, "0_attn_out", ….
    ``upstream`` [source, layer]: whether a source is written before a target block.
    """

    def __init__(self, view: ModelView, components: Sequence[str], layers: Sequence[int]) -> None:
        self.view, self.layers, self.last = view, tuple(layers), max(layers)
        hooks: dict[str, tuple[int, str]] = {}
        for block in range(self.last):
            for name in view.writes(block):
                # Blocks without attention write through a mixer's output instead.
                component = name.rpartition("hook_")[2]
                component = component if component in COMPONENTS else MIXER
                if component in components:
                    hooks[f"{block}_{component}"] = (block, name)
        self.hooks = hooks
        first = [EMBED, POS_EMBED] if view.adds_positions else [EMBED]
        self.labels = (*first, *hooks)
        self.upstream = written_before(self.labels, layers)

    @property
    def names(self) -> list[str]:
        """Every hook whose activation :meth:`read` hands out."""
        view = self.view
        reads = [view.resid_pre(layer) for layer in (0, *self.layers)]
        positions = ["hook_pos_embed"] if view.adds_positions else []
        return list(dict.fromkeys([*reads, *(name for _, name in self.hooks.values()), *positions]))

    def read(
        self, batch: Batch, cached: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[int, Tensor, list[int]]]:
        """Run the model once; per stream its number (the full stream is last), its activations
        [sequence, position, d_model] and the places on the layer axis that read it.

        ``cached``: the activations of :attr:`names`, which then are read without running the
        model. Each activation is let go as soon as it has been handed out.
        """
        view, last = self.view, self.last
        if cached is None:
            names = [name for name in self.names if name != view.resid_pre(last)]
            found, stopped = view.run(batch.ids, names, stop_at_layer=last)
            cache = dict(found)
            if stopped is not None:
                cache[view.resid_pre(last)] = stopped
            del found, stopped
        else:
            cache = dict(cached)
        embed = cache[view.resid_pre(0)]
        if view.adds_positions:
            positions = cache.pop("hook_pos_embed")
            embed = embed - positions
            yield 1, positions, self._readers(1)
        yield 0, embed, self._readers(0)
        del embed
        full = len(self.labels)
        for place, layer in enumerate(self.layers):
            yield full, cache.pop(view.resid_pre(layer)), [place]
        for number, label in enumerate(self.labels):
            if label in self.hooks:
                yield number, cache.pop(self.hooks[label][1]), self._readers(number)

    def _readers(self, number: int) -> list[int]:
        return self.upstream[number].nonzero()[:, 0].tolist()

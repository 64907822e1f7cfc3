"""Running sums behind ``contribution_shares``: what each source adds to each head's vectors."""

import torch
from torch import Tensor

from tl_valuealign.intervals import RatioSums
from tl_valuealign.parts import HeadReader
from tl_valuealign.session import Session
from tl_valuealign.streams import StreamPlan
from tl_valuealign.tokens import Batch


class ShareMeter:
    """Sums over sequences of ⟨v_s, v⟩ and ⟨v, v⟩; memory does not grow with the text."""

    def __init__(
        self, session: Session, plan: StreamPlan, readers: dict[str, dict[int, HeadReader]]
    ) -> None:
        self.session, self.plan, self.readers = session, plan, readers
        self.shares = {role: [RatioSums() for _ in plan.layers] for role in readers}
        self.cosine = [RatioSums() for _ in plan.layers]
        self.pull = RatioSums()
        self.kept = RatioSums()
        self.n_tokens = self.n_sequences = 0

    def add(self, batch: Batch) -> None:
        counts = batch.keep.sum(1)
        rows = [n for n in counts.tolist() if n]
        self.n_tokens += sum(rows)
        self.n_sequences += len(rows)
        if not rows:
            return
        sources, full = self._streams(batch)
        self._embedding(sources, full, rows)
        for place, stream in enumerate(full):
            layer = self.plan.layers[place]
            scale = self.session.verified.norms[layer].scale(stream)
            upstream = sources[self.plan.upstream[:, place].to(sources.device)]
            for role, readers in self.readers.items():
                self._add_role(role, place, readers[layer], upstream, stream / scale, scale, rows)

    def _add_role(
        self,
        role: str,
        place: int,
        reader: HeadReader,
        upstream: Tensor,
        normed: Tensor,
        scale: Tensor,
        rows: list[int],
    ) -> None:
        matrices, bias = reader.matrices().to(normed), reader.bias.to(normed)
        written = self.plan.upstream[:, place]
        shape = (len(rows), len(written) + 1, len(matrices))
        products = torch.zeros(shape, dtype=torch.float64)
        squares = torch.zeros(len(rows), 1, len(matrices), dtype=torch.float64)
        # One sequence at a time: A v is d_model numbers for every head and token.
        for number, part in enumerate(_split(rows)):
            vectors = torch.einsum("td,hdk->thk", normed[part], matrices) + bias
            back = torch.einsum("thk,hdk->tdh", vectors, matrices) / scale[part, :, None]
            shared = upstream[:, part].flatten(1) @ back.flatten(0, 1)
            products[number, :-1][written] = shared.double().cpu()
            products[number, -1] = torch.einsum("thk,hk->h", vectors, bias).double().cpu()
            squares[number, 0] = vectors.double().square().sum((0, 2)).cpu()
        self.shares[role][place].add(products, squares)

    def _streams(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """x̄ of kept tokens, upcast: sources [source, token, d_model], full [token, d_model]s."""
        norm = next(iter(self.session.verified.norms.values()))
        dtype, place = self.session.view.compute_dtype, self.session.place
        keep = batch.keep.to(place)
        found: list[Tensor | None] = [None] * len(self.plan.labels)
        full: list[Tensor] = []
        for number, activation, _ in self.plan.read(batch):
            stream = norm.centre(activation.to(place)[keep].to(dtype))
            what = [*self.plan.labels, "the full stream"][number]
            self.session.require_finite_tokens(what, stream)
            if number == len(found):
                full.append(stream)
            else:
                found[number] = stream
        return torch.stack([stream for stream in found if stream is not None]), full

    def _embedding(self, sources: Tensor, full: list[Tensor], rows: list[int]) -> None:
        embed = sources[0]
        counts = torch.tensor(rows, dtype=torch.float64)
        squared = embed.double().square().sum(-1)
        usable = squared > 0
        pulls = torch.einsum("std,td->ts", sources.double(), embed.double()) / squared[:, None]
        keeps = torch.stack([(x.double() * embed).sum(-1) for x in full], 1) / squared[:, None]
        for total, values in ((self.pull, pulls), (self.kept, keeps)):
            values = torch.where(usable[:, None], values, 0.0).cpu()
            summed = torch.stack([values[part].sum(0) for part in _split(rows)])
            counted = torch.stack([usable[part].sum() for part in _split(rows)]).cpu()
            total.add(summed, counted.double()[:, None])
        for total, stream in zip(self.cosine, full, strict=True):
            rest = (stream - embed).double()
            cosine = torch.nn.functional.cosine_similarity(rest, embed.double(), dim=-1).cpu()
            # Before anything is written the rest is rounding, and has no direction.
            size = rest.norm() / stream.double().norm()
            enough = float(size) > 1e-6
            summed = torch.stack([cosine[part].sum() for part in _split(rows)])
            total.add(summed[:, None], counts[:, None] * enough)


def _split(rows: list[int]) -> list[slice]:
    """Places of every sequence's tokens among the kept ones."""
    ends = torch.tensor(rows).cumsum(0).tolist()
    return [slice(end - n, end) for n, end in zip(rows, ends, strict=True)]

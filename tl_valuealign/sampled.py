"""Evenly drawn tokens of every stream, and how they score with nested subspaces."""

import torch
from torch import Tensor

from tl_valuealign.result import FULL
from tl_valuealign.streams import StreamPlan
from tl_valuealign.tokens import Batch


class Sampled:
    """A stream's sampled tokens, and how they score with nested subspaces."""

    def __init__(self, tokens: Tensor, metric: str) -> None:
        norms = tokens.double().norm(dim=-1)
        present = norms > 0
        self.unit = (tokens[present].double() / norms[present, None]).to(tokens.dtype)
        lengths = norms[present]
        weights = lengths.square() if metric == "pooled" else torch.ones_like(lengths)
        self.weights = weights / weights.sum()
        self.metric = metric

    def scores(self, directions: Tensor) -> Tensor:
        """Alignment with the first k of [..., d_model, direction], for every k: [..., k].

        NaN for a head without directions.
        """
        squared = (self.unit @ directions.cpu().to(self.unit)).double().square().cumsum(-1)
        captured = squared.sqrt() if self.metric == "norm" else squared
        scores = torch.einsum("...tk,t->...k", captured, self.weights)
        empty = directions.cpu().abs().sum((-2, -1)) == 0
        return torch.where(empty[..., None], torch.nan, scores)

    def random_subspace(self, most: int, generator: torch.Generator, *, centred: bool) -> Tensor:
        """Scores by k [direction] of a subspace drawn through the covariance of unit tokens, or
        their second moment where they are not ``centred``.

        Gaussian sums of the tokens are draws from N(0, Σ x̂x̂ᵀ), without that matrix being formed.
        """
        unit = self.unit.double()
        unit = unit - unit.mean(0) if centred else unit
        mixing = torch.randn(len(self.unit), most, generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(unit.T @ mixing).Q
        padded = torch.nn.functional.pad(basis, (0, most - basis.shape[1]))
        return self.scores(padded)


class Reservoir:
    """The same evenly drawn tokens of every stream, whatever the batches (seeded by the text)."""

    def __init__(self, size: int) -> None:
        self.size, self.n_seen = size, 0
        self.keys = torch.zeros(0, dtype=torch.float64)
        self.held: dict[tuple[str, int], Tensor] = {}

    @property
    def n_held(self) -> int:
        return len(self.keys)

    def add(self, batch: Batch, streams: dict[tuple[str, int], Tensor]) -> None:
        """streams: [token, d_model] each, the batch's kept tokens."""
        keys = []
        for own, kept in zip(batch.seeds, batch.keep, strict=True):
            generator = torch.Generator().manual_seed(own)
            keys.append(torch.rand(len(kept), generator=generator, dtype=torch.float64)[kept])
        everything = torch.cat([self.keys, *keys])
        self.n_seen += len(everything) - len(self.keys)
        chosen = everything.argsort(stable=True)[: self.size].sort().values
        self.keys = everything[chosen]
        for key, stream in streams.items():
            before = self.held.get(key, stream[:0])
            self.held[key] = torch.cat([before, stream])[chosen]

    def streams(self, plan: StreamPlan, label: str) -> list[tuple[list[int], Tensor]]:
        """(places that read it, tokens) of every stream of this label."""
        if label == FULL:
            return [([place], self.held[FULL, place]) for place in range(len(plan.layers))]
        places = plan.upstream[plan.labels.index(label)].nonzero()[:, 0].tolist()
        return [(places, self.held[label, 0])] if places else []

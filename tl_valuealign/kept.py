"""The part of a batch that counts: kept tokens as plain rows, and the sums both engines share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tl_valuealign.shapes import METRICS
from tl_valuealign.sums import RoleSums, Sums
from tl_valuealign.tokens import Batch

UNKNOWN_REPLICATES = 2  # the fewest that have a spread, here NaN


class KeptTokens:
    """Which tokens of one batch count, and to which sequence each belongs.

    ``membership`` [sequence, token], float64: 1 where a kept token belongs to a sequence.
    """

    def __init__(
        self, batch: Batch, *, centred: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.centred, self.dtype, self.device = centred, dtype, device
        kept = batch.keep.to(device)
        self.mask = None if bool(batch.keep.all()) else kept
        self.n_sequences = int(batch.keep.any(1).sum())
        sequence = kept.nonzero()[:, 0]
        self.n_tokens = len(sequence)
        one_hot = torch.nn.functional.one_hot(sequence, len(batch.keep)).T
        self.membership = one_hot.to(device=sums_device(device), dtype=torch.float64)

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x̄ [token, d_model] of the kept tokens in the dtype of computation, and ‖x̄‖ [token].

        The norms are float64 where the device has it: squares of large float32 overflow.
        """
        x = x.to(self.device)
        flat = x.flatten(0, 1) if self.mask is None else x[self.mask]
        if flat.dtype != torch.float64:
            flat = flat.to(self.dtype)
        if self.centred:
            flat = flat - flat.mean(-1, keepdim=True)
        wide = flat.dtype if flat.device.type == "mps" else torch.float64
        return flat, torch.linalg.vector_norm(flat, dim=-1, dtype=wide)


class StreamSums:
    """What every engine sums whatever its method: norms, and the denominators of every metric.

    Streams are numbered as sources with the full stream last; a source's sums do not depend on
    the layer and stand in all of them. ``count``: tokens and sequences.
    """

    def __init__(self, n_streams: int, n_layers: int, device: torch.device) -> None:
        place = sums_device(device)
        shape = (2, len(METRICS), n_streams, n_layers)
        self.denominators = torch.zeros(shape, dtype=torch.float64, device=place)
        self.norms = torch.zeros(shape[2:], dtype=torch.float64, device=place)
        self.count = torch.zeros(2, dtype=torch.float64)

    @property
    def n_tokens(self) -> int:
        return int(self.count[0])

    def start_batch(self, kept: KeptTokens) -> None:
        self.count += torch.tensor([kept.n_tokens, kept.n_sequences], dtype=torch.float64)

    def add(self, stream: int, norms: Tensor, kept: KeptTokens, layers: Sequence[int]) -> Tensor:
        """Sum the norms of one batch; the batch's own denominators [metric, sequence]."""
        exact = norms.to(kept.membership)
        counted = (exact > 0).to(exact)
        per_row = torch.stack([counted, counted, exact.square()]) @ kept.membership.T
        full = stream == len(self.norms) - 1
        where = list(layers) if full else slice(None)
        self.norms[stream, where] += exact.sum()
        self.denominators[0, :, stream][:, where] += per_row.sum(-1, keepdim=True)
        self.denominators[1, :, stream][:, where] += per_row.square().sum(-1, keepdim=True)
        return per_row

    def additive(self) -> list[Tensor]:
        """Every running sum: what processes add up."""
        return [self.denominators, self.norms, self.count]

    def finish(self, roles: dict[str, RoleSums], replicate_denominators: Tensor | None) -> Sums:
        """Everything summed, on the CPU; without replicates NaN stands for them."""
        if replicate_denominators is None:
            shape = (2, len(METRICS), UNKNOWN_REPLICATES, self.norms.shape[1])
            replicate_denominators = torch.full(shape, torch.nan, dtype=torch.float64)
        return Sums(
            roles,
            self.denominators.cpu(),
            replicate_denominators.cpu(),
            self.norms.cpu(),
            self.n_tokens,
            int(self.count[1]),
        )


def sums_device(device: torch.device) -> torch.device:
    """Where sums live: they stay in float64, which MPS lacks."""
    return torch.device("cpu") if device.type == "mps" else device


def unit_rows(flat: Tensor, norms: Tensor) -> Tensor:
    """x̄ / ‖x̄‖ in the dtype of x̄; zero stays zero."""
    limits = torch.finfo(flat.dtype)
    safe = torch.where(norms > 0, norms, 1)
    if bool(((safe > limits.max) | (safe < limits.tiny)).any()):
        return (flat.to(norms.dtype) / safe[:, None]).to(flat.dtype)
    return flat / safe.to(flat.dtype)[:, None]

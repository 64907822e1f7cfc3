"""What one pass over text leaves behind: sums that add, and the figures that follow from them.

Every figure is a ratio of two sums over sequences, ``Σ_s a_s / Σ_s b_s``: a_s sums a token's value
over sequence s, b_s counts its tokens (``norm``, ``energy``) or sums their squared norms
(``pooled``). Keeping Σa, Σa², Σab, Σb, Σb² is enough for the figure and for its standard error
with sequences as the independent units, and it makes runs over different text addable.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_valuealign.intervals import MIN_SEQUENCES, effective_sequences, ratio_stderr
from tl_valuealign.shapes import METRICS, check_fields

# Axis names: "stream" is the source axis with the full stream as its last row.
AlignmentSums = Float[Tensor, "moment metric threshold stream layer head"]
ProjectedSums = Float[Tensor, "stream layer head"]
ReplicateSums = Float[Tensor, "pair metric replicate threshold layer head"]
Denominators = Float[Tensor, "square metric stream layer"]
ReplicateDenominators = Float[Tensor, "pair metric replicate layer"]
PerStream = Float[Tensor, "stream layer"]

__all__ = ["MIN_SEQUENCES", "RoleSums", "Sums"]


@dataclass(frozen=True)
class RoleSums:
    """Sums of one role over all kept tokens, float64 on the CPU.

    ``alignment``: Σa, Σa², Σab along ``moment``. ``projected``: Σ_t ‖x̄_t A‖².
    ``replicates``: Σ_s w_rs a_s for the embedding (pair 0) and the full stream (pair 1), with
    exponential bootstrap weights w_rs, in every metric (the Bayesian bootstrap of Rubin 1981).
    """

    alignment: AlignmentSums
    projected: ProjectedSums
    replicates: ReplicateSums

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Sums:
    """Everything additive that a run measured.

    ``denominators``: Σb and Σb² along ``square``. ``norms``: Σ_t ‖x̄_t‖.
    ``replicate_denominators``: Σ_s w_rs b_s for embedding and full stream.
    Where an engine keeps nothing per sequence, Σa², Σab, Σb² and the replicates are NaN.
    """

    roles: dict[str, RoleSums]
    denominators: Denominators
    replicate_denominators: ReplicateDenominators
    norms: PerStream
    n_tokens: int
    n_sequences: int

    def __post_init__(self) -> None:
        check_fields(self)

    def __add__(self, other: "Sums") -> "Sums":
        return _combine(self, other)

    def mean_norms(self) -> Tensor:
        """mean_t ‖x̄_t‖, [stream, layer]."""
        return self.norms / self.n_tokens

    def projected(self, role: str) -> Tensor:
        """mean_t ‖x̄_t A‖², [stream, layer, head]."""
        return self.roles[role].projected / self.n_tokens

    def zero_norm_tokens(self) -> Tensor:
        """Tokens left out because x̄ was zero there, [stream, layer]."""
        return self.n_tokens - self.denominators[0, METRICS.index("norm")]

    def alignment(self, role: str, metric: str) -> Tensor:
        """The figure itself, [threshold, stream, layer, head]; NaN where nothing was summed."""
        m = METRICS.index(metric)
        return self.roles[role].alignment[0, m] / self.denominators[0, m][None, :, :, None]

    def stderr(self, role: str, metric: str) -> Tensor:
        """Linearised standard error of the ratio over sequences, [threshold, stream, layer, head].

        NaN with fewer than ``MIN_SEQUENCES`` sequences (Cochran 1977, Sampling Techniques, §2.11).
        """
        m = METRICS.index(metric)
        first, second, cross = self.roles[role].alignment[:, m]
        b, bb = self.denominators[:, m, :, :, None]
        return ratio_stderr(first, second, cross, b, bb, self.n_sequences)

    def effective_sequences(self, metric: str) -> Tensor:
        """How many sequences of equal weight the text is worth, [stream, layer]."""
        b, bb = self.denominators[:, METRICS.index(metric)]
        return effective_sequences(b, bb)

    def excess(self, role: str, metric: str) -> tuple[Tensor, Tensor]:
        """Full stream minus embedding and its paired bootstrap standard error.

        Both [threshold, layer, head]. One set of resampled sequences serves both streams, so
        what they share cancels. The error is NaN with fewer than ``MIN_SEQUENCES`` sequences.
        """
        alignment = self.alignment(role, metric)
        difference = alignment[:, -1] - alignment[:, 0]
        if self.n_sequences < MIN_SEQUENCES:
            return difference, torch.full_like(difference, torch.nan)
        spread = self.excess_replicates(role, metric).std(dim=0, correction=1)
        return difference, spread * self.bootstrap_factor

    def excess_replicates(self, role: str, metric: str) -> Tensor:
        """Full − embedding of every resampled text, [replicate, threshold, layer, head]."""
        m = METRICS.index(metric)
        weights = self.replicate_denominators[:, m, :, None, :, None]
        replicates = self.roles[role].replicates[:, m] / weights
        return replicates[1] - replicates[0]

    @property
    def bootstrap_factor(self) -> float:
        """Standard error over the spread of replicates.

        Dirichlet weights give a mean the variance Σ(x − x̄)² / (n (n + 1)), sampling n (n − 1).
        """
        n = self.n_sequences
        return ((n + 1) / (n - 1)) ** 0.5


def _combine(left: Any, right: Any) -> Any:
    if isinstance(left, dict):
        return {key: _combine(left[key], right[key]) for key in left}
    if isinstance(left, (Sums, RoleSums)):
        return type(left)(
            **{
                field.name: _combine(getattr(left, field.name), getattr(right, field.name))
                for field in fields(left)
            }
        )
    return left + right

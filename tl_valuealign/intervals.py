"""How sure: standard errors and intervals of ratios of sums, with sequences as the units.

Tokens of one sequence depend on each other, so a figure r = Σ_s a_s / Σ_s b_s over sequences s has
the linearised standard error √((m+1)/(m−1) Σ_s (a_s − r b_s)²) / Σ_s b_s (Cochran 1977, Sampling
Techniques, §2.11), and its interval uses Student's t with m − 1 degrees of freedom, where
m = (Σb)²/Σb² is the number of sequences that equal weights would need to say as much (Kish 1965).
The factor is m/(m−1) for equal sequences; long ones also pull r towards themselves, which shrinks
their residuals once more by about as much. It is the factor of the Bayesian bootstrap too.
Keeping Σa, Σa², Σab, Σb and Σb² is enough, so memory does not grow with the text.
"""

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from tl_valuealign.errors import InputError

MIN_SEQUENCES = 8


def withheld(n_sequences: int) -> str:
    """Why there are no intervals, in plain words; empty where there are."""
    if n_sequences >= MIN_SEQUENCES:
        return ""
    return f"intervals withheld: {n_sequences} sequences, fewer than {MIN_SEQUENCES}"


def effective_sequences(b: Tensor, bb: Tensor) -> Tensor:
    """m = (Σb)²/Σb², from 1 (one sequence holds all the weight) to the number of sequences."""
    return b.square() / bb


def ratio_stderr(
    first: Tensor, second: Tensor, cross: Tensor, b: Tensor, bb: Tensor, n_sequences: int
) -> Tensor:
    """Standard error of Σa/Σb from Σa, Σa², Σab, Σb and Σb², which broadcast.

    NaN with fewer than ``MIN_SEQUENCES`` sequences.
    """
    if n_sequences < MIN_SEQUENCES:
        return torch.full_like(first, torch.nan)
    ratio = first / b
    scatter = (second - 2 * ratio * cross + ratio.square() * bb).clamp(min=0)
    m = effective_sequences(b, bb)
    return (scatter * ((m + 1) / (m - 1))).sqrt() / b.abs()


def half_width(stderr: Tensor, effective: Tensor | float, level: float = 0.95) -> Tensor:
    """Half of the interval that covers the truth in ``level`` of texts; NaN where stderr is.

    ``effective``: :func:`effective_sequences`. Raises ``InputError`` for a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise InputError(f"level: {level!r} is no share of texts in (0, 1); 0.95 is usual")
    freedom = np.maximum(np.asarray(effective, dtype=np.float64) - 1, 1e-3)
    return stderr * torch.as_tensor(stats.t.ppf((1 + level) / 2, df=freedom))


class RatioSums:
    """Running sums of figures Σ_s a_s / Σ_s b_s, float64.

    ``a`` and ``b`` come per sequence, [sequence, ...], with shapes that broadcast.
    """

    def __init__(self) -> None:
        self.n_sequences = 0
        self._sums: list[Tensor] = []

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add sequences; those whose b is zero everywhere do not count as sequences."""
        a, b = a.double().cpu(), b.double().cpu()
        counted = (b != 0).flatten(1).any(1) if b.ndim > 1 else b != 0
        a, b = a[counted], b[counted]
        self.n_sequences += len(b)
        parts = [a.sum(0), a.square().sum(0), (a * b).sum(0), b.sum(0), b.square().sum(0)]
        if self._sums:
            parts = [total + part for total, part in zip(self._sums, parts, strict=True)]
        self._sums = parts

    def ratio(self) -> Tensor:
        """The figure; NaN where Σb is zero. Raises ``InputError`` if nothing was added."""
        if not self._sums:
            raise InputError("no sequence was read")
        a, b = self._sums[0], self.denominator()
        return torch.where(b != 0, a / b, torch.nan)

    def denominator(self) -> Tensor:
        """Σb."""
        return self._sums[3]

    def stderr(self) -> Tensor:
        """Its standard error; NaN with fewer than ``MIN_SEQUENCES`` sequences."""
        ratio = self.ratio()
        a, aa, ab, b, bb = self._sums
        error = ratio_stderr(a, aa, ab, b, bb, self.n_sequences)
        return torch.where(ratio.isnan(), torch.nan, error)

    def half_width(self, level: float = 0.95) -> Tensor:
        """Half of the interval that covers the truth in ``level`` of texts."""
        effective = effective_sequences(self._sums[3], self._sums[4])
        return half_width(self.stderr(), effective, level)

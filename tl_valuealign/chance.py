"""What alignment a stream would have with a head if it pointed in a random direction."""

import torch

from tl_valuealign.errors import InputError
from tl_valuealign.shapes import METRICS, PerThreshold, ThresholdCounts, typed


@typed
def chance_alignment(n_directions: ThresholdCounts, readable_dim: int, metric: str) -> PerThreshold:
    """Expected alignment of a uniformly random direction, float64, [threshold, layer, head].

    With k directions in a readable space of dimension d' (d_model, less one under LayerNorm) the
    captured share of squared norm is Beta(k/2, (d'-k)/2): its mean is k/d' (``energy``,
    ``pooled``) and the mean of its square root is Γ((k+1)/2) Γ(d'/2) / (Γ(k/2) Γ((d'+1)/2))
    (``norm``). NaN where k = 0: a zero head has no directions. Raises ``InputError`` for k > d'.

    Example: half of 64 dimensions hold half of a random vector's squared norm, and so about
    √½ = 0.71 of its norm.

        >>> n_directions = torch.tensor([[[32, 64, 0]]])  # threshold, layer, head
        >>> chance_alignment(n_directions, 64, "energy").tolist()
        [[[0.5, 1.0, nan]]]
        >>> chance_alignment(n_directions, 64, "norm").round(decimals=4).tolist()
        [[[0.7044, 1.0, nan]]]
    """
    if metric not in METRICS:
        raise InputError(f"metric {metric!r} is unknown; use one of {', '.join(METRICS)}")
    if n_directions.numel() and int(n_directions.max()) > readable_dim:
        raise InputError(
            f"{int(n_directions.max())} directions do not fit a readable space of dimension "
            f"{readable_dim}"
        )
    k = n_directions.to(torch.float64)
    d = torch.tensor(float(readable_dim), dtype=torch.float64)
    if metric == "norm":
        log_ratio = (
            torch.lgamma((k + 1) / 2)
            - torch.lgamma(k / 2)
            + torch.lgamma(d / 2)
            - torch.lgamma((d + 1) / 2)
        )
        chance = log_ratio.exp()
    else:
        chance = k / d
    return torch.where(n_directions > 0, chance, torch.nan)


RANDOM_MATRICES = 8


def random_matrix_directions(readable_dim: int, d_head: int, threshold: float) -> float:
    """Directions that a Gaussian matrix [readable_dim, d_head] needs for a threshold, on average.

    Mean over seeded draws; the count of one matrix varies by less than one direction. This is what
    a spectrum looks like before anything has been learned (Marchenko and Pastur 1967).
    """
    generator = torch.Generator().manual_seed(0)
    counts = []
    for _ in range(RANDOM_MATRICES):
        matrix = torch.randn(readable_dim, d_head, generator=generator, dtype=torch.float64)
        energy = torch.linalg.svdvals(matrix).square()
        reached = energy.cumsum(0) / energy.sum()
        counts.append(int((reached < threshold - 1e-12).sum()) + 1)
    return sum(counts) / len(counts)

"""Input directions of read-in matrices: batched SVD, direction counts, numerical rank, ties."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_valuealign.errors import ModelError
from tl_valuealign.shapes import DirectionStack, HeadSpectrum, ReadInStack, check_fields, typed

# Singular values, relative to the largest: above STRONG a float32 product gives a direction to 1e-5
# of its length, under WELL_CONDITIONED the Gram matrix has lost it.
STRONG = 1e-2
WELL_CONDITIONED = 1e-4
REBUILT_ERROR = 2e-5
RESOLVED = 1e-13


@dataclass(frozen=True)
class HeadSVD:
    """Left singular vectors [head, d_model, direction] and values [head, direction], descending.

    On the device of the matrices, values in float64. Vectors of zero singular values are zero.
    """

    directions: DirectionStack
    singular_values: HeadSpectrum

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class HeadDirections:
    """One role in one block: U [head, d_model, direction], s [head, direction] and the number of
    directions within each threshold [threshold, head]."""

    directions: Tensor
    singular_values: Tensor
    n_directions: Tensor


@dataclass(frozen=True)
class RebuiltDirections:
    """Like :class:`HeadDirections`, with U = A M made anew each time it is asked for.

    ``factor``: M [head, d_head, direction], which is A's V S⁻¹; ``matrices`` gives A. What is held
    is d_model / d_head times smaller, and making it costs d_head products a row where projecting
    costs one for every token.
    """

    factor: Tensor
    matrices: Callable[[], Tensor]
    singular_values: Tensor
    n_directions: Tensor

    @property
    def directions(self) -> Tensor:
        matrices = self.matrices()
        return (matrices @ self.factor.to(matrices)).to(self.factor.device)


Directions = HeadDirections | RebuiltDirections


def rebuild(head: HeadDirections, matrices: Callable[[], Tensor]) -> Directions:
    """``head`` in the smaller form, or as it is where some threshold's directions would lose digits
    to the division by a small singular value."""
    a, u = matrices().to(torch.float64), head.directions.to(torch.float64)
    factor = torch.linalg.pinv(a.mT @ a, hermitian=True) @ (a.mT @ u)
    small = RebuiltDirections(
        factor.to(head.directions), matrices, head.singular_values, head.n_directions
    )
    used = int(head.n_directions.max())
    lost = (small.directions - head.directions)[..., :used]
    return head if bool((lost.norm(dim=-2) > REBUILT_ERROR).any()) else small


@typed
def decompose(matrices: ReadInStack, stored: torch.dtype) -> HeadSVD:
    """SVD of A = U S Vᵀ for a stack of heads, keeping U and S.

    ``stored`` is the dtype in which the weights live. The float64 Gram matrix AᵀA = V S² Vᵀ gives
    S to about eps s_1²/s_i and U = A V/S, whose columns keep the precision of ``matrices`` where
    s_i is no small part of s_1; the others are made in float64. A head with an s_i under 1e-4 s_1,
    or stored in float64, takes a QR factorisation instead, which does not square the condition
    number.
    """
    directions = torch.empty_like(matrices[..., : min(matrices.shape[1:])])
    values = matrices.new_empty(len(matrices), directions.shape[-1], dtype=torch.float64)
    poor = list(range(len(matrices)))
    if stored != torch.float64 and matrices.shape[1] >= matrices.shape[2]:
        poor = _through_gram(directions, values, matrices)
    for head in poor:
        exact = _through_core(*torch.linalg.qr(matrices[head : head + 1].to(torch.float64)))
        directions[head], values[head] = exact.directions[0], exact.singular_values[0]
    return HeadSVD(directions, values)


def _through_gram(directions: Tensor, values: Tensor, matrices: Tensor) -> list[int]:
    """Fill in all heads but those of the returned numbers, whose Gram matrix lost digits."""
    found = torch.linalg.eigh(_gram(matrices))
    values[:] = found.eigenvalues.flip(-1).clamp(min=0).sqrt()
    share = values / torch.where(values[:, :1] > 0, values[:, :1], 1)
    scaled = found.eigenvectors.flip(-1) / torch.where(values > 0, values, 1)[:, None]
    torch.matmul(matrices, scaled.to(matrices), out=directions)
    well = (share >= WELL_CONDITIONED).all(-1)
    weak = (well & (share[:, -1] < STRONG)).nonzero()[:, 0].tolist()
    for head in weak:
        strong = int((share[head] >= STRONG).sum())
        wide = matrices[head].to(torch.float64)
        directions[head, :, strong:] = wide @ scaled[head, :, strong:]
    return (~well).nonzero()[:, 0].tolist()


def _gram(matrices: Tensor) -> Tensor:
    """AᵀA in float64."""
    if matrices.device != torch.device("cpu"):
        wide = matrices.to(torch.float64)
        return wide.mT @ wide
    # One head's wide copy at a time stays in the cache, and its memory is touched once.
    shape = (len(matrices), matrices.shape[2], matrices.shape[2])
    gram = matrices.new_empty(shape, dtype=torch.float64)
    wide = matrices.new_empty(matrices.shape[1:], dtype=torch.float64)
    for matrix, product in zip(matrices, gram, strict=True):
        torch.matmul(wide.copy_(matrix).mT, wide, out=product)
    return gram


@typed
def decompose_product(read_in: ReadInStack, write_out: Tensor) -> HeadSVD:
    """SVD of A W_O per query head through the small core of the two factors.

    ``read_in`` [head, d_model, d_head], ``write_out`` [head, d_head, d_model]. Nothing of size
    d_model × d_model is formed, and A → A M, W_O → M⁻¹ W_O leaves the result unchanged.
    """
    basis, core = torch.linalg.qr(read_in.to(torch.float64))
    other = torch.linalg.qr(write_out.to(torch.float64).mT).R
    return _through_core(basis, core @ other.mT)


def _through_core(basis: Tensor, core: Tensor) -> HeadSVD:
    left, values, _ = torch.linalg.svd(core)
    directions = (basis @ left) * (values > 0).unsqueeze(-2)
    return HeadSVD(directions, values)


@typed
def count_directions(singular_values: HeadSpectrum, threshold: float) -> Tensor:
    """Smallest k with Σ_{i≤k} s_i² ≥ threshold · Σ s_i², int64 [head]; 0 for a zero head.

    A threshold of 1 asks for the whole column space: singular values above float64 rounding.

    Example: squared, these singular values are 16, 4, 0 and 0 of 20 in all.

        >>> singular_values = torch.tensor([[4.0, 2.0, 0.0, 0.0]])  # head, direction
        >>> count_directions(singular_values, 0.8), count_directions(singular_values, 0.81)
        (tensor([1]), tensor([2]))
    """
    energy = singular_values.square()
    total = energy.sum(-1, keepdim=True)
    short = energy.cumsum(-1) < threshold * total * (1 - 1e-14)
    resolved = singular_values > singular_values[..., :1] * RESOLVED
    k = short.sum(-1) + 1
    return torch.where(total[..., 0] > 0, torch.minimum(k, resolved.sum(-1)), 0)


@typed
def numerical_rank(singular_values: HeadSpectrum, d_model: int, stored: torch.dtype) -> Tensor:
    """How many singular values stand above rounding in the stored dtype, int64 [head].

    float32 and float64: s_i > s_1 · max(d_model, d_head) · eps, as numpy and MATLAB do. That bound
    is useless in half precision (bfloat16 at d_model 128 would already call every head rank 0).
    There, rounding the entries perturbs A by a matrix of spectral norm below about 0.6 eps s_1,
    so s_i > s_1 · eps is counted.
    """
    eps = torch.finfo(stored).eps
    wide = torch.finfo(stored).bits >= 32
    scale = max(d_model, singular_values.shape[-1]) if wide else 1
    return (singular_values > singular_values[..., :1] * scale * eps).sum(-1)


@typed
def tied_at(singular_values: HeadSpectrum, k: Tensor, stored: torch.dtype) -> Tensor:
    """Whether s_k and s_{k+1} are equal to rounding, bool [head]: the cut is then arbitrary."""
    eps = torch.finfo(torch.float64 if stored == torch.float64 else torch.float32).eps
    last = singular_values.shape[-1]
    here = singular_values.gather(-1, (k - 1).clamp(0, last - 1).unsqueeze(-1))[..., 0]
    following = singular_values.gather(-1, k.clamp(0, last - 1).unsqueeze(-1))[..., 0]
    close = (here - following) <= 8 * eps * singular_values[..., 0]
    return close & (k > 0) & (k < last)


def require_finite(matrices: Tensor, *, role: str, layer: int) -> None:
    """Raise ``ModelError`` naming the first head whose matrix has a NaN or an infinity."""
    finite = matrices.isfinite().flatten(1).all(-1)
    if not bool(finite.all()):
        bad = [f"L{layer}H{head}" for head in (~finite).nonzero()[:, 0].tolist()]
        raise ModelError(
            f"role {role}: the read-in matrix of {', '.join(bad[:8])} has NaN or infinite "
            f"entries; load the checkpoint again, or leave the layer out with layers=..."
        )

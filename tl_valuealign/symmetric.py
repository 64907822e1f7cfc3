"""Symmetric d × d sums kept as block rows of their upper triangle, and quadratic forms of them.

Half of Σ x xᵀ repeats the other half. Block rows (128 or more wide) keep the products large enough
for a matrix library and leave out all but the diagonal blocks' lower halves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

BLOCK_ROWS = 8
MIN_ROWS = 128
TOKENS_AT_ONCE = 2048
# Bytes of projectors that one product reads again for every matrix: about a processor's cache.
FORM_BYTES = {"cpu": 8 * 2**20}
FORM_BYTES_ELSEWHERE = 256 * 2**20


@dataclass(frozen=True)
class BlockRow:
    """Rows ``start`` to ``stop``, columns ``start`` to the end, at ``part`` of the flat matrix."""

    start: int
    stop: int
    part: slice


class UpperRows:
    """Layout of a symmetric matrix of ``size`` rows in ``packed`` numbers."""

    def __init__(self, size: int) -> None:
        self.size = size
        count = max(1, min(BLOCK_ROWS, size // MIN_ROWS))
        edges = [size * i // count for i in range(count + 1)]
        self.rows: list[BlockRow] = []
        self.packed = 0
        for start, stop in pairwise(edges):
            length = (stop - start) * (size - start)
            self.rows.append(BlockRow(start, stop, slice(self.packed, self.packed + length)))
            self.packed += length

    def add_outer(self, flat: Tensor, x: Tensor) -> None:
        """flat [packed] += xᵀ x for x [token, size]; a wider ``flat`` takes the sums of a few
        thousand tokens at a time."""
        for part in x.split(TOKENS_AT_ONCE):
            for row in self.rows:
                product = part[:, row.start : row.stop].T @ part[:, row.start :]
                flat[row.part] += product.reshape(-1).to(flat.device)

    def unpack(self, flat: Tensor) -> Tensor:
        """The whole matrices [..., size, size] of flat [..., packed]."""
        full = flat.new_empty(*flat.shape[:-1], self.size, self.size)
        for row in self.rows:
            shape = (row.stop - row.start, self.size - row.start)
            block = flat[..., row.part].unflatten(-1, shape)
            full[..., row.start : row.stop, row.start :] = block
            full[..., row.start :, row.start : row.stop] = block.mT
        return full

    def forms(
        self, matrices: Sequence[Tensor], directions: Tensor, weights: Tensor
    ) -> list[Tensor]:
        """Σ_i w_i u_iᵀ M u_i for every matrix M, one tensor [matrix, cell, head] for each of
        ``matrices`` [matrix, packed].

        directions: u_i as columns [head, size, direction]. weights: w [cell, head, direction].
        The sum is the inner product ⟨M, U diag(w) Uᵀ⟩, so the projectors are built once, block row
        by block row, and meet all matrices in one product.
        """
        cells, heads = weights.shape[:2]
        widths = [_used(weights[cell]) for cell in range(cells)]
        found = [
            torch.zeros(len(group), heads, cells, dtype=group.dtype, device=group.device)
            for group in matrices
        ]
        largest = max(row.part.stop - row.part.start for row in self.rows)
        at_once = FORM_BYTES.get(directions.device.type, FORM_BYTES_ELSEWHERE)
        step = max(1, at_once // (largest * cells * directions.element_size()))
        for first in range(0, heads, step):
            some = slice(first, first + step)
            u, w = directions[some], weights[:, some]
            for row in self.rows:
                left = u[:, row.start : row.stop]
                # What is right of the diagonal block stands for its mirror image as well.
                right = u[:, row.start :].clone()
                right[:, row.stop - row.start :] *= 2
                projectors = torch.stack(
                    [
                        (left[..., :width] * w[cell, :, None, :width]) @ right[..., :width].mT
                        for cell, width in enumerate(widths)
                    ],
                    dim=1,
                ).flatten(2)
                for group, sums in zip(matrices, found, strict=True):
                    product = group[:, row.part] @ projectors.flatten(0, 1).T
                    sums[:, some] += product.unflatten(1, projectors.shape[:2])
        return [sums.transpose(1, 2) for sums in found]


def _used(weights: Tensor) -> int:
    """How many leading directions carry any weight."""
    carried = weights.ne(0).any(0).nonzero()
    return int(carried[-1]) + 1 if len(carried) else 0

"""Symmetric d × d sums kept as block rows of their upper triangle, and quadratic forms of them.

Half of Σ x xᵀ repeats the other half. Block rows (128 or more wide) keep the products large enough
for a matrix library and leave out all but the diagonal blocks' lower halves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

BLOCK_ROWS = 8
MIN_ROWS = 128
TOKENS_AT_ONCE = 2048
# Bytes of U diag(w) Uᵀ that meet all matrices at a time: what a processor's cache holds.
FORM_BYTES = {"cpu": 8 * 2**20}
FORM_BYTES_ELSEWHERE = 256 * 2**20
MIN_TILE_ROWS = 16


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
        self, matrices: Sequence[tuple[Tensor, int]], directions: Tensor, weights: Tensor
    ) -> list[Tensor]:
        """Σ_i w_i u_iᵀ M u_i for every matrix M, one tensor [matrix, cell, head] for each of
        ``matrices``: [matrix, packed], and how many of the cells, from the first, it is asked.

        directions: u_i as columns [head, size, direction]. weights: w [cell, head, direction].
        The sum is the inner product ⟨M, U diag(w) Uᵀ⟩: a few rows of all heads' U diag(w) Uᵀ are
        built at a time, and meet all matrices while they are at hand.
        """
        cells, heads = weights.shape[:2]
        widths = [_used(weights[cell]) for cell in range(cells)]
        found = [group.new_zeros(len(group), asked, heads) for group, asked in matrices]
        budget = FORM_BYTES.get(directions.device.type, FORM_BYTES_ELSEWHERE)
        at_hand = max(1, budget // (cells * self.size * directions.element_size()))
        some_heads = max(1, min(heads, at_hand // MIN_TILE_ROWS))
        tile_rows = max(1, min(self.size, at_hand // some_heads))
        room = directions.new_empty(cells * some_heads * tile_rows * self.size)
        for first in range(0, heads, some_heads):
            some = slice(first, first + some_heads)
            u, w = directions[some], weights[:, some]
            for row in self.rows:
                columns = self.size - row.start
                # What is right of the diagonal block stands for its mirror image as well.
                right = u[:, row.start :].clone()
                right[:, row.stop - row.start :] *= 2
                scaled = [
                    (right[..., :width] * w[cell, :, None, :width]).mT
                    for cell, width in enumerate(widths)
                ]
                for start in range(row.start, row.stop, tile_rows):
                    stop = min(start + tile_rows, row.stop)
                    shape = (cells, len(u), stop - start, columns)
                    tile = room[: prod(shape)].view(shape)
                    for cell, width in enumerate(widths):
                        torch.bmm(u[:, start:stop, :width], scaled[cell], out=tile[cell])
                    begin = row.part.start + (start - row.start) * columns
                    part = slice(begin, begin + (stop - start) * columns)
                    for (group, asked), sums in zip(matrices, found, strict=True):
                        product = group[:, part] @ tile[:asked].flatten(2).flatten(0, 1).T
                        sums[:, :, some] += product.unflatten(1, (asked, len(u)))
        return found


def _used(weights: Tensor) -> int:
    """How many leading directions carry any weight."""
    carried = weights.ne(0).any(0).nonzero()
    return int(carried[-1]) + 1 if len(carried) else 0

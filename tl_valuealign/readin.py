"""Directions and spectra of every target block's read-in matrices."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tl_valuealign.adapter import ModelView
from tl_valuealign.chance import chance_alignment
from tl_valuealign.norms import InputNorm
from tl_valuealign.role_result import Spectra
from tl_valuealign.spectra import (
    Directions,
    HeadDirections,
    HeadSVD,
    count_directions,
    decompose,
    decompose_product,
    numerical_rank,
    rebuild,
    require_finite,
    tied_at,
)

# What one model's decompositions may hold until the model itself is let go.
REMEMBERED_BYTES = 2**30


class Decomposition:
    """Directions of every target block, one block at a time, and what is known of all of them.

    Iterating upcasts one block's weights at a time and raises ``ModelError`` naming the first head
    with NaN or infinite weights. :meth:`spectra` answers once every block has been seen.
    """

    def __init__(
        self,
        view: ModelView,
        norms: dict[int, InputNorm],
        roles: Sequence[str],
        thresholds: Sequence[float],
        *,
        progress: bool,
    ) -> None:
        self.view, self.norms, self.progress = view, norms, progress
        self.roles, self.thresholds = tuple(roles), tuple(thresholds)
        self.values: dict[str, dict[int, Tensor]] = {role: {} for role in roles}

    def __len__(self) -> int:
        return len(self.norms)

    def __iter__(self) -> Iterator[list[HeadDirections]]:
        bar = tqdm(self.norms, "decomposing", unit=" blocks", delay=1, disable=not self.progress)
        for layer in bar:
            block = []
            for role in self.roles:
                svd = decompose_role(self.view, role, layer, self.norms[layer])
                s = svd.singular_values
                self.values[role][layer] = s.cpu()
                k = torch.stack([count_directions(s, share) for share in self.thresholds])
                block.append(HeadDirections(svd.directions.to(self.view.compute_dtype), s, k))
            yield block

    def rebuilt(self) -> Iterator[list[Directions]]:
        """The same in the smaller form of :class:`RebuiltDirections` where that loses nothing."""
        for (layer, norm), block in zip(self.norms.items(), self, strict=True):
            yield [
                rebuild(head, partial(self.view.read_in, role, layer, norm))
                for role, head in zip(self.roles, block, strict=True)
            ]

    def spectra(self, metric: str) -> dict[str, Spectra]:
        """Per role the spectra of all blocks, with chance in ``metric``."""
        readable = self.view.d_model - any(norm.centred for norm in self.norms.values())
        return {
            role: describe_spectra(
                torch.stack([found[layer] for layer in self.norms]),
                self.thresholds,
                metric,
                d_model=self.view.d_model,
                readable=readable,
                stored=self.view.dtype,
            )
            for role, found in self.values.items()
        }


def decompose_blocks(
    view: ModelView,
    norms: dict[int, InputNorm],
    roles: Sequence[str],
    thresholds: Sequence[float],
    metric: str,
    *,
    progress: bool,
) -> tuple[list[list[HeadDirections]], dict[str, Spectra]]:
    """Per target block and role the directions, and per role the spectra of all blocks."""
    found = Decomposition(view, norms, roles, thresholds, progress=progress)
    return list(found), found.spectra(metric)


def describe_spectra(
    singular_values: Tensor,
    thresholds: Sequence[float],
    metric: str,
    *,
    d_model: int,
    readable: int,
    stored: torch.dtype,
) -> Spectra:
    """What follows from singular values [layer, head, direction] alone."""
    every, grid = singular_values.flatten(0, 1), singular_values.shape[:2]
    counts = [count_directions(every, share) for share in thresholds]
    tied = torch.stack([tied_at(every, k, stored).view(grid) for k in counts])
    k = torch.stack([count.view(grid) for count in counts])
    rank = numerical_rank(every, d_model, stored).view(grid)
    return Spectra(singular_values, k, rank, tied, chance_alignment(k, readable, metric))


_remembered: WeakKeyDictionary[nn.Module, dict[tuple[str, int], tuple[bytes, HeadSVD]]] = (
    WeakKeyDictionary()
)


def decompose_role(view: ModelView, role: str, layer: int, norm: InputNorm) -> HeadSVD:
    """SVD of one role in one block, on the model's device (the CPU where that is MPS).

    Remembered as long as the model lives, up to a gigabyte, and only for the very same weights.
    """
    matrices = view.read_in(role, layer, norm)
    if matrices.device.type == "mps":
        matrices = matrices.cpu()
    factors = [matrices]
    if role == "OV":
        factors.append(view.write_out(layer, norm).to(matrices.device))
    key = _fingerprint(factors)
    known = _remembered.setdefault(view.model, {})
    if known.get((role, layer), (b"", None))[0] == key:
        return known[role, layer][1]
    for each in factors:
        require_finite(each, role=role, layer=layer)
    svd = decompose_product(*factors) if role == "OV" else decompose(matrices, view.dtype)
    held = sum(each.directions.nbytes for _, each in known.values())
    if held + svd.directions.nbytes <= REMEMBERED_BYTES:
        known[role, layer] = (key, svd)
    return svd


def forget() -> None:
    """Let go of every remembered decomposition."""
    _remembered.clear()


def _fingerprint(factors: Sequence[Tensor]) -> bytes:
    digest = hashlib.sha256()
    for factor in factors:
        digest.update(f"{tuple(factor.shape)}{factor.dtype}{factor.device}".encode())
        digest.update(factor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()

"""Directions and spectra of every target block's read-in matrices."""

from collections.abc import Sequence

import torch
from tqdm import tqdm

from tl_valuealign.adapter import InputNorm, ModelView
from tl_valuealign.chance import chance_alignment
from tl_valuealign.engines import HeadDirections
from tl_valuealign.result import Spectra
from tl_valuealign.spectra import (
    HeadSVD,
    count_directions,
    decompose,
    decompose_product,
    numerical_rank,
    require_finite,
    tied_at,
)


def decompose_blocks(
    view: ModelView,
    norms: dict[int, InputNorm],
    roles: Sequence[str],
    thresholds: Sequence[float],
    metric: str,
    *,
    progress: bool,
) -> tuple[list[list[HeadDirections]], dict[str, Spectra]]:
    """Per target block and role the directions, and per role the spectra of all blocks.

    One block's weights are upcast at a time. Raises ``ModelError`` naming the first head with NaN
    or infinite weights.
    """
    blocks: list[list[HeadDirections]] = []
    counts: dict[str, list[tuple[torch.Tensor, ...]]] = {role: [] for role in roles}
    for layer in tqdm(norms, "decomposing", unit=" blocks", delay=1, disable=not progress):
        block = []
        for role in roles:
            svd = decompose_role(view, role, layer, norms[layer])
            s = svd.singular_values
            k = torch.stack([count_directions(s, threshold) for threshold in thresholds])
            tied = torch.stack([tied_at(s, row, view.dtype) for row in k])
            counts[role].append((s, k, numerical_rank(s, view.d_model, view.dtype), tied))
            block.append(HeadDirections(svd.directions.to(view.compute_dtype), s, k))
        blocks.append(block)
    readable = view.d_model - any(norm.centred for norm in norms.values())
    spectra = {}
    for role, found in counts.items():
        s, k, rank, tied = (torch.stack(part).cpu() for part in zip(*found, strict=True))
        k, tied = k.transpose(0, 1), tied.transpose(0, 1)
        spectra[role] = Spectra(s, k, rank, tied, chance_alignment(k, readable, metric))
    return blocks, spectra


def decompose_role(view: ModelView, role: str, layer: int, norm: InputNorm) -> HeadSVD:
    """SVD of one role in one block, on the model's device (the CPU where that is MPS)."""
    matrices = view.read_in(role, layer, norm)
    if matrices.device.type == "mps":
        matrices = matrices.cpu()
    require_finite(matrices, role=role, layer=layer)
    if role != "OV":
        return decompose(matrices, view.dtype)
    write_out = view.write_out(layer, norm).to(matrices.device)
    require_finite(write_out, role=role, layer=layer)
    return decompose_product(matrices, write_out)

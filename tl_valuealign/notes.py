"""What a reader of a result should know about the state in which its model was found."""

import torch

from tl_valuealign.adapter import ModelView
from tl_valuealign.errors import ModelError


def notes_on(view: ModelView) -> list[str]:
    """Sentences for the provenance; none for a model in an ordinary state."""
    notes = []
    if all(is_refactored(view, layer) for layer in view.targets):
        notes.append(
            "the value and output matrices were refactored (refactor_factored_attn_matrices): "
            "directions and sizes of role V are those of the whole head's output, as role OV has "
            "them in any model, and Q and K share their singular values evenly"
        )
    return notes


def is_refactored(view: ModelView, layer: int) -> bool:
    """Whether every head has W_V = U S and W_O = Vᵀ, as refactor_factored_attn_matrices leaves
    them: W_V with orthogonal columns and W_O with orthonormal rows."""
    try:
        read_in = view.weight(layer, "V").to(torch.float64)
        write_out = view.stored(layer, "W_O", f"block {layer}").to(torch.float64)
    except ModelError:  # a W_O that cannot be read was not rewritten either
        return False
    if len(read_in) != len(write_out) or read_in.shape[-1] < 2:
        return False
    columns, rows = read_in.mT @ read_in, write_out @ write_out.mT
    sizes = columns.diagonal(dim1=-2, dim2=-1).amax(-1)
    unit = torch.eye(rows.shape[-1]).to(rows)
    rounding = max(1e-5, 4 * torch.finfo(view.dtype).eps)
    crossing = (columns * (1 - unit)).abs().amax((-2, -1))
    orthogonal = bool((crossing <= rounding * sizes).all()) and bool((sizes > 0).any())
    return orthogonal and bool(((rows - unit).abs() <= rounding).all())

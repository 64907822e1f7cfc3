"""Head vectors from streams: head = (x̄ / s(x)) A + b, with b measured on the text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tl_valuealign.adapter import HEAD_HOOKS, ModelView
from tl_valuealign.errors import ModelError
from tl_valuealign.norms import InputNorm
from tl_valuealign.selfcheck import excerpt, probe
from tl_valuealign.session import Session


@dataclass(frozen=True)
class HeadReader:
    """What one role of one block does with a stream.

    ``bias`` [head, d_head]: what is constant over tokens. ``rebuild_error``: largest
    |(x̄/s) A + b − hook| over heads and tokens, over the largest |hook|.
    """

    view: ModelView
    role: str
    layer: int
    norm: InputNorm
    bias: Tensor
    rebuild_error: float

    def matrices(self) -> Tensor:
        """A [head, d_model, d_head], upcast; made anew at every call, so that few are held."""
        return self.view.read_in(self.role, self.layer, self.norm)

    def normed(self, stream: Tensor) -> Tensor:
        """x̄ / s(x), upcast, of a stream [..., d_model]; the gain is in the matrices."""
        stream = stream.to(self.view.compute_dtype)
        return self.norm.centre(stream) / self.norm.scale(stream)

    def vectors(self, normed: Tensor) -> Tensor:
        """Head vectors [..., head, d_head] of a normed stream [..., d_model]."""
        matrices = self.matrices().to(normed.device)
        return torch.einsum("...d,hdk->...hk", normed, matrices) + self.bias.to(normed.device)


def as_heads(activation: Tensor, heads: int) -> Tensor:
    """hook_q/k/v [..., head, d_head] with native heads, however a wrapper lays them out."""
    if activation.ndim == 3:
        activation = activation.unflatten(-1, (heads, -1))
    return activation[..., :: activation.shape[-2] // heads, :]


def head_readers(session: Session) -> dict[str, dict[int, HeadReader]]:
    """A reader for every role and target block, their biases measured on the session's first
    sequence and on random ids.

    Raises ``ModelError`` where positions are added to queries and keys alone: they are then no
    function of the stream.
    """
    view = session.view
    if view.positions_enter_queries_and_keys and {"Q", "K"} & set(session.roles):
        raise ModelError(
            f"{view.name} adds positions to queries and keys without writing them into the stream, "
            f"so they are not made of the stream's sources; ask for roles=('V',)"
        )
    names = [view.resid_pre(layer) for layer in session.layers]
    names += [view.hook(la, HEAD_HOOKS[role]) for la in session.layers for role in session.roles]
    streams: dict[str, list[Tensor]] = {name: [] for name in names}
    texts = (excerpt(session.opening.ids, session.opening.keep), probe(view))
    for ids, keep in texts:
        found, _ = view.run(ids, names, stop_at_layer=max(session.layers) + 1)
        for name in names:
            streams[name].append(found[name][keep.to(found[name].device)])
    merged = {name: torch.cat(parts) for name, parts in streams.items()}
    return {
        role: {layer: _reader(session, role, layer, merged) for layer in session.layers}
        for role in session.roles
    }


def _reader(session: Session, role: str, layer: int, streams: dict[str, Tensor]) -> HeadReader:
    view, norm = session.view, session.verified.norms[layer]
    heads, d_head = view.n_heads(role), view.d_head(role)
    nothing = torch.zeros(heads, d_head, dtype=view.compute_dtype)
    plain = HeadReader(view, role, layer, norm, nothing, 0.0)
    predicted = plain.vectors(plain.normed(streams[view.resid_pre(layer)]))
    actual = streams[view.hook(layer, HEAD_HOOKS[role])].to(predicted)
    rest = as_heads(actual[None], heads)[0] - predicted
    size = actual.abs().max().clamp(min=torch.finfo(rest.dtype).tiny)
    bias = rest.mean(0)
    error = float((rest - bias).abs().max() / size)
    return HeadReader(view, role, layer, norm, bias.cpu(), error)

"""What are the directions? The tokens whose embeddings lie most along a head's input directions.

A singular vector is defined up to its sign, and one of two near-equal singular values not even up
to that: any rotation among them is as good. So the sign is set by the embeddings themselves
(positive is the side on which the squared cosines of all tokens weigh more; after Bro, Acar and
Kolda 2008), and near-equal directions are read as one block, by the length of a token's projection
into it. Millidge and Black (2022), "The singular value decompositions of transformer weight
matrices are highly interpretable", read such directions in vocabulary space.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_valuealign import arguments
from tl_valuealign.adapter import ModelView
from tl_valuealign.chance import chance_alignment
from tl_valuealign.errors import InputError, ModelError
from tl_valuealign.extremes import require
from tl_valuealign.norms import InputNorm
from tl_valuealign.readin import decompose_role
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.selfcheck import Verified, probe, verify
from tl_valuealign.shapes import ROLES
from tl_valuealign.spectra import HeadSVD

ROWS, WIDTH = 8, 128


@dataclass(frozen=True)
class Block:
    """Directions ``first`` to ``last`` whose singular values are too close to tell apart."""

    first: int
    last: int

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@torch.inference_mode(False)  # as in analyze_value_alignment
@torch.no_grad()
def decode_directions(
    model: Any,
    layer: int | None = None,
    head: int | None = None,
    role: str = "V",
    *,
    n_directions: int = 8,
    n_tokens: int = 10,
    closeness: float = 0.01,
    token_ids: Sequence[int] | Tensor | None = None,
) -> pd.DataFrame:
    """Tokens at either end of a head's top input directions, one row per direction or block.

    Args:
        model: HookedTransformer or TransformerBridge.
        layer, head: which head; native key/value heads for "K" and "V". None: all there are.
        role: "Q", "K", "V" or "OV".
        n_directions: how many directions to read at least, in order of singular value.
        n_tokens: how many tokens to list at each end.
        closeness: neighbours whose singular values differ by less than this share of the larger
            belong to one block.
        token_ids: the tokens to choose from; None for the whole vocabulary.

    Returns:
        A table with columns role, layer, head, direction ("0", or "3-5" for a block),
        singular_value (root mean square in a block), share (of all squared singular values),
        positive and negative (lists of tokens), positive_cosine and negative_cosine
        (‖U_Bᵀē‖ / ‖ē‖ of each, signed for single directions). A block has no ends: its strongest
        tokens are under positive, and negative is empty. For "OV" also positive_writes and
        negative_writes: the tokens whose logits rise most by what the head writes for the
        strongest token of that end, through this direction alone. Where all heads are asked for,
        those whose matrix is zero have no rows. ``attrs["model_hash"]`` tells whose table it is.

    Raises:
        InputError: an argument is out of range.
        ModelError: the one head that was asked for has a zero matrix, or as
            ``analyze_value_alignment``.
        SelfCheckError: as ``analyze_value_alignment``.
    """
    view = ModelView(model)
    arguments.choices("role", (role,), ROLES)
    wanted = None if layer is None else (layer,)
    layers = arguments.blocks("layer", wanted, view.attention_layers, view.n_layers)
    view.choose(layers)
    one = None if head is None else (head,)
    heads = arguments.heads("head", one, view.n_heads(role)) or range(view.n_heads(role))
    n_directions = arguments.count("n_directions", n_directions)
    n_tokens = arguments.count("n_tokens", n_tokens)
    closeness = arguments.number("closeness", closeness, 0, 1)
    ids = _candidates(view, token_ids)
    rows: list[dict[str, Any]] = []
    with view.quiet():
        verified = verify(view, *probe(view), layers, (role,))
        unit, ids = _unit_embeddings(view, verified, ids)
        for block in layers:
            norm = verified.norms[block]
            svd = decompose_role(view, role, block, norm)
            for each in heads:
                reader = _Reader(view, norm, role, block, each, svd)
                found = reader.rows(unit, ids, n_directions, n_tokens, closeness)
                if not found and None not in (layer, head):
                    raise ModelError(
                        f"L{block}H{each}, role {role}: a zero matrix looks for nothing"
                    )
                rows += [{"role": role, "layer": block, "head": each} | row for row in found]
    table = pd.DataFrame(rows)
    table.attrs["model_hash"] = view.model_hash()
    return table


class _Reader:
    """One head's directions, read in tokens."""

    def __init__(
        self, view: ModelView, norm: InputNorm, role: str, layer: int, head: int, svd: HeadSVD
    ) -> None:
        self.view, self.norm, self.role, self.layer, self.head = view, norm, role, layer, head
        self.directions, self.values = svd.directions[head].cpu(), svd.singular_values[head].cpu()

    def rows(
        self, unit: Tensor, ids: Tensor, n_directions: int, n_tokens: int, closeness: float
    ) -> list[dict[str, Any]]:
        """One row per direction or block; none for a zero matrix."""
        found = []
        total = self.values.square().sum()
        for block in _blocks(self.values, n_directions, closeness):
            inside = slice(block.first, block.last + 1)
            basis = self.directions[:, inside]
            squared = self.values[inside].square()
            row: dict[str, Any] = {
                "direction": block.label,
                "singular_value": float(squared.mean().sqrt()),
                "share": float(squared.sum() / total),
            }
            for name, (places, cosines) in _ends(unit, basis, n_tokens).items():
                row[name] = [_word(self.view, int(token)) for token in ids[places]]
                row[f"{name}_cosine"] = [float(cosine) for cosine in cosines]
                if self.role == "OV":
                    strongest = unit[places[:1]].to(basis)
                    row[f"{name}_writes"] = self._writes(basis, strongest, n_tokens)
            found.append(row)
        return found

    def _writes(self, basis: Tensor, strongest: Tensor, n_tokens: int) -> list[str]:
        """Tokens that the head writes for the one row of ``strongest``, where there is one."""
        if not len(strongest):
            return []
        read = self.view.read_in("OV", self.layer, self.norm)[self.head].cpu().to(basis)
        out = self.view.write_out(self.layer, self.norm)[self.head].cpu().to(basis)
        written = ((basis @ (basis.T @ strongest[0])) @ read) @ out
        return _raised(self.view, self.layer, written, n_tokens)


def _candidates(view: ModelView, token_ids: Any) -> Tensor:
    if token_ids is None:
        return torch.arange(view.d_vocab)
    return torch.tensor(arguments.ids("token_ids", token_ids, view.d_vocab))


def _unit_embeddings(view: ModelView, verified: Verified, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ē / ‖ē‖ of every id, [token, d_model], and the ids whose embedding is not zero."""
    norm = next(iter(verified.norms.values()))
    width = min(WIDTH, view.n_ctx or WIDTH)
    parts = []
    for chunk in ids.split(ROWS * width):
        padded = torch.nn.functional.pad(chunk, (0, -len(chunk) % width))
        found = _embed(view, padded.reshape(-1, width)).flatten(0, 1)[: len(chunk)]
        parts.append(norm.centre(found.to(view.compute_dtype)).cpu())
    streams = torch.cat(parts)
    lengths = streams.norm(dim=-1)
    present = lengths > 0
    return streams[present] / lengths[present, None], ids[present]


def _embed(view: ModelView, ids: Tensor) -> Tensor:
    names = ["hook_pos_embed"] if view.adds_positions else []
    found, stopped = view.run(ids, names, stop_at_layer=0)
    if stopped is None:
        raise ModelError(f"{view.name} cannot stop before its first block, so has no embedding")
    return stopped - found["hook_pos_embed"] if names else stopped


def _blocks(values: Tensor, n_directions: int, closeness: float) -> Iterator[Block]:
    """Directions in order, those with near-equal neighbours joined; zero ones are left out."""
    s = [v for v in values.tolist() if v > values[0] * 1e-6]
    first = 0
    while first < min(len(s), n_directions):
        last = first
        while last + 1 < len(s) and s[last + 1] > s[last] * (1 - closeness):
            last += 1
        yield Block(first, last)
        first = last + 1


def _ends(unit: Tensor, basis: Tensor, n_tokens: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Strongest tokens at each end of a direction, or in a block of them: places and cosines."""
    cosines = unit.to(basis) @ basis
    count = min(n_tokens, len(unit))
    if basis.shape[1] > 1:
        strength = cosines.norm(dim=-1)
        top = strength.topk(count)
        return {
            "positive": (top.indices, top.values),
            "negative": (top.indices[:0], top.values[:0]),
        }
    cosine = cosines[:, 0]
    if float((cosine.sign() * cosine.square()).sum()) < 0:
        cosine = -cosine
    high, low = cosine.topk(count), (-cosine).topk(count)
    return {"positive": (high.indices, high.values), "negative": (low.indices, -low.values)}


def _raised(view: ModelView, layer: int, written: Tensor, n_tokens: int) -> list[str]:
    """Tokens whose logits rise most when a head's ``written`` [d_model] is all there is.

    Between the head and the stream lies the norm after attention, where a block has one.
    """
    try:
        final, unembed = view.model.ln_final, view.model.unembed
    except AttributeError as error:
        raise ModelError(f"{view.name} has no ln_final and unembed to read writes with") from error
    after = getattr(view.model.blocks[layer], "ln1_post", None)
    # A second row of zeros shows the biases.
    rows = torch.stack([_long(written), torch.zeros_like(written)])[None]
    with torch.inference_mode():
        rows = rows.to(view.input_device, view.dtype)
        if after is not None:
            rows = torch.stack([_long(row) for row in after(rows)[0]])[None]
        logits = unembed(final(rows))[0].float().cpu()
    top = (logits[0] - logits[1]).topk(min(n_tokens, logits.shape[-1]))
    return [_word(view, int(token)) for token in top.indices]


def _long(vector: Tensor) -> Tensor:
    """The same direction with entries about 1, so that a norm's eps does not matter."""
    return vector / vector.norm().clamp(min=1e-30) * vector.shape[-1] ** 0.5


def _word(view: ModelView, token: int) -> str:
    """The token's text, or its number where there is no tokenizer."""
    if view.tokenizer is None:
        return str(token)
    return str(view.tokenizer.decode([token]))


def top_tokens(
    result: ValueAlignmentResult, layer: int, head: int, role: str = "V", stream: str = "full"
) -> pd.DataFrame:
    """Tokens of the analysed text with the largest and smallest alignment, in their context.

    Read from the result alone. ``stream``: "full" (every token in its context), or "embed" (once a
    token, as its embedding is the same everywhere). Alignments are ‖U_kᵀx̄‖ / ‖x̄‖ of the single
    token, at the first threshold.

    Returns a table with columns end ("largest" or "smallest"), rank, alignment, chance, token,
    before, after (text around it) and id. Raises ``InputError`` if the layer, head or role is not
    in the result, or the run kept no single tokens.
    """
    extremes = require(result.extremes, role, stream)
    if isinstance(layer, bool) or not isinstance(layer, Integral) or layer not in result.layers:
        raise InputError(
            f"layer {layer!r} is not in this result, which has {len(result.layers)} from "
            f"{result.layers[0]} to {result.layers[-1]}"
        )
    arguments.heads("head", (head,), result.role(role).numerical_rank.shape[1])
    place = result.layers.index(layer)
    table = extremes.table(role, place, head, stream)
    count = result.role(role).n_directions[:1, place : place + 1, head : head + 1]
    chance = chance_alignment(count, result.provenance["readable_dim"], "norm")
    table.insert(3, "chance", float(chance))
    return table

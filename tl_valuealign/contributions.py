"""How much: what share of each head's query, key and value does each source supply?

A head's vector is a sum, v = Σ_s (x̄_s / s(x)) A + b, so ⟨v_s, v⟩ / ⟨v, v⟩ is the signed share of
source s, and the shares sum to 1. Only A v is read back, once a head: ⟨v_s, v⟩ = ⟨x̄_s, A v⟩ / s(x)
is then one dot product a source. Kobayashi et al. (2020), "Attention is not only a weight", argue
for measuring vectors rather than weights; a signed share also shows what cancels, which the norm
of a part does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_valuealign import arguments
from tl_valuealign.errors import InputError
from tl_valuealign.labelled import long_frame
from tl_valuealign.parts import head_readers
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.session import open_session
from tl_valuealign.shapes import (
    COMPONENTS,
    PerHead,
    PerLayer,
    PerSource,
    PerSourceHead,
    check_fields,
)
from tl_valuealign.shares import ShareMeter
from tl_valuealign.streams import MIXER, StreamPlan

BIAS = "bias"


@dataclass(frozen=True)
class RoleShares:
    """Shares of one role's head vectors, float64. A source not yet written has the share 0.

    share, stderr, half_width: Σ_t ⟨v_s, v⟩ / Σ_t ⟨v, v⟩, its standard error over sequences and
    half of its 95% interval (NaN under 8 sequences). sq_norm: mean_t ‖v‖² of the head's vector.
    Everything is NaN in a head whose vectors are zero.
    rebuild_error: largest |Σ parts − hook| over the largest |hook|, per layer.
    """

    share: PerSourceHead
    stderr: PerSourceHead
    half_width: PerSourceHead
    sq_norm: PerHead
    rebuild_error: PerLayer

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class EmbeddingFate:
    """What becomes of the token embedding in the stream, means over tokens.

    rest_cosine [layer]: cosine of the embedding with everything else in the stream before a block
    (NaN where there is nothing else). kept [layer]: ⟨x̄, ē⟩ / ⟨ē, ē⟩ of the stream, 1 while
    nothing has pulled it back. pull [source]: the same of each source; those upstream of a block
    and the embedding's own 1 sum to ``kept``. Errors and 95% half widths are over sequences.
    """

    rest_cosine: PerLayer
    rest_cosine_stderr: PerLayer
    rest_cosine_half_width: PerLayer
    kept: PerLayer
    kept_stderr: PerLayer
    pull: PerSource
    pull_stderr: PerSource

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ContributionResult:
    """Signed shares of every source in every head's vectors; ``.V`` is [source, layer, head].

    ``sources`` end with "bias". ``roles`` hold errors and checks beside the shares.
    """

    roles: dict[str, RoleShares]
    sources: tuple[str, ...]
    layers: tuple[int, ...]
    embedding: EmbeddingFate
    n_sequences: int
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        check_fields(self)

    def role(self, name: str) -> RoleShares:
        """One role's shares. Raises ``InputError`` naming the roles that were measured."""
        return self.roles[arguments.measured(name, self.roles)]

    @property
    def Q(self) -> PerSourceHead:
        return self.role("Q").share

    @property
    def K(self) -> PerSourceHead:
        return self.role("K").share

    @property
    def V(self) -> PerSourceHead:
        return self.role("V").share

    def share(self, role: str, source: str = "embed") -> PerHead:
        """[layer, head] of one source. Raises ``InputError`` naming the sources there are."""
        if source not in self.sources:
            raise InputError(
                f"source {source!r} is not in this result; its sources are "
                f"{', '.join(self.sources[:3])}, …, {self.sources[-1]}"
            )
        return self.role(role).share[self.sources.index(source)]

    def by_kind(self, role: str) -> dict[str, PerHead]:
        """Shares summed over blocks, [layer, head]: embed, attn_out, mlp_out, bias and the like."""
        share = self.role(role).share
        kinds: dict[str, Tensor] = {}
        for number, source in enumerate(self.sources):
            kind = source.partition("_")[2] if source[0].isdigit() else source
            kinds[kind] = kinds.get(kind, torch.zeros_like(share[0])) + share[number]
        return kinds

    def to_dataframe(self, alignment: ValueAlignmentResult | None = None) -> pd.DataFrame:
        """One row per role, source, layer and head: share, stderr, half_width (of 95%).

        With the ``alignment`` of the same model, its alignment, chance and projected_sq_norm (the
        post's measure of contribution) beside them. Raises ``InputError`` if it is of another.
        """
        axes = {"source": self.sources, "layer": self.layers}
        frame = long_frame(self.roles, axes, ("share", "stderr", "half_width"))
        if alignment is None:
            return frame
        arguments.same_model("alignment", self.provenance, alignment.provenance)
        other = alignment.to_dataframe()
        other = other[other["threshold"] == alignment.thresholds[0]]
        keys = ["role", "source", "layer", "head"]
        return frame.merge(
            other[[*keys, "alignment", "chance", "projected_sq_norm"]], on=keys, how="left"
        )

    def embedding_frame(self) -> pd.DataFrame:
        """One row per layer: rest_cosine and kept, with their standard errors."""
        fate = self.embedding
        columns = {
            key: getattr(fate, key).numpy()
            for key in ("rest_cosine", "rest_cosine_stderr", "kept", "kept_stderr")
        }
        return pd.DataFrame({"layer": self.layers, **columns})


@torch.inference_mode(False)  # as in analyze_value_alignment
@torch.no_grad()
def contribution_shares(
    model: Any,
    data: Any = None,
    *,
    roles: Sequence[str] = ("Q", "K", "V"),
    layers: Sequence[int] | None = None,
    attention_mask: Any = None,
    skip_first: bool = False,
    batch_size: int = 8,
    max_tokens: int | None = None,
    device: Any = None,
    progress: bool = True,
) -> ContributionResult:
    """Exact signed share of every source in each head's query, key and value vectors.

    Shares are ratios of sums over tokens, Σ_t ⟨v_s, v⟩ / Σ_t ⟨v, v⟩: a token whose vector is
    nearly zero, as at an attention sink, would otherwise swamp a mean of ratios. Sources are the
    embedding, positions where they are added, every attention and MLP output, and the bias.

    Args: as in :func:`tl_valuealign.analyze_value_alignment`; roles any of "Q", "K", "V".

    Raises:
        InputError: an argument or the text cannot be used.
        ModelError: the model has no readable heads, or adds positions to queries and keys alone.
        SelfCheckError: streams or matrices do not reproduce the model's own activations.
    """
    opened = open_session(
        model,
        data,
        roles=roles,
        allowed_roles=("Q", "K", "V"),
        layers=layers,
        attention_mask=attention_mask,
        skip_first=skip_first,
        batch_size=batch_size,
        max_tokens=max_tokens,
        device=device,
        progress=progress,
    )
    with opened as session:
        plan = StreamPlan(session.view, (*COMPONENTS, MIXER), session.layers)
        meter = ShareMeter(session, plan, head_readers(session))
        for batch in session.batches():
            meter.add(batch)
    session.require_tokens(meter.n_tokens)
    facts = session.model_facts() | session.text_facts(meter.n_tokens, meter.n_sequences)
    return _result(meter, facts)


def _result(meter: ShareMeter, facts: dict[str, Any]) -> ContributionResult:
    roles = {}
    for role, totals in meter.shares.items():
        heads = meter.session.view.n_heads(role)
        empty = torch.full((len(meter.plan.labels) + 1, heads), torch.nan).double()
        parts = {
            key: [getattr(total, key)() if total.n_sequences else empty for total in totals]
            for key in ("ratio", "stderr", "half_width")
        }
        squared = [
            total.denominator()[0] / meter.n_tokens if total.n_sequences else empty[0]
            for total in totals
        ]
        errors = [meter.readers[role][layer].rebuild_error for layer in meter.plan.layers]
        roles[role] = RoleShares(
            share=torch.stack(parts["ratio"], 1),
            stderr=torch.stack(parts["stderr"], 1),
            half_width=torch.stack(parts["half_width"], 1),
            sq_norm=torch.stack(squared),
            rebuild_error=torch.tensor(errors, dtype=torch.float64),
        )
    missing = torch.full((1,), torch.nan).double()
    cosine = {
        key: torch.cat(
            [getattr(total, key)() if total.n_sequences else missing for total in meter.cosine]
        )
        for key in ("ratio", "stderr", "half_width")
    }
    return ContributionResult(
        roles=roles,
        sources=(*meter.plan.labels, BIAS),
        layers=meter.plan.layers,
        embedding=EmbeddingFate(
            rest_cosine=cosine["ratio"],
            rest_cosine_stderr=cosine["stderr"],
            rest_cosine_half_width=cosine["half_width"],
            kept=meter.kept.ratio(),
            kept_stderr=meter.kept.stderr(),
            pull=meter.pull.ratio(),
            pull_stderr=meter.pull.stderr(),
        ),
        n_sequences=meter.n_sequences,
        provenance=facts,
    )

"""Compared with what? Sampled nulls that know more than "a random direction" does.

The closed form of :mod:`tl_valuealign.chance` asks how a direction drawn evenly from the whole
space would score. Real streams fill that space unevenly, so two further questions are asked:

``covariance``: how would a subspace score that follows what varies in the stream, spanned by k
vectors from N(0, Cov x̂)? (Elsayed et al. 2016, "Reorganization between preparatory and movement
population responses in motor cortex", use such subspaces as the null of their alignment index.) A
head above it seeks what this stream does most; far below it, avoids it.

``second-moment``: the same through E x̂x̂ᵀ, the mean not taken out. Where the tokens of a stream
share a direction, as they do in most models, nearly every such subspace holds it.

``other-heads``: how does the same stream score with every other head of the same role, each cut to
as many directions? A head above it is tuned to this stream more than its peers are.
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
from tl_valuealign.readin import decompose_role
from tl_valuealign.result import FULL
from tl_valuealign.sampled import Reservoir, Sampled
from tl_valuealign.session import Session, open_session
from tl_valuealign.shapes import (
    COMPONENTS,
    METRICS,
    ROLES,
    PerThresholdSource,
    check_fields,
)
from tl_valuealign.spectra import count_directions
from tl_valuealign.streams import MIXER, StreamPlan
from tl_valuealign.tokens import Batch

NULLS = ("covariance", "second-moment", "other-heads")


@dataclass(frozen=True)
class RoleNull:
    """One role against a null, float64; NaN where a source is not upstream or a head is zero.

    observed: alignment on the sampled tokens. expected, spread: mean and standard deviation of the
    null. percentile: share of the null below the observed figure, ties counted half.
    """

    observed: PerThresholdSource
    expected: PerThresholdSource
    spread: PerThresholdSource
    percentile: PerThresholdSource

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def relative(self) -> PerThresholdSource:
        """Observed over expected: 1 on the null, as ``relative=True`` of figures is on chance."""
        return self.observed / self.expected


@dataclass(frozen=True)
class NullResult:
    """Alignments beside a sampled null; ``.V`` is a :class:`RoleNull`.

    ``sources`` label the source axis (``"full"`` may be one). n_tokens: how many were sampled.
    """

    roles: dict[str, RoleNull]
    sources: tuple[str, ...]
    layers: tuple[int, ...]
    thresholds: tuple[float, ...]
    metric: str
    null: str
    n_tokens: int
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        check_fields(self)

    def role(self, name: str) -> RoleNull:
        """One role. Raises ``InputError`` naming the roles that were measured."""
        return self.roles[arguments.measured(name, self.roles)]

    @property
    def Q(self) -> RoleNull:
        return self.role("Q")

    @property
    def K(self) -> RoleNull:
        return self.role("K")

    @property
    def V(self) -> RoleNull:
        return self.role("V")

    @property
    def OV(self) -> RoleNull:
        return self.role("OV")

    def to_dataframe(self) -> pd.DataFrame:
        """One row per role, threshold, source, layer and head: observed, expected, spread,
        percentile, relative."""
        axes = {"threshold": self.thresholds, "source": self.sources, "layer": self.layers}
        keys = ("observed", "expected", "spread", "percentile", "relative")
        return long_frame(self.roles, axes, keys)


@torch.inference_mode(False)  # as in analyze_value_alignment
@torch.no_grad()
def null_alignment(
    model: Any,
    data: Any = None,
    *,
    null: str = "covariance",
    sources: Sequence[str] = ("embed", FULL),
    roles: Sequence[str] = ("Q", "K", "V"),
    thresholds: Sequence[float] = (0.9, 0.5),
    metric: str = "norm",
    layers: Sequence[int] | None = None,
    attention_mask: Any = None,
    skip_first: bool = False,
    batch_size: int = 8,
    max_tokens: int | None = None,
    sample: int = 1024,
    draws: int = 64,
    seed: int = 0,
    progress: bool = True,
) -> NullResult:
    """Alignment of some streams beside a null that is sampled rather than in closed form.

    Args:
        model, data, roles, thresholds, metric, layers and the rest: as in
            :func:`tl_valuealign.analyze_value_alignment`.
        null: "covariance", "second-moment" or "other-heads" (see the module's introduction).
        sources: "embed", "full", "3_attn_out", ….
        sample: tokens, drawn evenly from the text with a fixed seed, that everything is computed
            on; they are held in memory for every stream.
        draws: subspaces per stream of the first two; at least 2.
        seed: of the subspaces.

    Raises:
        InputError: an argument or the text cannot be used.
        ModelError, SelfCheckError: as ``analyze_value_alignment``.
    """
    arguments.choices("null", (null,), NULLS)
    arguments.choices("metric", (metric,), METRICS)
    thresholds = arguments.shares("thresholds", thresholds)
    sample, draws = arguments.count("sample", sample), arguments.count("draws", draws)
    if draws < 2:
        raise InputError("draws: one subspace has no spread; draw 2 or more")
    if sample < 2:
        raise InputError("sample: one token has no distribution; sample 2 or more")
    opened = open_session(
        model,
        data,
        roles=roles,
        allowed_roles=ROLES,
        layers=layers,
        attention_mask=attention_mask,
        skip_first=skip_first,
        batch_size=batch_size,
        max_tokens=max_tokens,
        device=None,
        progress=progress,
    )
    sources, seed = arguments.texts("sources", sources), arguments.seed("seed", seed)
    n_sequences = 0
    with opened as session:
        simple = set(sources) <= {"embed", "pos_embed", FULL}
        components = () if simple else (*COMPONENTS, MIXER)
        plan = StreamPlan(session.view, components, session.layers)
        labels = arguments.choices("sources", sources, (*plan.labels, FULL))
        heads = {
            role: [
                decompose_role(session.view, role, layer, norm)
                for layer, norm in session.verified.norms.items()
            ]
            for role in session.roles
        }
        reservoir = Reservoir(sample)
        for batch in session.batches():
            n_sequences += int(batch.keep.any(1).sum())
            reservoir.add(batch, _wanted(session, plan, labels, batch))
    session.require_tokens(reservoir.n_seen)
    counts = {
        role: torch.stack(
            [
                torch.stack([count_directions(svd.singular_values, share) for svd in found])
                for share in thresholds
            ]
        ).cpu()
        for role, found in heads.items()
    }
    shape = (len(thresholds), len(labels), len(session.layers))
    found = {
        role: torch.full((4, *shape, k.shape[-1]), torch.nan, dtype=torch.float64)
        for role, k in counts.items()
    }
    generator = torch.Generator().manual_seed(seed)
    for number, label in enumerate(labels):
        for places, tokens in reservoir.streams(plan, label):
            stream = Sampled(tokens, metric)
            drawn = None
            if null != "other-heads":
                most = max(int(k.max()) for k in counts.values())
                drawn = torch.stack(
                    [
                        stream.random_subspace(most, generator, centred=null == "covariance")
                        for _ in range(draws)
                    ]
                )
            for role in session.roles:
                directions = [svd.directions for svd in heads[role]]
                _against(found[role][:, :, number], counts[role], stream, places, directions, drawn)
    return NullResult(
        roles={role: RoleNull(*values) for role, values in found.items()},
        sources=labels,
        layers=session.layers,
        thresholds=thresholds,
        metric=metric,
        null=null,
        n_tokens=reservoir.n_held,
        provenance=session.model_facts() | session.text_facts(reservoir.n_seen, n_sequences),
    )


def _wanted(
    session: Session, plan: StreamPlan, labels: Sequence[str], batch: Batch
) -> dict[tuple[str, int], Tensor]:
    """x̄ [token, d_model] of the wanted streams; full streams by place on the layer axis."""
    norm = next(iter(session.verified.norms.values()))
    streams = {}
    for number, activation, places in plan.read(batch):
        label = FULL if number == len(plan.labels) else plan.labels[number]
        if label in labels:
            kept = activation[batch.keep.to(activation.device)]
            session.require_finite_tokens(label, kept)
            key = (label, places[0] if label == FULL else 0)
            streams[key] = norm.centre(kept.to(session.view.compute_dtype)).cpu()
    return streams


def _against(
    found: Tensor,
    counts: Tensor,
    stream: Sampled,
    places: Sequence[int],
    directions: Sequence[Tensor],
    drawn: Tensor | None,
) -> None:
    """Fill [figure, threshold, layer, head] at ``places`` from the null's scores by k.

    ``drawn`` [draw, k] are scores of random subspaces; None: of every other head.
    """
    own = torch.stack([stream.scores(block) for block in directions])  # [layer, head, k]
    n_heads = own.shape[1]
    for place in places:
        for head in range(n_heads):
            for threshold, k in enumerate(counts[:, place, head].tolist()):
                if k == 0:
                    continue
                observed = own[place, head, k - 1]
                if drawn is None:
                    others = own[:, :, k - 1].flatten()
                    null = torch.cat(
                        [others[: place * n_heads + head], others[place * n_heads + head + 1 :]]
                    )
                    null = null[~null.isnan()]
                else:
                    null = drawn[:, k - 1]
                below = (null < observed).double() + 0.5 * (null == observed).double()
                found[:, threshold, place, head] = torch.stack(
                    [observed, null.mean(), _spread(null), below.mean()]
                )


def _spread(values: Tensor) -> Tensor:
    """Standard deviation; NaN for a single value."""
    return values.std() if len(values) > 1 else values.new_tensor(torch.nan)

"""Does it matter? Give chosen heads another input and see what the next-token loss makes of it.

The input of a head's value (or query, or key) is replaced by one stream alone, normed by its own
size as the block's input norm would: v' = (x̄_s / s(x_s)) A + b instead of v. Everything after the
head runs on. The model never met such inputs in training, so a change of loss says that the head
as it stands uses what was taken away, not that a model trained without it would miss it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from tl_valuealign import arguments
from tl_valuealign.editing import next_token_losses
from tl_valuealign.errors import InputError
from tl_valuealign.intervals import RatioSums
from tl_valuealign.session import Session, open_session
from tl_valuealign.shapes import check_fields
from tl_valuealign.substitution import Substitution

BY = ("layer", "head", "set")

PerUnit = Float[Tensor, "unit"]


@dataclass(frozen=True)
class SubstitutionResult:
    """What substituting the input of some heads does to the next-token loss, in nats a token.

    units: what was substituted at once, "L3", "L3H7" or "set". delta: loss with the substitution
    minus loss without; stderr and half_width (of the 95% interval) pair the two by sequence, NaN
    under 8 sequences. unit_layers, unit_heads: block and native head of a unit, None for "all of
    them". base_loss: without substitution. self_error: largest change of a token's loss when every
    head got its own input back.
    """

    units: tuple[str, ...]
    unit_layers: tuple[int | None, ...]
    unit_heads: tuple[int | None, ...]
    delta: PerUnit
    stderr: PerUnit
    half_width: PerUnit
    base_loss: float
    roles: tuple[str, ...]
    source: str
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    self_error: float
    n_tokens: int
    n_sequences: int
    provenance: dict[str, Any]

    def __post_init__(self) -> None:
        check_fields(self)
        if not len(self.units) == len(self.unit_layers) == len(self.unit_heads) == len(self.delta):
            raise InputError("units, their layers, heads and deltas must be equally many")

    def to_dataframe(self) -> pd.DataFrame:
        """One row per unit: unit, layer, head, delta, stderr, low, high (of the 95% interval)."""
        return pd.DataFrame(
            {
                "unit": self.units,
                "layer": pd.array(self.unit_layers, dtype="Int64"),
                "head": pd.array(self.unit_heads, dtype="Int64"),
                "delta": self.delta.numpy(),
                "stderr": self.stderr.numpy(),
                "low": (self.delta - self.half_width).numpy(),
                "high": (self.delta + self.half_width).numpy(),
            }
        )


@torch.inference_mode(False)  # as in analyze_value_alignment
@torch.no_grad()
def substitute_input(
    model: Any,
    data: Any = None,
    *,
    roles: Sequence[str] = ("V",),
    source: str = "embed",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    by: str = "layer",
    attention_mask: Any = None,
    skip_first: bool = False,
    batch_size: int = 8,
    max_tokens: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> SubstitutionResult:
    """Change of the next-token loss when heads read one source instead of the whole stream.

    Args:
        model, data: as in :func:`tl_valuealign.analyze_value_alignment`. The ids of the whole text
            are held in memory.
        roles: whose input is replaced, any of "Q", "K", "V"; several at once go together.
        source: "embed", or another upstream source such as "3_attn_out"; "full" (the stream itself,
            which must change nothing); "mean" (the mean over tokens of the normed stream);
            "random" (a direction drawn anew for every token, as long as the normed stream).
        layers, heads: blocks and native head numbers to substitute; None for all.
        by: one unit per "layer", per "head", or all of them at once as a "set".
        skip_first: position 0 keeps its own input and its prediction does not count.
        seed: of the random directions.

    Every run first gives all heads their own input back (the loss must not change) and then a
    random one (it must).

    Raises:
        InputError: an argument or the text cannot be used, or the source is not upstream.
        ModelError: the model has no readable heads, or never fires the hooks.
        SelfCheckError: the substitution is not exact, or has no effect at all.
    """
    roles = arguments.choices("roles", roles, ("Q", "K", "V"))
    seed = arguments.seed("seed", seed)
    if by not in BY:
        raise InputError(f"by: {by!r} is unknown; use one of {', '.join(BY)}")
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
        device=None,
        progress=False,
    )
    with opened as session:
        chosen = _chosen_heads(session, heads, by)
        units = make_units(session.layers, session.view.n_heads(session.roles[0]), chosen, by)
        batches = list(session.batches())
        substitution = Substitution(session, source, chosen, seed)
        substitution.prepare(batches)
        self_error = substitution.prove()
        totals, base = [RatioSums() for _ in units], RatioSums()
        with tqdm(
            total=len(batches) * len(units),
            desc="substituting",
            unit=" runs",
            delay=1,
            disable=not progress,
        ) as bar:
            for batch in batches:
                counts = batch.keep[:, 1:] & batch.keep[:, :-1]
                counted = counts.sum(1, dtype=torch.float64)
                plain = next_token_losses(session.view, batch.ids, {})
                session.require_finite_tokens("the next-token loss", plain[counts])
                base.add(torch.where(counts, plain, 0).sum(1), counted)
                streams = substitution.streams(batch)
                for total, unit in zip(totals, units, strict=True):
                    edits = substitution.edits(batch.keep, streams, unit.layers, unit.heads)
                    losses = next_token_losses(session.view, batch.ids, edits)
                    what = f"the next-token loss with {unit.label} substituted"
                    session.require_finite_tokens(what, losses[counts])
                    total.add(torch.where(counts, losses - plain, 0).sum(1), counted)
                    bar.update()
    n_tokens = int(base.denominator()) if base.n_sequences else 0
    session.require_tokens(n_tokens)
    facts = session.model_facts() | session.text_facts(n_tokens, base.n_sequences)
    return SubstitutionResult(
        units=tuple(unit.label for unit in units),
        unit_layers=tuple(unit.layer for unit in units),
        unit_heads=tuple(unit.head for unit in units),
        delta=torch.stack([total.ratio() for total in totals]),
        stderr=torch.stack([total.stderr() for total in totals]),
        half_width=torch.stack([total.half_width() for total in totals]),
        base_loss=float(base.ratio()),
        roles=roles,
        source=source,
        layers=session.layers,
        heads=chosen,
        self_error=self_error,
        n_tokens=n_tokens,
        n_sequences=base.n_sequences,
        provenance=facts,
    )


@dataclass(frozen=True)
class Unit:
    """What is substituted at once: these heads (None: all) of these blocks."""

    label: str
    layers: tuple[int, ...]
    heads: tuple[int, ...] | None

    @property
    def layer(self) -> int | None:
        return None if self.label == "set" else self.layers[0]

    @property
    def head(self) -> int | None:
        return self.heads[0] if self.heads and "H" in self.label else None


def make_units(
    layers: Sequence[int], n_heads: int, heads: tuple[int, ...] | None, by: str
) -> list[Unit]:
    """One unit per layer or per head, or one for everything."""
    if by == "set":
        return [Unit("set", tuple(layers), heads)]
    if by == "layer":
        return [Unit(f"L{layer}", (layer,), heads) for layer in layers]
    numbers = range(n_heads) if heads is None else heads
    return [Unit(f"L{layer}H{head}", (layer,), (head,)) for layer in layers for head in numbers]


def _chosen_heads(session: Session, heads: Sequence[int] | None, by: str) -> tuple[int, ...] | None:
    counts = {role: session.view.n_heads(role) for role in session.roles}
    if len(set(counts.values())) > 1 and (heads is not None or by == "head"):
        raise InputError(
            f"roles {', '.join(f'{role} ({n} heads)' for role, n in counts.items())} do not share "
            f"their heads; substitute them one at a time, or whole blocks with by='layer'"
        )
    return arguments.heads("heads", heads, next(iter(counts.values())))

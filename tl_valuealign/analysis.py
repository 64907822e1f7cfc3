"""``analyze_value_alignment``: orchestration only. What each step means is in the other modules."""

from collections.abc import Sequence
from typing import Any

import torch

from tl_valuealign import arguments
from tl_valuealign.cached import CachedStreams
from tl_valuealign.engines import TokenEngine
from tl_valuealign.readin import decompose_blocks
from tl_valuealign.result import ValueAlignmentResult, assemble
from tl_valuealign.session import open_session
from tl_valuealign.shapes import COMPONENTS, METRICS, ROLES
from tl_valuealign.streams import StreamPlan


def analyze_value_alignment(
    model: Any,
    data: Any = None,
    *,
    roles: Sequence[str] = ("Q", "K", "V"),
    components: Sequence[str] = ("attn_out",),
    thresholds: Sequence[float] = (0.9, 0.5),
    metric: str = "norm",
    layers: Sequence[int] | None = None,
    attention_mask: Any = None,
    cache: Any = None,
    skip_first: bool = False,
    batch_size: int = 8,
    max_tokens: int | None = None,
    device: Any = None,
    progress: bool = True,
) -> ValueAlignmentResult:
    """Measure how much of every stream lies along every head's input directions.

    The method is that of He (2026), "The importance of token embeddings to value vectors".

    Args:
        model: HookedTransformer or TransformerBridge. Its weights, hooks, training flags and
            configuration are left as they were.
        data: None for the bundled passages (seeded random ids where the model has no tokenizer),
            a string, a list of strings, ids [batch, pos] or [pos], or an iterable of these, which
            is read as a stream. Strings get the model's BOS in front if they lack it, and are cut
            into windows of at most 1,024 tokens.
        roles: any of "Q", "K", "V" (the read-in matrices) and "OV" (A W_O per query head).
        components: what to measure beside the embedding: "attn_out", "mlp_out" or both.
        thresholds: shares of the squared singular values that the kept directions carry, in (0, 1].
        metric: "norm" (mean ‖Uᵀx̄‖/‖x̄‖), "energy" (mean of its square) or "pooled" (ratio of sums).
        layers: target blocks; None for all that have attention.
        attention_mask: with an ids tensor, 1 for text and 0 for padding on either side.
        cache: an ``ActivationCache`` of this model on ``data``, which must then be the very ids
            [batch, pos] or [pos] that it was computed from (with their mask): its activations are
            read instead of running the model again. It is checked against the model, whose
            embedding runs on all ids and whose blocks run on two sequences.
        skip_first: leave position 0 of every sequence out of every mean, as a control for
            attention sinks.
        batch_size: sequences per forward pass.
        max_tokens: read exactly this many tokens, prepended BOS included; None for all.
        device: where directions and sums live; None for the model's device.
        progress: a bar on stderr for work over a second.

    Raises:
        InputError: an argument or the text cannot be used.
        ModelError: the model has no readable heads, or has NaN or infinite weights.
        SelfCheckError: the streams or matrices do not reproduce the model's own activations.
    """
    components = arguments.choices("components", components, COMPONENTS, empty=True)
    arguments.choices("metric", (metric,), METRICS)
    thresholds = arguments.shares("thresholds", thresholds)
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
        device=device,
        progress=progress,
    )
    with opened as session:
        view, verified = session.view, session.verified
        plan = StreamPlan(view, components, session.layers)
        blocks, spectra = decompose_blocks(
            view, verified.norms, session.roles, thresholds, metric, progress=progress
        )
        engine = TokenEngine(
            blocks,
            session.roles,
            len(plan.labels),
            centred=verified.centred,
            dtype=view.compute_dtype,
            device=session.place,
        )
        held = None
        if cache is not None:
            held = CachedStreams(view, cache, data, attention_mask, plan.names)
            held.verify(plan.last)
        for batch in session.batches():
            engine.start_batch(batch)
            cached = None if held is None else held.take(batch)
            for stream, activations, readers in plan.read(batch, cached):
                engine.add(stream, activations, readers)
    session.require_tokens(engine.n_tokens)
    sums = engine.finish(plan.upstream)
    text = session.text_facts(sums.n_tokens, sums.n_sequences) | {
        "zero_norm_tokens": sums.zero_norm_tokens()[:, 0].to(torch.int64).tolist(),
    }
    return assemble(
        spectra,
        sums,
        sources=plan.labels,
        layers=session.layers,
        thresholds=thresholds,
        metric=metric,
        checks=verified.checks,
        provenance=session.model_facts()
        | text
        | {"engine": "tokens", "from_cache": held is not None},
    )

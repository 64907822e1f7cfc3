"""``analyze_value_alignment``: orchestration only. What each step means is in the other modules."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tl_valuealign import arguments, budget, distributed
from tl_valuealign.cached import CachedStreams
from tl_valuealign.engines import TokenEngine
from tl_valuealign.extremes import ExtremeTracker
from tl_valuealign.moments import MomentEngine, MomentSums
from tl_valuealign.readin import Decomposition
from tl_valuealign.result import ValueAlignmentResult, assemble
from tl_valuealign.session import open_session
from tl_valuealign.shapes import COMPONENTS, METRICS, ROLES
from tl_valuealign.spectra import Directions
from tl_valuealign.streams import StreamPlan


@torch.inference_mode(False)  # a caller's inference mode would mark every tensor of the result
@torch.no_grad()
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
    keep_moments: bool = False,
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
            into windows of at most 1,024 tokens. Every window counts as a sequence of its own.
        roles: any of "Q", "K", "V" (the read-in matrices) and "OV" (A W_O per query head).
        components: what to measure beside the embedding: "attn_out", "mlp_out" or both.
        thresholds: shares of the squared singular values that the kept directions carry, in (0, 1].
        metric: "norm" (mean ‖Uᵀx̄‖/‖x̄‖), "energy" (mean of its square) or "pooled" (ratio of sums).
            The last two are read from second moments, which is faster and keeps nothing per
            sequence: their standard errors and tests are NaN. Run "norm" and ask the result
            ``.with_metric("energy")`` for the same figures with errors.
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
        keep_moments: keep Σ x̄x̄ᵀ of every stream and the directions of all roles in the result
            (d² floats of 8 bytes a stream, twice), so that :meth:`ValueAlignmentResult.ask` can
            answer for other thresholds and roles, and ``subspace_alignment`` for any subspace.
        progress: a bar on stderr for work over a second.

    Raises:
        InputError: an argument or the text cannot be used.
        ModelError: the model has no readable heads, or has NaN or infinite weights.
        ResourceError: no engine fits the memory that is free; the message has the figures.
        SelfCheckError: the streams or matrices do not reproduce the model's own activations.

    Example: the bundled model on its first 500 tokens.

        >>> import tl_valuealign as va
        >>> result = va.analyze_value_alignment(va.pocket_model(), max_tokens=500, progress=False)
        >>> result.V.full.shape  # threshold, layer, head
        torch.Size([2, 8, 4])
        >>> result.sources[:3]
        ('embed', '0_attn_out', '1_attn_out')
        >>> float(result.checks.decomposition.max()) < result.checks.decomposition_tolerance
        True
    """
    components = arguments.choices("components", components, COMPONENTS, empty=True)
    arguments.choices("metric", (metric,), METRICS)
    thresholds = arguments.shares("thresholds", thresholds)
    roles = arguments.choices("roles", roles, ROLES)
    opened = open_session(
        model,
        data,
        roles=ROLES if keep_moments else roles,
        allowed_roles=ROLES,
        layers=layers,
        attention_mask=attention_mask,
        skip_first=skip_first,
        batch_size=batch_size,
        max_tokens=max_tokens,
        device=device,
        progress=progress,
        share=distributed.share(),
    )
    with opened as session:
        view, verified = session.view, session.verified
        plan = StreamPlan(view, components, session.layers)
        memory = budget.choose(
            metric,
            keep_moments=keep_moments,
            d_model=view.d_model,
            n_sources=len(plan.labels),
            n_layers=len(session.layers),
            heads=[(view.n_heads(role), view.d_head(role)) for role in session.roles],
            n_thresholds=len(thresholds),
            dtype=view.compute_dtype,
            place=session.place,
            batch_tokens=0 if session.first is None else session.first.ids.numel(),
            model_device=view.device,
        )
        decomposition = Decomposition(
            view, verified.norms, session.roles, thresholds, progress=progress
        )
        # Second moments ask for directions when all text has been read; tokens need them at once.
        blocks: Iterable[Sequence[Directions]] = decomposition
        if memory.rebuilt:
            blocks = decomposition.rebuilt()
        everything: list[Sequence[Directions]] = []
        if keep_moments or memory.engine == "tokens":
            everything = list(blocks)
            places = [session.roles.index(role) for role in roles]
            blocks = [[block[place] for place in places] for block in everything]
        moments = MomentSums(
            view.d_model,
            len(plan.labels),
            len(session.layers),
            kinds=memory.kinds,
            device=memory.home,
        )
        shapes = [(len(thresholds), view.n_heads(role)) for role in roles]
        engine: TokenEngine | MomentEngine
        if memory.engine == "moments":
            engine = MomentEngine(
                blocks,
                roles,
                moments,
                centred=verified.centred,
                dtype=view.compute_dtype,
                device=session.place,
            )
        else:
            engine = TokenEngine(
                list(blocks),
                roles,
                len(plan.labels),
                centred=verified.centred,
                dtype=view.compute_dtype,
                device=session.place,
                moments=moments if memory.kinds else None,
                watch=ExtremeTracker(roles, shapes, len(session.layers), view.d_vocab),
            )
        held = None
        if cache is not None:
            share = distributed.share()
            held = CachedStreams(view, cache, data, attention_mask, plan.names, share)
            held.verify(plan.last)
        for batch in session.batches():
            cached = None if held is None else held.take(batch)
            if not bool(batch.keep.any()):  # rows of one token, and position 0 is left out
                continue
            engine.start_batch(batch)
            for stream, activations, readers in plan.read(batch, cached):
                engine.add(stream, activations, readers)
        distributed.add_up(engine.additive())
        session.require_tokens(engine.n_tokens)
        sums = engine.finish(plan.upstream)
        session.require_finite(sums.norms, plan.labels)
        kept = moments.kept(everything, session.roles) if keep_moments else None
        spectra = decomposition.spectra(metric)
    extremes = None if engine.watch is None else engine.watch.finish(view.tokenizer)
    text = session.text_facts(sums.n_tokens, sums.n_sequences) | {
        "zero_norm_tokens": sums.zero_norm_tokens()[:, 0].to(torch.int64).tolist(),
    }
    run = {
        "engine": memory.engine,
        "memory": str(memory),
        "intervals": engine.withheld,
        "processes": distributed.share()[1],
        "from_cache": held is not None,
    }
    return assemble(
        {role: spectra[role] for role in roles},
        sums,
        sources=plan.labels,
        layers=session.layers,
        thresholds=thresholds,
        metric=metric,
        checks=verified.checks,
        extremes=distributed.merge(extremes),
        moments=kept,
        provenance=session.model_facts() | text | run,
    )

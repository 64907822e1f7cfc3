"""``analyze_value_alignment``: orchestration only. What each step means is in the other modules."""

import itertools
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from tqdm import tqdm

from tl_valuealign import arguments, tokens
from tl_valuealign._version import VERSION
from tl_valuealign.adapter import ModelView
from tl_valuealign.engines import TokenEngine
from tl_valuealign.errors import InputError
from tl_valuealign.readin import decompose_blocks
from tl_valuealign.result import ValueAlignmentResult, assemble
from tl_valuealign.selfcheck import Verified, verify
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
    view = ModelView(model)
    roles = arguments.choices("roles", roles, ROLES)
    components = arguments.choices("components", components, COMPONENTS, empty=True)
    arguments.choices("metric", (metric,), METRICS)
    thresholds = arguments.shares("thresholds", thresholds)
    layers = arguments.blocks("layers", layers, view.attention_layers, view.n_layers)
    batch_size = arguments.count("batch_size", batch_size)
    max_tokens = None if max_tokens is None else arguments.count("max_tokens", max_tokens)
    place = arguments.device("device", device, view.device)
    corpus = tokens.read(
        data,
        tokenizer=view.tokenizer,
        prepend_bos=view.prepends_bos,
        n_ctx=view.n_ctx,
        d_vocab=view.d_vocab,
        attention_mask=attention_mask,
    )
    batches = corpus.batches(batch_size, max_tokens)
    plan = StreamPlan(view, components, layers)
    with view.quiet():
        first = next(batches)
        verified = verify(view, first.ids, first.keep, layers, roles)
        blocks, spectra = decompose_blocks(
            view, verified.norms, roles, thresholds, metric, progress=progress
        )
        engine = TokenEngine(
            blocks,
            roles,
            len(plan.labels),
            centred=verified.centred,
            dtype=view.compute_dtype,
            device=place,
        )
        with tqdm(desc="reading", unit=" tokens", delay=1, disable=not progress) as bar:
            for batch in itertools.chain((first,), batches):
                bar.update(int(batch.keep.sum()))
                engine.start_batch(batch.without_first() if skip_first else batch)
                for stream, activations, readers in plan.read(batch):
                    engine.add(stream, activations, readers)
    if not engine.n_tokens:
        raise InputError(
            f"no tokens left of {corpus.description}: skip_first=True leaves position 0 out and "
            f"every sequence has just one; pass longer text"
        )
    sums = engine.finish(plan.upstream)
    text = {
        "text": [corpus.description],
        "text_hash": corpus.digest.hexdigest(),
        "n_tokens": sums.n_tokens,
        "n_sequences": sums.n_sequences,
        "n_tokens_read": corpus.n_tokens,
        "n_items_split_into_windows": corpus.n_split,
        "bos_id": corpus.bos,
        "n_bos_prepended": corpus.n_prepended,
        "skip_first": skip_first,
        "zero_norm_tokens": sums.zero_norm_tokens()[:, 0].to(torch.int64).tolist(),
    }
    return assemble(
        spectra,
        sums,
        sources=plan.labels,
        layers=layers,
        thresholds=thresholds,
        metric=metric,
        checks=verified.checks,
        provenance=_model_facts(view, verified) | text | {"engine": "tokens"},
    )


def _model_facts(view: ModelView, verified: Verified) -> dict[str, Any]:
    """What was measured, with what, and in which state it was found."""
    return {
        "model_name": view.name,
        "model_class": type(view.model).__name__,
        "model_hash": view.model_hash(),
        "n_layers": view.n_layers,
        "n_heads": view.n_heads("Q"),
        "n_key_value_heads": view.n_heads("V"),
        "d_model": view.d_model,
        "d_head": view.d_head("V"),
        "readable_dim": view.d_model - verified.centred,
        "input_norm": sorted({norm.describe() for norm in verified.norms.values()}),
        "dtype": str(view.dtype).removeprefix("torch."),
        "device": str(view.device),
        "versions": {"tl_valuealign": VERSION}
        | {name: version(name) for name in ("transformer-lens", "transformers", "torch")},
    }

"""An independent oracle for tl_valuealign: module hooks, numpy float64, one loop per head.

Nothing here is shared with the package and neither the package nor transformer_lens is imported.
The model under test is a plain module: a transformers model, TransformerLens's NativeModel or a
HookedTransformer. It is copied, cast to float64 and run in a mode that keeps every inner cast
(norms and softmax like to fall back to float32) in float64, so its streams are exact to about
1e-14 and any difference from the package is the package's own.

    out = oracle.run(model, ids)                     # ids [batch, pos]
    out.labels                                       # ["embed", "pos_embed"?, "0_attn_out", ...]
    out.streams["0_attn_out"], out.resid[layer]      # [batch, pos, d]
    out.layers, out.upstream[layer]                  # blocks that attend; labels before a block
    out.V.A, out.V.b                                 # [row, head, d, d_head]; rows are out.layers
    out.V.s, out.V.U, out.V.rank                     # [row, head, direction], ..., [row, head]
    out.V.k, out.V.chance["norm"]                    # [threshold, row, head]
    out.V.full["norm"], out.V.boxes["norm"]          # [threshold, row, head]
    out.V.by_source["norm"]                          # [threshold, source, row, head]; NaN: not yet
    out.V.projected, out.V.projected_full            # [source, row, head], [row, head]
    out.norms, out.full_norms                        # [source], [row]
    out.dropped                                      # {label or ("full", layer): zero tokens}
    out.checks.decomposition, out.checks.read_in     # [layer], {role: [row]}

A role that is not linear in the stream (K under MLA) is absent. In blocks without attention the
mixer's write is labelled "{j}_mixer_out".
"""

import math
from types import SimpleNamespace

import numpy as np
import oracle_families
import torch
from oracle_capture import array, capture, config_of, double, exact, stored_dtype

__all__ = [
    "METRICS",
    "ROLES",
    "align",
    "array",
    "chance",
    "directions",
    "double",
    "exact",
    "read_in",
    "read_in_error",
    "run",
    "scale_of",
    "value_output",
    "visible",
]

ROLES = ("Q", "K", "V", "OV")
METRICS = ("norm", "energy", "pooled")


def read_in(attention, role):
    """A [head, d, d_head] and constant b [head, d_head], with head = (x̄/s) A + b; None if the
    role is not linear in the stream."""
    for pack in attention.packs:
        if role in pack.W:
            A = [attention.gain[:, None] * W for W in pack.W[role]]
            if attention.norm == "LN":
                A = [W - W.mean(0) for W in A]
            b = [attention.offset @ W + b for W, b in zip(pack.W[role], pack.b[role], strict=True)]
            return np.stack(A), np.stack(b)
    return None


def value_output(attention, A):
    """A W_O per query head, [head, d, d], from the value heads' A [kv head, d, d_head].

    Under LayerNorm the mean of what is written is invisible to every later reader, so W_O is
    centred here, as TransformerLens's processing does and the raw weights do not."""
    heads, made = len(attention.W_O), []
    for h in range(heads):
        W_O = attention.W_O[h]
        if attention.norm == "LN":
            W_O = W_O - W_O.mean(1, keepdims=True)
        made.append(A[h * len(A) // heads] @ W_O)
    return np.stack(made)


def visible(x, norm):
    """x̄: what a head behind this norm can see of x."""
    return x - x.mean(-1, keepdims=True) if norm == "LN" else x


def scale_of(x, attention):
    """The norm's per-token divisor s(x), [batch, pos, 1]."""
    if attention.norm == "none":
        return np.ones(x.shape[:-1] + (1,))
    return np.sqrt((visible(x, attention.norm) ** 2).mean(-1, keepdims=True) + attention.eps)


def directions(A, thresholds, dtype, width):
    """U [d, r], s [r], [k per threshold], numerical rank of one head; `width` is d_head."""
    U, s, _ = np.linalg.svd(A, full_matrices=False)
    U, s = U[:, :width], s[:width]
    total, ks = (s**2).sum(), []
    for threshold in thresholds:
        reached, k = 0.0, 0
        while total > 0 and k < len(s) and reached < threshold * total * (1 - 1e-12):
            reached += s[k] ** 2
            k += 1
        ks.append(k)
    half = dtype in (torch.float16, torch.bfloat16)
    cut = s[0] * torch.finfo(dtype).eps * (1 if half else max(len(A), width))
    return U, s, ks, int((s > cut).sum()) if total > 0 else 0


def chance(k, d):
    """Expected alignment of a uniformly random direction of a d-dimensional space."""
    if k == 0:
        return dict.fromkeys(METRICS, math.nan)
    log = math.lgamma
    norm = math.exp(log((k + 1) / 2) + log(d / 2) - log(k / 2) - log((d + 1) / 2))
    return {"norm": norm, "energy": k / d, "pooled": k / d}


def align(x, basis):
    """{metric: value} of tokens x [token, d] with an orthonormal basis [d, k]."""
    x = x[np.linalg.norm(x, axis=1) > 0]
    if basis.shape[1] == 0 or len(x) == 0:
        return dict.fromkeys(METRICS, math.nan)
    inside, whole = ((x @ basis) ** 2).sum(1), (x**2).sum(1)
    return {
        "norm": np.sqrt(inside / whole).mean(),
        "energy": (inside / whole).mean(),
        "pooled": inside.sum() / whole.sum(),
    }


def run(
    model,
    ids,
    *,
    keep=None,
    skip_first=False,
    thresholds=(0.9, 0.5),
    roles=ROLES,
    layers=None,
    **forward,
):
    """Everything of the module's docstring for ids [batch, pos] (int tensor).

    keep [batch, pos]: tokens that count (all by default). It is *not* an attention mask: give
    attention_mask and position_ids, which go to the model, by name. Raises KeyError for a family
    that the oracle does not know, ValueError for a configuration that it refuses.
    """
    dtype = stored_dtype(model)
    model = double(model)
    family = oracle_families.find(model)
    blocks = family.blocks(model)
    attentions = {
        layer: made
        for layer, block in enumerate(blocks)
        if (made := family.attention(block, config_of(model))) is not None
    }
    got = capture(model, family, ids, **forward)
    layers = sorted(attentions) if layers is None else list(layers)
    kept = np.ones(tuple(ids.shape), bool) if keep is None else np.array(keep, bool)
    if skip_first:
        kept[:, 0] = False

    streams = {"embed": got.resid[0] - (0 if got.pos is None else got.pos)}
    if got.pos is not None:
        streams["pos_embed"] = got.pos
    written = dict.fromkeys(streams, -1)
    for (layer, label), value in sorted(got.writes.items()):
        streams[f"{layer}_{label}"], written[f"{layer}_{label}"] = value, layer
    labels = list(streams)
    upstream = {layer: [name for name in labels if written[name] < layer] for layer in got.resid}

    norm = attentions[layers[0]].norm
    tokens = {name: visible(x, norm)[kept] for name, x in streams.items()}
    full = {layer: visible(got.resid[layer], norm)[kept] for layer in layers}
    out = SimpleNamespace(
        labels=labels,
        layers=layers,
        thresholds=thresholds,
        streams=streams,
        resid=got.resid,
        kept=kept,
        upstream=upstream,
        attentions=attentions,
        captured=got,
        model=model,
        ids=ids,
        norms=np.array([np.linalg.norm(tokens[name], axis=1).mean() for name in labels]),
        full_norms=np.array([np.linalg.norm(full[layer], axis=1).mean() for layer in layers]),
        dropped={
            name: int((np.linalg.norm(x, axis=1) == 0).sum())
            for name, x in [*tokens.items(), *((("full", layer), x) for layer, x in full.items())]
        },
    )
    out.checks = SimpleNamespace(
        read_in={},
        decomposition=np.array(
            [
                np.abs(sum(streams[name] for name in upstream[layer]) - got.resid[layer]).max()
                / np.abs(got.resid[layer]).max()
                for layer in sorted(got.resid)
            ]
        ),
    )
    for role in roles:
        made = _role(role, out, tokens, full, dtype)
        if made is None:
            continue
        setattr(out, role, made)
        if role != "OV":
            out.checks.read_in[role] = np.array([read_in_error(out, role, i) for i in layers])
    return out


def _role(role, out, tokens, full, dtype):
    rows = []
    for layer in out.layers:
        attention = out.attentions[layer]
        reads = read_in(attention, "V" if role == "OV" else role)
        if reads is None:
            return None
        A, b = reads
        width = A.shape[2]
        if role == "OV":
            A, b = value_output(attention, A), np.full((len(attention.W_O), 1), np.nan)
        rows.append(
            [_head(A[h], b[h], width, layer, out, tokens, full, dtype) for h in range(len(A))]
        )

    def stack(name, metric=None):
        """[..., row, head] of one figure of every head."""
        values = [
            [getattr(head, name) if metric is None else getattr(head, name)[metric] for head in row]
            for row in rows
        ]
        return np.array(values)

    def last(x, n):
        """Move the two leading axes (row, head) behind the n axes that follow them."""
        return np.moveaxis(x, (0, 1), (n, n + 1))

    made = SimpleNamespace(
        **{name: stack(name) for name in ("A", "b", "U", "s", "rank")},
        k=last(stack("k"), 1),
        projected=last(stack("projected"), 1),
        projected_full=stack("projected_full"),
    )
    for name, axes in (("chance", 1), ("full", 1), ("by_source", 2)):
        setattr(made, name, {m: last(stack(name, m), axes) for m in METRICS})
    made.boxes = {m: made.full[m] > made.by_source[m][:, 0] for m in METRICS}
    return made


def _head(A, b, width, layer, out, tokens, full, dtype):
    """All figures of one head."""
    U, s, ks, rank = directions(A, out.thresholds, dtype, width)
    space = len(A) - (out.attentions[layer].norm == "LN")
    nothing = dict.fromkeys(METRICS, math.nan)
    chances = [chance(k, space) for k in ks]
    fulls = [align(full[layer], U[:, :k]) for k in ks]
    sources = [
        [
            align(tokens[name], U[:, :k]) if name in out.upstream[layer] else nothing
            for name in out.labels
        ]
        for k in ks
    ]
    return SimpleNamespace(
        A=A,
        b=b,
        U=U,
        s=s,
        rank=rank,
        k=ks,
        projected=[
            ((tokens[name] @ A) ** 2).sum(1).mean() if name in out.upstream[layer] else math.nan
            for name in out.labels
        ],
        projected_full=((full[layer] @ A) ** 2).sum(1).mean(),
        chance={m: [c[m] for c in chances] for m in METRICS},
        full={m: [f[m] for f in fulls] for m in METRICS},
        by_source={m: [[a[m] for a in row] for row in sources] for m in METRICS},
    )


def read_in_error(out, role, layer):
    """max |(x̄/s) A + b - what the model's own projection put out| / max |that|."""
    attention, x = out.attentions[layer], out.resid[layer]
    A, b = read_in(attention, role)
    index, pack = next((i, p) for i, p in enumerate(attention.packs) if role in p.W)
    actual = pack.split(out.captured.projected[layer, index])[role]
    reading = visible(x, attention.norm) / scale_of(x, attention)
    if pack.latent_scale is not None:
        reading = reading / pack.latent_scale(reading * attention.gain + attention.offset)
    wanted = np.stack([reading @ A[h] + b[h] for h in range(len(A))], axis=2)
    if pack.beside is not None:
        wanted += np.stack([out.captured.beside @ W for W in pack.W[role]], axis=2)
    return np.abs(wanted - actual).max() / np.abs(actual).max()

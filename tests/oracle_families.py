"""What the oracle must know of each transformers family: where things are, and how they are packed.

Written from transformers' own model code and from nothing else. A family says which modules are
the blocks, which module outputs are written into the residual stream (and by what factor), which
norm stands before attention and how it stores its gain, and how the projections' output features
are laid out in heads. All arrays are numpy float64; features are always the last axis.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from torch import nn


@dataclass
class Pack:
    """One projection: where its output can be seen, how that splits, and the weights behind it.

    split(x) -> {role: [..., head, d_head]} cuts the output features of `module`, as views.
    W, b: {role: [head, d, d_head]}, {role: [head, d_head]}.
    latent_scale(x) -> [..., 1] where a norm of a latent stands in between (MLA); x is the input of
    the projection into the latent. The weights on both sides of that norm are in W.
    beside: a module whose output is added to this projection's input (shortformer positions).
    """

    module: nn.Module
    split: Callable
    W: dict
    b: dict
    latent_scale: Callable | None = None
    beside: nn.Module | None = None


@dataclass
class Attention:
    norm: str  # "LN", "RMS" or "none"
    gain: np.ndarray  # [d], as multiplied (a stored w that means 1+w is already 1+w)
    offset: np.ndarray  # [d]
    eps: float
    packs: list[Pack]
    W_O: np.ndarray  # [query head, d_head, d]
    b_O: np.ndarray  # [d]
    # Where the self-test can watch attention work:
    z: tuple  # (module, "input" or "output"): the heads' outputs side by side
    summed: nn.Module  # its output is the sum over heads of z W_O, plus b_O
    pattern: nn.Module  # its output, or the second of its outputs, is the pattern


@dataclass
class Family:
    """Paths are attribute paths: `stack` and `positions` from the model, the rest from a block."""

    stack: str
    norm: str | None
    kind: str  # "LN", "RMS" or "none"
    packs: Callable  # (block, config) -> list[Pack]
    out: str
    attn_write: str
    mlp_write: str | None
    attn: str = "self_attn"
    positions: str | None = None
    one_plus: bool = False
    factor: str | None = None  # config attribute that multiplies every write
    mixer: str | None = None  # what writes in the blocks without attention
    refuse: Callable = field(default=lambda config: None)

    def blocks(self, hf):
        return list(attrgetter(self.stack)(hf))

    def pos(self, hf):
        return attrgetter(self.positions)(hf) if self.positions else None

    def run(self, hf, ids, forward):
        return hf(input_ids=ids, use_cache=False, **forward)

    def attends(self, block):
        return self.mixer is None or not hasattr(block, self.mixer)

    def writes(self, block, config):
        """[(label, module whose output is the write, factor)]."""
        factor = getattr(config, self.factor) if self.factor else 1.0
        paths = [
            ("attn_out", self.attn_write) if self.attends(block) else ("mixer_out", self.mixer)
        ]
        if self.mlp_write:
            paths.append(("mlp_out", self.mlp_write))
        return [(label, attrgetter(path)(block), factor) for label, path in paths]

    def attention(self, block, config):
        if not self.attends(block):
            return None
        out = attrgetter(self.out)(block)
        W = weight(out)  # [head * d_head, d]
        d = W.shape[1]
        norm = attrgetter(self.norm)(block) if self.norm else None
        gain = getattr(norm, "weight", None)
        gain = np.ones(d) if gain is None else numpy(gain) + float(self.one_plus)
        bias = getattr(norm, "bias", None)
        eps = next(
            (getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)),
            1e-5,
        )  # OLMo's LayerNorm hard-codes 1e-5
        return Attention(
            self.kind,
            gain,
            np.zeros(d) if bias is None else numpy(bias),
            eps,
            self.packs(block, config),
            W.reshape(heads(config), -1, d),
            np.zeros(d) if out.bias is None else numpy(out.bias),
            (out, "input"),
            out,
            attrgetter(self.attn)(block),
        )


def numpy(tensor):
    return tensor.detach().double().cpu().numpy().copy()


def weight(module):
    """A linear module's matrix as [in, out]; GPT-2's Conv1D stores it so already."""
    W = numpy(module.weight)
    return W if type(module).__name__ == "Conv1D" else W.T


def heads(config):
    return getattr(config, "num_attention_heads", None) or config.n_heads


def kv_heads(config):
    return (
        getattr(config, "num_key_value_heads", None)
        or getattr(config, "n_key_value_heads", None)
        or heads(config)
    )


def linear(module, split, down=None, latent_scale=None):
    """The Pack of one linear module; `down` [d, r] leads from the stream to its input, if any."""
    W = weight(module)
    bias = getattr(module, "bias", None)
    b = np.zeros(W.shape[1]) if bias is None else numpy(bias)
    W = W if down is None else down @ W
    return Pack(
        module,
        split,
        {role: np.moveaxis(w, 1, 0) for role, w in split(W).items()},
        split(b),
        latent_scale,
    )


def one(role, n):
    """Features of one role only, in n heads."""
    return lambda x: {role: x.reshape(*x.shape[:-1], n, -1)}


def separate(attn, q="q_proj", k="k_proj", v="v_proj"):
    """One module per role."""

    def packs(block, config):
        counts = {"Q": (q, heads(config)), "K": (k, kv_heads(config)), "V": (v, kv_heads(config))}
        return [
            linear(attrgetter(f"{attn}.{name}")(block), one(role, n))
            for role, (name, n) in counts.items()
        ]

    return packs


def packed(path, split):
    """All roles in one module; split(x, config) -> {role: [..., head, d_head]}."""

    def packs(block, config):
        return [linear(attrgetter(path)(block), lambda x: split(x, config))]

    return packs


def role_major(x, config):
    """All queries, then all keys, then all values (GPT-2, MPT, Phi-3, BigCode)."""
    n = heads(config)
    d_head = getattr(config, "head_dim", None) or config.hidden_size // n
    kv = 1 if getattr(config, "multi_query", False) else kv_heads(config)
    x = x.reshape(*x.shape[:-1], n + 2 * kv, d_head)
    return {"Q": x[..., :n, :], "K": x[..., n : n + kv, :], "V": x[..., n + kv :, :]}


def head_major(x, config):
    """Query, key and value of head 0, then of head 1, ... (NeoX, BLOOM, old Falcon, ...)."""
    x = x.reshape(*x.shape[:-1], heads(config), 3, -1)
    return {"Q": x[..., 0, :], "K": x[..., 1, :], "V": x[..., 2, :]}


def by_multi_query(x, config):
    return (role_major if config.multi_query else head_major)(x, config)


def gated_query(block, config):
    """Qwen3-Next: each head's query features are followed by as many gate features."""
    _, key, value = separate("self_attn")(block, config)

    def split(x):
        return {"Q": x.reshape(*x.shape[:-1], heads(config), 2, -1)[..., 0, :]}

    return [linear(block.self_attn.q_proj, split), key, value]


def latent(block, config):
    """MLA (DeepSeek). V, and Q where it has a latent, are linear in the stream up to one scalar a
    token. K is not: half of it passes the latent norm and half does not, so it is left out."""
    attn = block.self_attn

    def through(module, norm, width):
        down = weight(module)[:, :width]

        def scale(x):
            return np.sqrt(((x @ down) ** 2).mean(-1, keepdims=True) + norm.variance_epsilon)

        return down * numpy(norm.weight), scale

    def values(x):
        x = x.reshape(*x.shape[:-1], heads(config), -1)
        return {"V": x[..., config.qk_nope_head_dim :]}

    def queries(x):
        return {"Q": x.reshape(*x.shape[:-1], heads(config), -1)}

    kv = linear(
        attn.kv_b_proj,
        values,
        *through(attn.kv_a_proj_with_mqa, attn.kv_a_layernorm, config.kv_lora_rank),
    )
    if attn.q_a_proj is None:
        return [linear(attn.q_proj, queries), kv]
    return [
        linear(
            attn.q_b_proj, queries, *through(attn.q_a_proj, attn.q_a_layernorm, config.q_lora_rank)
        ),
        kv,
    ]


def llama_like(**changes):
    """RMSNorm, separate projections in self_attn: most families since 2023 vary this theme."""
    settings = dict(
        stack="model.layers",
        norm="input_layernorm",
        kind="RMS",
        packs=separate("self_attn"),
        out="self_attn.o_proj",
        attn_write="self_attn",
        mlp_write="mlp",
    )
    return Family(**{**settings, **changes})


def new_falcon(config):
    return "new decoder layout" if config.new_decoder_architecture else None


POST_NORMS = dict(attn_write="post_attention_layernorm", mlp_write="post_feedforward_layernorm")

FAMILIES = {
    "gpt2": Family(
        "transformer.h",
        "ln_1",
        "LN",
        packed("attn.c_attn", role_major),
        "attn.c_proj",
        "attn",
        "mlp",
        "attn",
        positions="transformer.wpe",
    ),
    "gpt_bigcode": Family(
        "transformer.h",
        "ln_1",
        "LN",
        packed("attn.c_attn", by_multi_query),
        "attn.c_proj",
        "attn",
        "mlp",
        "attn",
        positions="transformer.wpe",
    ),
    "gpt_neo": Family(
        "transformer.h",
        "ln_1",
        "LN",
        separate("attn.attention"),
        "attn.attention.out_proj",
        "attn",
        "mlp",
        "attn",
        positions="transformer.wpe",
    ),
    "gptj": Family(
        "transformer.h", "ln_1", "LN", separate("attn"), "attn.out_proj", "attn", "mlp", "attn"
    ),
    "gpt_neox": Family(
        "gpt_neox.layers",
        "input_layernorm",
        "LN",
        packed("attention.query_key_value", head_major),
        "attention.dense",
        "attention",
        "mlp",
        "attention",
    ),
    "opt": Family(
        "model.decoder.layers",
        "self_attn_layer_norm",
        "LN",
        separate("self_attn"),
        "self_attn.out_proj",
        "self_attn",
        "fc2",
        positions="model.decoder.embed_positions",
    ),
    # BLOOM's and MPT's attention or MLP modules add the residual themselves: their last linear
    # layers are the writes.
    "bloom": Family(
        "transformer.h",
        "input_layernorm",
        "LN",
        packed("self_attention.query_key_value", head_major),
        "self_attention.dense",
        "self_attention.dense",
        "mlp.dense_4h_to_h",
        "self_attention",
    ),
    "mpt": Family(
        "transformer.blocks",
        "norm_1",
        "LN",
        packed("attn.Wqkv", role_major),
        "attn.out_proj",
        "attn",
        "ffn.down_proj",
        "attn",
    ),
    "falcon": Family(
        "transformer.h",
        "input_layernorm",
        "LN",
        packed("self_attention.query_key_value", by_multi_query),
        "self_attention.dense",
        "self_attention",
        "mlp",
        "self_attention",
        refuse=new_falcon,
    ),
    "llama": llama_like(),
    "mistral": llama_like(),
    "qwen2": llama_like(),
    "qwen3": llama_like(),
    "mixtral": llama_like(),
    "qwen3_moe": llama_like(),
    "olmoe": llama_like(),
    "gpt_oss": llama_like(),
    "nanochat": llama_like(),
    "phi": llama_like(kind="LN", out="self_attn.dense"),
    "phi3": llama_like(packs=packed("self_attn.qkv_proj", role_major)),
    "stablelm": llama_like(kind="LN"),
    "starcoder2": llama_like(kind="LN"),
    "olmo": llama_like(kind="LN"),
    "cohere": llama_like(kind="LN"),
    "nemotron": llama_like(kind="LN", one_plus=True),
    "olmo2": llama_like(kind="none", norm=None, **POST_NORMS),
    "gemma": llama_like(one_plus=True),
    "gemma2": llama_like(one_plus=True, **POST_NORMS),
    "gemma3_text": llama_like(one_plus=True, **POST_NORMS),
    "granite": llama_like(factor="residual_multiplier"),
    "jamba": llama_like(mlp_write="feed_forward", mixer="mamba"),
    "qwen3_next": llama_like(one_plus=True, packs=gated_query, mixer="linear_attn"),
    "deepseek_v2": llama_like(packs=latent),
    "deepseek_v3": llama_like(packs=latent),
}


KINDS = {"LN": "LN", "LNPRE": "LN", "RMS": "RMS", "RMSPRE": "RMS", "NONE": "none"}


def kind_of(config):
    return KINDS[str(config.normalization_type).upper()]


class Native(Family):
    """TransformerLens's own small model, as the plain module that its bridge wraps."""

    def __init__(self, hf):
        super().__init__(
            "layers",
            "ln1",
            kind_of(hf.cfg),
            separate("attn", "q", "k", "v"),
            "attn.o",
            "attn",
            None if hf.cfg.attn_only else "mlp",
            "attn",
            positions=None if hf.pos is None else "pos",
        )

    def run(self, hf, ids, forward):
        return hf(ids, **forward)


class Hooked(Native):
    """HookedTransformer: its hook points are modules, so plain module hooks reach everything."""

    def __init__(self, hf):
        self.kind, self.cfg = kind_of(hf.cfg), hf.cfg
        self.beside = (
            hf.hook_pos_embed if hf.cfg.positional_embedding_type == "shortformer" else None
        )

    def blocks(self, hf):
        return list(hf.blocks)

    def pos(self, hf):
        return hf.hook_pos_embed if hf.cfg.positional_embedding_type == "standard" else None

    def writes(self, block, config):
        writes = [("attn_out", block.hook_attn_out, 1.0)]
        return writes if config.attn_only else [*writes, ("mlp_out", block.hook_mlp_out, 1.0)]

    def attention(self, block, config):
        attn, norm, d = block.attn, block.ln1, config.d_model
        packs = []
        for role in "QKV":
            # the grouped module keeps its native K/V heads under a leading underscore
            own = "_" if config.n_key_value_heads and role != "Q" else ""
            W, b = (numpy(getattr(attn, f"{own}{name}_{role}")) for name in "Wb")
            packs.append(
                Pack(
                    getattr(attn, f"hook_{role.lower()}"),
                    one(role, len(W)),
                    {role: W},
                    {role: b},
                    beside=self.beside if role in "QK" else None,
                )
            )
        return Attention(
            self.kind,
            numpy(norm.w) if hasattr(norm, "w") else np.ones(d),
            numpy(norm.b) if hasattr(norm, "b") else np.zeros(d),
            getattr(norm, "eps", 0.0),
            packs,
            numpy(attn.W_O),
            numpy(attn.b_O),
            (attn.hook_z, "output"),
            block.hook_attn_out,
            attn.hook_pattern,
        )


def find(hf):
    """The family of a model. KeyError if unknown, ValueError if refused."""
    name = type(hf).__name__
    if name in ("NativeModel", "HookedTransformer"):
        return {"NativeModel": Native, "HookedTransformer": Hooked}[name](hf)
    family = FAMILIES[hf.config.model_type]
    reason = family.refuse(hf.config)
    if reason:
        raise ValueError(f"the oracle refuses this {hf.config.model_type}: {reason}")
    return family

"""Tiny random models of every family: one table for transformers, one for TransformerLens's own.

    build("llama")                  transformers model, eval mode, float32, every parameter random
    bridge("llama")                 TransformerBridge around a fresh build; compat=True processes it
    native("RMS")                   TransformerBridge.boot_native, every parameter random
    hooked("LNPre")                 HookedTransformer, every parameter random
    hooked_from_hf("gpt2")          HookedTransformer with the weights of build("gpt2")

Everything is seeded and nothing touches the network or the global random state. transformer_lens is
imported inside the functions that need it; a name that the installed version cannot build raises
the ImportError, AttributeError or KeyError that says so.
"""

import contextlib
import importlib.metadata
import math
from dataclasses import dataclass, field

import torch

VOCAB, N_CTX, D, HEADS, LAYERS = 101, 64, 32, 4, 3


@dataclass(frozen=True)
class Entry:
    """One transformers family. `refused` names why the package must not analyse it."""

    config: str
    model: str
    options: dict = field(default_factory=dict)
    one_plus: bool = False  # norms store w and multiply by 1 + w
    refused: str | None = None
    compat: dict = field(default_factory=dict)  # options that compatibility mode needs
    wrong: dict = field(default_factory=dict)  # {TransformerLens major: what fails there}


def _rope_like(**options):
    """The options that most families since Llama share."""
    return (
        dict(
            vocab_size=VOCAB,
            hidden_size=D,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            max_position_embeddings=N_CTX,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        | options
    )


def _gpt2_like(**options):
    return (
        dict(
            vocab_size=VOCAB,
            n_positions=N_CTX,
            n_embd=D,
            n_layer=LAYERS,
            n_head=HEADS,
            bos_token_id=1,
            eos_token_id=2,
        )
        | options
    )


def _llm(family, **options):
    return Entry(f"{family}Config", f"{family}ForCausalLM", _rope_like(**options))


def _mha(family, **options):
    """A family whose configuration knows no key/value head count."""
    known = {k: v for k, v in _rope_like(**options).items() if k != "num_key_value_heads"}
    return Entry(f"{family}Config", f"{family}ForCausalLM", known)


_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
_MLA = dict(
    hidden_size=D,
    intermediate_size=48,
    num_key_value_heads=HEADS,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
)

ZOO = {
    # learned or ALiBi positions, LayerNorm, heads of d/n
    "gpt2": Entry("GPT2Config", "GPT2LMHeadModel", _gpt2_like()),
    "gpt_neo": Entry(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        dict(
            vocab_size=VOCAB,
            max_position_embeddings=N_CTX,
            hidden_size=D,
            num_layers=4,
            num_heads=HEADS,
            attention_types=[[["global", "local"], 2]],
            window_size=5,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "opt": Entry(
        "OPTConfig",
        "OPTForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=D,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            ffn_dim=48,
            max_position_embeddings=N_CTX,
            word_embed_proj_dim=D,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "bigcode": Entry("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _gpt2_like(multi_query=True)),
    "bloom": Entry(
        "BloomConfig",
        "BloomForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=D,
            n_layer=LAYERS,
            n_head=HEADS,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "mpt": Entry(
        "MptConfig",
        "MptForCausalLM",
        dict(
            vocab_size=VOCAB,
            d_model=D,
            n_layers=LAYERS,
            n_heads=HEADS,
            max_seq_len=N_CTX,
            expansion_ratio=2,
        ),
    ),
    # rotary, LayerNorm
    "neox": _mha("GPTNeoX", use_parallel_residual=False),
    "neox_parallel": _mha("GPTNeoX", use_parallel_residual=True),
    "gptj": Entry("GPTJConfig", "GPTJForCausalLM", _gpt2_like(rotary_dim=4)),
    "falcon": Entry(
        "FalconConfig",
        "FalconForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=D,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            multi_query=True,
            parallel_attn=True,
            bias=True,
            new_decoder_architecture=False,
            alibi=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "phi": _llm("Phi", num_key_value_heads=HEADS),
    "stablelm": _llm("StableLm", use_qkv_bias=True),
    "starcoder2": _llm("Starcoder2", use_bias=True),
    "olmo": _llm("Olmo"),
    "nemotron": Entry(
        "NemotronConfig", "NemotronForCausalLM", _rope_like(head_dim=8), one_plus=True
    ),
    "cohere": Entry(
        "CohereConfig",
        "CohereForCausalLM",
        _rope_like(logit_scale=0.25),
        wrong={"3": "attention patterns differ from transformers', so do the logits"},
    ),
    # rotary, RMSNorm
    "llama": _llm("Llama", head_dim=12),
    "mistral": _llm("Mistral", head_dim=12, sliding_window=6),
    "qwen2": _llm("Qwen2"),
    "qwen3": _llm("Qwen3", head_dim=12),
    "phi3": _llm("Phi3"),
    "olmo2": _llm("Olmo2"),
    "granite": _llm(
        "Granite",
        embedding_multiplier=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.2,
        logits_scaling=4.0,
    ),
    "nanochat": _llm("NanoChat"),
    "gemma": Entry("GemmaConfig", "GemmaForCausalLM", _rope_like(head_dim=12), one_plus=True),
    "gemma2": Entry(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _rope_like(head_dim=12, query_pre_attn_scalar=12, sliding_window=6),
        one_plus=True,
    ),
    "gemma3": Entry(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _rope_like(head_dim=12, query_pre_attn_scalar=12, sliding_window=6),
        one_plus=True,
    ),
    # mixtures of experts
    "mixtral": _llm("Mixtral", head_dim=12, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _llm("Qwen3Moe", head_dim=12, **_MOE),
    "olmoe": _llm("Olmoe", num_experts=4, num_experts_per_tok=2),
    # Attention sinks: a head's weights do not sum to 1, so moving value biases into b_O (which
    # compatibility mode does by default) changes what this model computes.
    "gpt_oss": Entry(
        "GptOssConfig",
        "GptOssForCausalLM",
        _rope_like(head_dim=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
        compat=dict(fold_value_biases=False),
    ),
    # hybrids: attention in some blocks only
    "jamba": _llm(
        "Jamba",
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=0,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=4,
        mamba_d_conv=3,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "qwen3_next": Entry(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _rope_like(
            num_hidden_layers=4,
            head_dim=12,
            linear_key_head_dim=6,
            linear_value_head_dim=6,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=24,
            layer_types=["linear_attention", "full_attention"] * 2,
            **_MOE,
        ),
        one_plus=True,
        wrong={"3": "forward raises AttributeError with transformers 5.24"},
    ),
    # latent attention
    "deepseek_v2": _llm("DeepseekV2", **_MLA, q_lora_rank=None),
    "deepseek_v3": _llm("DeepseekV3", **_MLA, q_lora_rank=14, num_mtp_layers=0),
    # to be refused
    "bert": Entry(
        "BertConfig",
        "BertForMaskedLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=D,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=48,
            max_position_embeddings=N_CTX,
        ),
        refused="post-norm encoder",
    ),
    "t5": Entry(
        "T5Config",
        "T5ForConditionalGeneration",
        dict(
            vocab_size=VOCAB,
            d_model=D,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=HEADS,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        ),
        refused="encoder-decoder",
    ),
    "mamba": Entry(
        "MambaConfig",
        "MambaForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=D,
            num_hidden_layers=LAYERS,
            state_size=4,
            use_mambapy=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
        refused="no attention",
    ),
    "falcon_new": Entry(
        "FalconConfig",
        "FalconForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=D,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_kv_heads=2,
            new_decoder_architecture=True,
            parallel_attn=True,
            bias=False,
            alibi=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
        refused="new decoder layout",
    ),
}
DECODERS = [name for name, entry in ZOO.items() if not entry.refused]
REFUSED = [name for name, entry in ZOO.items() if entry.refused]


@contextlib.contextmanager
def _seeded(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def randomise(model, seed=0, one_plus=False):
    """Give every parameter of a module seeded random values: gains near 1, biases near 0."""
    generator = torch.Generator().manual_seed(seed)

    def noise(parameter, scale):
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return (values * scale).to(parameter)

    modules = dict(model.named_modules())
    for name, parameter in sorted(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        kind = type(modules[owner]).__name__.lower()
        if parameter.ndim == 1 and leaf in ("weight", "w") and "norm" in kind:
            parameter.copy_(noise(parameter, 0.3) + (0.0 if one_plus else 1.0))
        elif parameter.ndim == 1:
            parameter.copy_(noise(parameter, 0.3))
        elif "embedding" in kind or leaf in ("W_E", "W_pos"):
            parameter.copy_(noise(parameter, 0.7))
        else:
            parameter.copy_(noise(parameter, 1 / math.sqrt(D)))
    return model


def build(name, seed=0, dtype=torch.float32):
    """The transformers model of a zoo entry: eval mode, CPU, eager attention."""
    import transformers

    entry = ZOO[name]
    config = getattr(transformers, entry.config)(**entry.options)
    config._attn_implementation = "eager"
    with _seeded(seed):
        model = getattr(transformers, entry.model)(config)
    return randomise(model, seed, entry.one_plus).to(dtype).eval()


def ids(batch=3, pos=11, seed=0, vocab=VOCAB):
    """Seeded token ids [batch, pos], none of them the padding id 0."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, vocab, (batch, pos), generator=generator)


def wrong(name):
    """What the installed TransformerLens gets wrong on this entry, or None."""
    major = importlib.metadata.version("transformer-lens").partition(".")[0]
    return ZOO[name].wrong.get(major)


def bridge(name, compat=False, seed=0, dtype=torch.float32, hf=None, **compat_options):
    """TransformerBridge around a fresh build (it wraps the given model in place).

    compat_options go to enable_compatibility_mode, over the entry's own."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf = build(name, seed, dtype) if hf is None else hf
    made = build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config, tokenizer=None)
    made.eval()
    if compat:
        made.enable_compatibility_mode(
            **{"disable_warnings": True, **ZOO[name].compat, **compat_options}
        )
    return made


# ------------------------------------------------------------------------------------------------
# TransformerLens's own models
# ------------------------------------------------------------------------------------------------

_NORMS = {"LN": "LN", "LNPre": "LNPre", "RMS": "RMS", "RMSPre": "RMSPre", "none": None}
_SIZES = dict(
    n_layers=LAYERS,
    d_model=D,
    n_ctx=N_CTX,
    d_head=12,
    n_heads=HEADS,
    d_mlp=48,
    d_vocab=VOCAB,
    act_fn="gelu",
    seed=0,
)

# TransformerLens's native module has learned or rotary positions, LN(Pre), RMS(Pre) or no norm,
# gated MLPs, grouped heads and attention-only blocks; no ALiBi, parallel blocks or experts.
NATIVE = {name: dict(normalization_type=kind) for name, kind in _NORMS.items()} | {
    "attn_only": dict(normalization_type="LN", attn_only=True),
    "rotary": dict(normalization_type="RMS", positional_embedding_type="rotary"),
    "grouped": dict(normalization_type="LN", n_key_value_heads=2),
    "gated": dict(normalization_type="RMSPre", gated_mlp=True, act_fn="silu"),
}
HOOKED = {name: dict(normalization_type=kind) for name, kind in _NORMS.items()} | {
    "attn_only": dict(normalization_type="LN", attn_only=True),
    "alibi": dict(normalization_type="LN", positional_embedding_type="alibi"),
    "parallel": dict(normalization_type="LN", parallel_attn_mlp=True),
    "moe": dict(
        normalization_type="RMS", num_experts=4, experts_per_token=2, gated_mlp=True, act_fn="silu"
    ),
    "shortformer": dict(normalization_type="LN", positional_embedding_type="shortformer"),
    "rotary": dict(normalization_type="RMS", positional_embedding_type="rotary", rotary_dim=12),
    "grouped": dict(normalization_type="LN", n_key_value_heads=2),
    "grouped_rotary": dict(
        normalization_type="RMS",
        n_key_value_heads=2,
        rotary_dim=12,
        positional_embedding_type="rotary",
    ),
}


def _native_config(name):
    from transformer_lens.config import TransformerBridgeConfig

    return TransformerBridgeConfig(**_SIZES | NATIVE[name])


def native_module(name, seed=0):
    """The plain module behind `native(name)`: what the oracle runs. TransformerLens >= 3.7.3."""
    from transformer_lens.model_bridge.sources.native import NativeModel

    with _seeded(seed):
        return randomise(NativeModel(_native_config(name)), seed).eval()


@torch.no_grad()
def native(name, compat=False, seed=0, **compat_options):
    """TransformerBridge.boot_native with the weights of native_module(name, seed)."""
    from transformer_lens.model_bridge import TransformerBridge

    made = TransformerBridge.boot_native(_native_config(name))
    wanted = dict(native_module(name, seed).named_parameters())
    for key, parameter in made.original_model.named_parameters():
        key = key.replace("._original_component", "")
        if key in wanted:  # some versions add a zero unembedding bias
            parameter.copy_(wanted.pop(key))
    if wanted:
        raise KeyError(f"boot_native has no parameters {sorted(wanted)}")
    made.eval()
    if compat:
        made.enable_compatibility_mode(**{"disable_warnings": True, **compat_options})
    return made


def hooked(name, processed=False, seed=0):
    """A random HookedTransformer (TransformerLens < 4), raw or through process_weights_."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    with _seeded(seed):
        made = HookedTransformer(HookedTransformerConfig(**_SIZES | HOOKED[name]))
    randomise(made, seed)
    if processed:
        # 2.x cannot fold a norm that has nothing to fold
        made.process_weights_(fold_ln=not str(made.cfg.normalization_type).endswith("Pre"))
    return made.eval()


def hooked_from_hf(name, processed=False, seed=0):
    """HookedTransformer with the weights of build("gpt2") or build("llama"), by TransformerLens's
    own conversion; processed folds norms and value biases and centres what writes."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions as convert

    hf = build(name, seed)
    options = {
        "gpt2": dict(normalization_type="LN", act_fn="gelu_new", d_head=8, d_mlp=4 * D),
        "llama": dict(
            normalization_type="RMS",
            act_fn="silu",
            gated_mlp=True,
            eps=1e-6,
            n_key_value_heads=2,
            positional_embedding_type="rotary",
            rotary_dim=12,
            final_rms=True,
        ),
    }[name]
    config = HookedTransformerConfig(**_SIZES | options)
    with _seeded(seed):
        made = HookedTransformer(config)
    state = getattr(convert, f"convert_{name}_weights")(hf, config)
    state = {key: value.detach().clone() for key, value in state.items()}
    made.load_and_process_state_dict(
        state,
        fold_ln=processed,
        center_writing_weights=processed,
        center_unembed=processed,
        fold_value_biases=processed,
    )
    return made.eval()

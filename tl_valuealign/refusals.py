"""Models that are refused by name before any forward pass, and why.

The self-checks prove that streams and matrices fit the model as transformer-lens runs it. They
cannot see that it runs another model than the one that was wrapped: what is known of that is here.
"""

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

from tl_valuealign.errors import ModelError

ENCODERS = ("Bert", "Roberta", "ViT", "DeiT", "Hubert", "Wav2Vec2", "AST")
POST_NORM_DECODERS = ("OpenAIGPTLMHeadModel",)

# Architectures that a TransformerBridge computed wrongly before the given release: logits compared
# with transformers' own on random tiny models, in releases 3.6.0 to 4.3.0.
FIXED_IN = {
    "CohereForCausalLM": (4, 2, 0),
    "Cohere2ForCausalLM": (4, 2, 0),
    "HunYuanDenseV1ForCausalLM": (4, 2, 0),
    "GptOssForCausalLM": (3, 7, 0),
}
FIRST_TESTED_BRIDGE = (3, 6, 0)

# Settings that no release so far honours: (architecture, what is wrong, test of the configuration).
NEVER_RIGHT: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (
        "FalconForCausalLM",
        "Falcon's new decoder layout (new_decoder_architecture=True) is not reproduced faithfully",
        lambda config: bool(getattr(config, "new_decoder_architecture", False)),
    ),
    (
        "GPT2LMHeadModel",
        "scale_attn_weights=False is ignored, so the attention patterns are wrong",
        lambda config: not getattr(config, "scale_attn_weights", True),
    ),
)


def refuse_unreadable(model: Any) -> None:
    """Raise ``ModelError`` unless the model is a causal decoder whose weights can be read."""
    _refuse_other_kinds(model)
    _refuse_known_wrong(model)
    blocks: Any = model.blocks
    if not any("attn" in block._modules for block in blocks):
        raise ModelError(
            f"{_name(model)} offers no attention in any of its {len(blocks)} blocks, so there are "
            f"no query, key or value matrices to look at: it is a state-space model, or a hybrid "
            f"whose attention transformer-lens does not expose"
        )
    if getattr(model.cfg, "load_in_4bit", False):
        raise ModelError(
            f"{_name(model)} is quantised to 4 bits; its packed weights cannot be read as "
            f"matrices. Load it in bfloat16 or float32"
        )
    parameter = None
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(
                f"parameter {name} is on the meta device (offloaded or never loaded); load the "
                f"whole model into memory, without device_map offloading"
            )
    if parameter is None:
        raise ModelError(
            f"{_name(model)} holds no weights here (it runs on a remote or another engine); load "
            f"it with TransformerBridge.boot_transformers"
        )


def _refuse_other_kinds(model: Any) -> None:
    kind = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "cfg"):
        raise ModelError(
            f"expected a HookedTransformer or TransformerBridge, got {type(model).__module__}."
            f"{kind}; wrap a Hugging Face model with "
            f"TransformerBridge.boot_transformers(name, hf_model=model)"
        )
    architecture = _architecture(model)
    if (
        kind == "HookedEncoder"
        or architecture.startswith(ENCODERS)
        or architecture.endswith("ForMaskedLM")
        or getattr(model.cfg, "attention_dir", "causal") == "bidirectional"
    ):
        raise ModelError(
            f"{kind} ({_name(model)}) attends in both directions: an encoder or a diffusion "
            f"model. Encoders normalise after each addition, so that no earlier output survives "
            f"as a summand of the stream; analyse a causal decoder"
        )
    if not hasattr(model, "blocks") or hasattr(model, "encoder_blocks"):
        raise ModelError(
            f"{kind} ({_name(model)}) has no single stack of blocks: encoder-decoders and "
            f"recurrent-depth models write into more than one stream; analyse a decoder-only model"
        )
    if not hasattr(model, "run_with_cache") or not hasattr(model, "hook_dict"):
        raise ModelError(f"{kind} offers no run_with_cache; expected a TransformerLens model")
    if int(getattr(model.cfg, "n_ctx", 0) or 2) < 2:
        raise ModelError(f"{_name(model)} reads one token at a time: there is nothing to attend to")
    if architecture in POST_NORM_DECODERS:
        raise ModelError(
            f"{_name(model)} ({architecture}) normalises the stream after each addition, "
            f"so no earlier output survives as a summand of it; analyse a pre-norm decoder"
        )


def _refuse_known_wrong(model: Any) -> None:
    """Wrong activations that every self-check would pass."""
    if not hasattr(model, "adapter"):
        return
    release, architecture = _release(), _architecture(model)
    config: Any = getattr(getattr(model, "original_model", None), "config", None)
    installed = version("transformer-lens")
    if release < FIRST_TESTED_BRIDGE:
        raise ModelError(
            f"TransformerBridge of transformer-lens {installed} wraps several architectures "
            f"wrongly and was never tested here; upgrade it, or use HookedTransformer"
        )
    if release < FIXED_IN.get(architecture, release):
        fixed = ".".join(map(str, FIXED_IN[architecture]))
        raise ModelError(
            f"TransformerBridge of transformer-lens {installed} computes wrong attention for "
            f"{architecture}; upgrade to {fixed} or later"
        )
    for affected, what, applies in NEVER_RIGHT:
        if architecture == affected and applies(config):
            raise ModelError(
                f"{_name(model)}: {what} by TransformerBridge up to transformer-lens 4.3; analyse "
                f"a model without that setting"
            )
    if architecture == "OPTForCausalLM" and getattr(model, "compatibility_mode", False):
        if config.word_embed_proj_dim != config.hidden_size:
            raise ModelError(
                f"{_name(model)} projects its embedding from {config.word_embed_proj_dim} to "
                f"{config.hidden_size} dimensions, which compatibility mode breaks; leave out "
                f"enable_compatibility_mode()"
            )
    _refuse_folded_values_under_sinks(model)


def _refuse_folded_values_under_sinks(model: Any) -> None:
    """With attention sinks a head's weights do not sum to 1, so b_V W_O is no constant.

    Folding it into b_O changes what the model computes; a folded b_V is zero.
    """
    if not getattr(model, "compatibility_mode", False):
        return
    for number, block in enumerate(model.blocks):
        attn = block._modules.get("attn")
        original = getattr(attn, "original_component", None)
        if getattr(original, "sinks", None) is None:
            continue
        b_V = getattr(attn, "b_V", None)
        if isinstance(b_V, Tensor) and not bool(b_V.any()):
            raise ModelError(
                f"block {number} of {_name(model)} has attention sinks and value biases folded "
                f"into its output bias, which changes what this model computes; call "
                f"enable_compatibility_mode(fold_value_biases=False) on a fresh model"
            )


def _release() -> tuple[int, ...]:
    """The first three numbers of the installed transformer-lens."""
    numbers = re.findall(r"\d+", version("transformer-lens"))
    return tuple(int(number) for number in numbers[:3])


def _architecture(model: Any) -> str:
    original = getattr(model, "original_model", None)
    return type(original).__name__


def _name(model: Any) -> str:
    return str(getattr(model.cfg, "model_name", type(model).__name__))

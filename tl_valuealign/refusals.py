"""Models that are refused by name before any forward pass, and why."""

from typing import Any

from torch import nn

from tl_valuealign.errors import ModelError


def refuse_unreadable(model: Any) -> None:
    """Raise ``ModelError`` unless the model is a causal decoder whose weights can be read."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "cfg"):
        raise ModelError(
            f"expected a HookedTransformer or TransformerBridge, got {type(model).__module__}."
            f"{kind}; wrap a Hugging Face model with "
            f"TransformerBridge.boot_transformers(name, hf_model=model)"
        )
    if not hasattr(model, "blocks") or hasattr(model, "encoder_blocks"):
        raise ModelError(
            f"{kind} ({_name(model)}) has no single stack of blocks: encoder-decoders write into "
            f"two streams and are not supported; analyse a decoder-only model"
        )
    if not hasattr(model, "run_with_cache") or not hasattr(model, "hook_dict"):
        raise ModelError(f"{kind} offers no run_with_cache; expected a TransformerLens model")
    hf_config = getattr(getattr(model, "original_model", None), "config", None)
    if getattr(model.cfg, "attention_dir", "causal") == "bidirectional" or kind == "HookedEncoder":
        raise ModelError(
            f"{kind} ({_name(model)}) is a bidirectional encoder. Its layer norms come after each "
            f"addition, so no earlier output survives as a summand of the stream; analyse a "
            f"causal decoder"
        )
    if getattr(hf_config, "new_decoder_architecture", False):
        raise ModelError(
            f"{_name(model)} uses Falcon's new decoder layout, which transformer-lens does not "
            f"reproduce faithfully; analyse a Falcon with the old layout or another model"
        )
    if getattr(model.cfg, "load_in_4bit", False):
        raise ModelError(
            f"{_name(model)} is quantised to 4 bits; its packed weights cannot be read as "
            f"matrices. Load it in bfloat16 or float32"
        )
    blocks: Any = model.blocks
    if not any("attn" in block._modules for block in blocks):
        raise ModelError(
            f"{_name(model)} has no attention in any of its {len(blocks)} blocks, so there "
            f"are no query, key or value matrices to look at"
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(
                f"parameter {name} is on the meta device (offloaded or never loaded); load the "
                f"whole model into memory, without device_map offloading"
            )


def _name(model: Any) -> str:
    return str(getattr(model.cfg, "model_name", type(model).__name__))

"""The bundled model: a small trained nanochat, of the architecture that the post looked at.

Eight blocks, four heads, 128 wide; its card (``pocket_model/README.md``) says what it was trained
on and how well it predicts. It is read from the package alone and never from the network.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tl_valuealign.errors import ModelError

POCKET_FOLDER = Path(__file__).parent / "pocket_model"
POCKET_SHA256 = "cad3cb30233d81e84ff8dc87391389e2100d9b11d3b7b27ea6cc8c4885bc7446"
_NEEDED = "the bundled model needs transformer_lens >= 3.6 and transformers >= 5 (NanoChat)"


def pocket_model(dtype: torch.dtype = torch.float32) -> Any:
    """The bundled trained model as a TransformerBridge on the CPU, with its tokenizer.

    Args:
        dtype: what to compute in. The weights are stored in float16.

    Raises:
        ModelError: the weights are not those that were shipped, or transformer_lens or
            transformers is too old to know the architecture.
    """
    _verify(POCKET_FOLDER / "model.safetensors", POCKET_SHA256)
    return load_nanochat(POCKET_FOLDER, dtype=dtype, name="pocket")


def load_nanochat(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    name: str | None = None,
) -> Any:
    """A NanoChat folder, such as a checkpoint of ``examples/train_pocket.py``, as a bridge.

    Args:
        folder: a Hugging Face folder with ``config.json``, weights and tokenizer.
        dtype: what to compute in.
        name: the model's name in results; by default that of the folder.

    Raises:
        ModelError: the folder lacks a part, or transformer_lens or transformers is too old.
    """
    folder = Path(folder)
    for part in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / part).is_file():
            raise ModelError(f"{folder} has no {part}; pass the folder of a saved NanoChat model")
    try:
        from transformer_lens.model_bridge.sources import build_bridge_from_module
        from transformer_lens.model_bridge.supported_architectures import nanochat  # noqa: F401
        from transformers import NanoChatForCausalLM, PreTrainedTokenizerFast
    except ImportError as error:
        raise ModelError(f"{_NEEDED}; found {_versions()}") from error
    with _no_progress_bar():
        model = NanoChatForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model.eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return build_bridge_from_module(
        model,
        "NanoChatForCausalLM",
        hf_config=model.config,
        tokenizer=tokenizer,
        model_name=name or folder.resolve().name,
    )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading takes milliseconds; transformers would draw a bar for it."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _verify(weights: Path, expected: str) -> None:
    if not weights.is_file():
        raise ModelError(f"the bundled weights are missing: no file {weights}; reinstall")
    found = hashlib.sha256(weights.read_bytes()).hexdigest()
    if found != expected:
        raise ModelError(
            f"{weights} is not the file that was shipped: SHA-256 is {found}, expected {expected}; "
            f"reinstall the package"
        )


def _versions() -> str:
    names = ("transformer-lens", "transformers")
    return " and ".join(f"{name} {metadata.version(name)}" for name in names)

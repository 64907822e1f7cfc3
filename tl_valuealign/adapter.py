"""The one place that knows TransformerLens: which weights read the stream, which hooks carry it.

Serves HookedTransformer (transformer-lens 2.18 to 3.x) and TransformerBridge (3.x and 4.x), told
apart by what they offer: the former cannot even be imported from version 4 on.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from tl_valuealign.errors import ModelError
from tl_valuealign.hooks import hook_state, restore_hooks
from tl_valuealign.norms import InputNorm
from tl_valuealign.refusals import refuse_unreadable

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MIXER_HOOKS = ("linear_attn.hook_out", "mixer.hook_out", "mamba.hook_out", "ssm.hook_out")
# What a forward pass of an unforeseen layout, dtype or hook runs into; a caller's own hook may
# raise anything else, which then comes through as it is.
CANNOT_RUN = (
    RuntimeError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
)
HEAD_HOOKS = {"Q": "attn.hook_q", "K": "attn.hook_k", "V": "attn.hook_v", "OV": "attn.hook_v"}


class ModelView:
    """A model seen as streams and read-in matrices. Raises ``ModelError`` for what has neither.

    ``attention_layers``: original numbers of the blocks that have attention. ``targets``: those
    that are looked at, all of them until :meth:`choose` narrows them down.
    """

    def __init__(self, model: Any) -> None:
        refuse_unreadable(model)
        self.model = model
        self.cfg = model.cfg
        self.is_bridge = hasattr(model, "adapter")
        self.blocks = list(model.blocks)
        self.n_layers = len(self.blocks)
        self.attention_layers = tuple(
            i for i, block in enumerate(self.blocks) if "attn" in block._modules
        )
        self.targets = self.attention_layers
        self.d_model = int(self.cfg.d_model)
        self.n_ctx = int(getattr(self.cfg, "n_ctx", 0) or 0)
        self.d_vocab = int(self.cfg.d_vocab)
        first = self.weight(self.attention_layers[0], "Q")
        self.device, self.dtype = first.device, first.dtype
        self.hooks = set(model.hook_dict)
        self._shapes: dict[str, tuple[int, int]] = {}

    def choose(self, layers: Sequence[int]) -> None:
        """Look at these blocks only.

        Raises ``ModelError`` naming the first that lacks a matrix, or two of different head shapes.
        """
        self.targets, self._shapes = tuple(layers), {}
        for role in ("Q", "K", "V"):
            self._head_shape(role)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.model, "tokenizer", None)

    @property
    def prepends_bos(self) -> bool:
        return bool(getattr(self.cfg, "default_prepend_bos", True))

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def input_device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    @property
    def name(self) -> str:
        return str(getattr(self.cfg, "model_name", None) or type(self.model).__name__)

    def n_heads(self, role: str) -> int:
        return self._head_shape("Q" if role == "OV" else role)[0]

    def d_head(self, role: str) -> int:
        return self._head_shape("V" if role == "OV" else role)[1]

    # Weights -------------------------------------------------------------------------------

    def weight(self, layer: int, role: str) -> Tensor:
        """Stored W_Q, W_K or W_V [head, d_model, d_head]; native key/value heads."""
        native = f"_W_{role}"
        name = native if native in self.blocks[layer].attn._parameters else f"W_{role}"
        weight = self.stored(layer, name, f"role {role}, block {layer}")
        if weight.shape[1] != self.d_model:
            raise ModelError(
                f"role {role}, block {layer}: W_{role} is {tuple(weight.shape)}, expected "
                f"[head, {self.d_model}, d_head]"
            )
        return weight

    def stored(self, layer: int, name: str, where: str) -> Tensor:
        """One weight of a block's attention, with three axes and of a plain float dtype."""
        attn = self.blocks[layer].attn
        try:
            weight = getattr(attn, name)
        except Exception as error:  # whatever the wrapper of an unforeseen layout runs into
            raise ModelError(
                f"{where}: {type(attn).__name__} offers no {name} ({error}). Latent attention "
                f"(DeepSeek's MLA), packed quantised weights, and shared or missing key/value "
                f"projections have no read-in matrix per head; choose other layers=..."
            ) from error
        if not isinstance(weight, Tensor) or weight.dtype not in FLOATS:
            kind = getattr(weight, "dtype", type(weight).__name__)
            raise ModelError(
                f"{where}: {name} is stored as {kind}, numbers that cannot be read directly; load "
                f"the model without quantisation"
            )
        if weight.ndim != 3:
            raise ModelError(f"{where}: {name} has shape {tuple(weight.shape)}, expected 3 axes")
        return weight.detach()

    def _head_shape(self, role: str) -> tuple[int, int]:
        """(heads, d_head), the same in every target block, or ``ModelError`` naming two."""
        if role in self._shapes:
            return self._shapes[role]
        seen: dict[tuple[int, int], int] = {}
        for layer in self.targets:
            heads, _, d_head = self.weight(layer, role).shape
            seen.setdefault((heads, d_head), layer)
        if len(seen) > 1:
            (a, first), (b, second) = list(seen.items())[:2]
            raise ModelError(
                f"role {role}: block {first} has (heads, d_head) = {a} but block {second} has "
                f"{b}; blocks of different head shapes do not fit one layer × head grid. Choose "
                f"blocks of one shape with layers=..."
            )
        self._shapes[role] = next(iter(seen))
        return self._shapes[role]

    def read_in(self, role: str, layer: int, norm: InputNorm) -> Tensor:
        """A [head, d_model, d_head] with the gain inside, centred under LayerNorm, upcast.

        For "OV" the value matrices repeated to the query heads, so that rows match ``write_out``.
        """
        weight = self.weight(layer, "V" if role == "OV" else role).to(self.compute_dtype)
        if norm.gain is not None:
            weight = norm.gain.to(weight)[None, :, None] * weight
        if norm.centred:
            weight = weight - weight.mean(1, keepdim=True)
        if role == "OV":
            weight = weight.repeat_interleave(self.n_heads("Q") // len(weight), dim=0)
        return weight

    def write_out(self, layer: int, norm: InputNorm) -> Tensor:
        """W_O [query head, d_head, d_model], upcast.

        Centred where the model reads through LayerNorm: no reader sees the mean of what is
        written, and TransformerLens's processing takes it out.
        """
        weight = self.stored(layer, "W_O", f"block {layer}").to(self.compute_dtype)
        expected = (self.n_heads("Q"), self.d_head("V"), self.d_model)
        if tuple(weight.shape) != expected:
            raise ModelError(f"block {layer}: W_O is {tuple(weight.shape)}, expected {expected}")
        return weight - weight.mean(-1, keepdim=True) if norm.centred else weight

    def norm_candidates(self, layer: int) -> list[InputNorm]:
        """Input norms this block may have, the likeliest by its attributes first.

        Attributes alone lie (folded weights, 1 + w conventions, post-norms under the name of the
        input norm), so the self-check takes the first candidate that reproduces hook_q/k/v.
        """
        module = self.blocks[layer]._modules.get("ln1")
        original = getattr(module, "original_component", None)
        inner = module if original is None else original
        kind_of = str(getattr(self.cfg, "normalization_type", None) or type(inner).__name__)
        kinds = ["RMSNorm", "LayerNorm"] if "RMS" in kind_of else ["LayerNorm", "RMSNorm"]
        weight = getattr(inner, "w", None)
        weight = getattr(inner, "weight", None) if weight is None else weight
        gains: list[tuple[Tensor | None, str]] = [(None, "1")]
        if isinstance(weight, Tensor) and weight.shape == (self.d_model,):
            stored = weight.detach().to(self.compute_dtype)
            gains = [(stored, "w"), (1 + stored, "1 + w"), (None, "1")]
        names = ("variance_epsilon", "eps", "epsilon")
        found = [getattr(inner, name, None) for name in names] + [getattr(self.cfg, "eps", None)]
        epsilons = list(dict.fromkeys(float(e) for e in found if isinstance(e, (int, float))))
        normed = [
            InputNorm(kind, gain, eps, rule)
            for eps in epsilons or [1e-5]
            for kind in kinds
            for gain, rule in gains
        ]
        plain = InputNorm("none", None, 0.0, "1")
        return [plain, *normed] if module is None else [*normed, plain]

    def model_hash(self) -> str:
        """sha256 over the sha256 of every parameter's name, shape, dtype and bytes.

        Tied parameters count once. Several are read at a time: hashing gigabytes takes longer than
        reading text through a model on an accelerator.
        """
        own: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
        for name, parameter in sorted(self.model.named_parameters(), key=lambda item: item[0]):
            own.setdefault((parameter.data_ptr(), parameter.shape), (name, parameter))
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return hashlib.sha256(b"".join(pool.map(_digest, own.values()))).hexdigest()

    # Streams -------------------------------------------------------------------------------

    def hook(self, layer: int, name: str) -> str:
        return f"blocks.{layer}.{name}"

    def resid_pre(self, layer: int) -> str:
        return self.hook(layer, "hook_resid_pre")

    def writes(self, layer: int) -> list[str]:
        """Hooks of everything this block adds to the stream, in the order of adding."""
        if layer in self.attention_layers:
            first = ["hook_attn_out"]
        else:
            first = [name for name in MIXER_HOOKS if self.hook(layer, name) in self.hooks][:1]
        # HookedTransformer lists the MLP's hook also where there is no MLP to fire it.
        candidates = first if getattr(self.cfg, "attn_only", False) else [*first, "hook_mlp_out"]
        return [self.hook(layer, n) for n in candidates if self.hook(layer, n) in self.hooks]

    @property
    def adds_positions(self) -> bool:
        """Whether a positional embedding is a write into the stream of its own."""
        kind = getattr(self.cfg, "positional_embedding_type", None)
        return "hook_pos_embed" in self.hooks and kind not in ("shortformer", "rotary", "alibi")

    @property
    def positions_enter_queries_and_keys(self) -> bool:
        return getattr(self.cfg, "positional_embedding_type", None) == "shortformer"

    def run(
        self, ids: Tensor, names: Sequence[str], stop_at_layer: int | None = None
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Forward right-padded ids [sequence, position]; the named activations, and where
        ``stop_at_layer`` is given, that block's resid_pre.

        No mask is passed: every padding position comes after the kept ones, and causal attention
        never looks ahead. Call inside :meth:`quiet`.
        """
        wanted = set(names)
        options: dict[str, Any] = {"return_type": None}
        if self.is_bridge:
            options |= {"output_attentions": False, "use_cache": False}
        else:
            options |= {"prepend_bos": False, "padding_side": "right"}
        if stop_at_layer is not None and stop_at_layer < self.n_layers:
            options["stop_at_layer"] = stop_at_layer
        try:
            with torch.inference_mode():
                output, cache = self.model.run_with_cache(
                    ids.to(self.input_device),
                    names_filter=lambda name: name in wanted,
                    return_cache_object=False,
                    **options,
                )
        except torch.OutOfMemoryError:
            raise
        except CANNOT_RUN as error:
            raise ModelError(
                f"the model itself fails on ids of shape {tuple(ids.shape)}, in {self.dtype}: "
                f"{type(error).__name__}: {error}. Does model(ids) run?"
            ) from error
        missing = [name for name in names if name not in cache]
        if missing:
            raise ModelError(
                f"the model never fired {', '.join(missing[:4])}; this architecture does not "
                f"expose the streams that the analysis reads (transformer-lens "
                f"{version('transformer-lens')})"
            )
        stopped = output if "stop_at_layer" in options else None
        return {name: _batched(cache[name], ids) for name in names}, stopped

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Eval mode without gradients; every module's training flag and hooks are put back."""
        modules = list(self.model.modules())
        # Parts of the wrapped model that no component of the bridge stands for, dropout among them.
        original = getattr(self.model, "original_model", None)
        modules += original.modules() if isinstance(original, torch.nn.Module) else []
        flags = {module: module.training for module in modules}
        points = {id(point): point for point in self.model.hook_dict.values()}.values()
        hooks = [(point, hook_state(point)) for point in points]
        try:
            for module in flags:
                module.training = False
            with torch.no_grad():
                yield
        finally:
            for module, training in flags.items():
                module.training = training
            for point, state in hooks:
                restore_hooks(point, state)


def _digest(named: tuple[str, Tensor]) -> bytes:
    name, parameter = named
    digest = hashlib.sha256(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
    flat = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(flat.numpy().data)
    return digest.digest()


def _batched(value: Tensor, ids: Tensor) -> Tensor:
    """Give positional embeddings of one row the batch axis of the others."""
    if value.shape[0] == ids.shape[0]:
        return value
    return value.expand(ids.shape[0], *value.shape[1:])


def load_model(name: str, *, dtype: torch.dtype, device: str | None = None) -> Any:
    """Boot a model by its Hugging Face name or local folder, as the installed release can.

    TransformerBridge where there is one, else HookedTransformer. Raises ``ModelError`` with what
    the loader said.
    """
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        from transformer_lens import HookedTransformer

        boot = HookedTransformer.from_pretrained
    else:
        boot = TransformerBridge.boot_transformers
    try:
        return boot(name, dtype=dtype, device=device)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"cannot load {name!r}: {error}") from error

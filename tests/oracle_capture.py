"""The oracle's eyes: run a model once in float64 and keep what its modules were given and gave."""

import contextlib
import copy
from types import SimpleNamespace

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_SHORT = (torch.float32, torch.float16, torch.bfloat16)


class _StayDouble(TorchFunctionMode):
    """Turn every cast to a shorter float into a cast to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def longer(value):
            return torch.float64 if isinstance(value, torch.dtype) and value in _SHORT else value

        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        return func(*map(longer, args), **{k: longer(v) for k, v in (kwargs or {}).items()})


@contextlib.contextmanager
def exact():
    """Float64 everywhere: the default dtype, and every cast inside the modules."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _StayDouble(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def array(tensor):
    return tensor.detach().to("cpu", torch.float64).numpy().copy()


def stored_dtype(model):
    return next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)


def config_of(model):
    return getattr(model, "config", None) or model.cfg


def double(model):
    """A float64 copy of the model in eval mode; the original is not touched."""
    model = torch.nn.Module.to(copy.deepcopy(model), torch.float64).eval()
    if hasattr(model, "config"):
        model.config._experts_implementation = "eager"  # the grouped kernel has no float64
    else:
        model.cfg.dtype = torch.float64
    return model


def first(output):
    return output[0] if isinstance(output, tuple) else output


def capture(model, family, ids, **forward):
    """Run `model` (already float64) once: block inputs, writes, projections, additive positions."""
    got = SimpleNamespace(resid={}, writes={}, projected={}, pos=None, beside=None)
    config, blocks, handles = config_of(model), family.blocks(model), []

    def block_input(layer):
        def hook(_, args, kwargs):
            got.resid[layer] = array(args[0] if args else kwargs["hidden_states"])

        return hook

    def keep(store, key, factor=1.0):
        def hook(_, args, output):
            store[key] = factor * array(first(output)).reshape(*ids.shape, -1)

        return hook

    def position(name):
        def hook(_, args, output):
            setattr(got, name, np.broadcast_to(array(output), (*ids.shape, output.shape[-1])))

        return hook

    def watch(module, hook):
        handles.append(module.register_forward_hook(hook))

    for layer, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(block_input(layer), with_kwargs=True))
        for label, module, factor in family.writes(block, config):
            watch(module, keep(got.writes, (layer, label), factor))
        attention = family.attention(block, config)
        for index, pack in enumerate(attention.packs if attention else ()):
            watch(pack.module, keep(got.projected, (layer, index)))
            if pack.beside is not None:
                watch(pack.beside, position("beside"))
    watch(blocks[-1], keep(got.resid, len(blocks)))
    if family.pos(model) is not None:
        watch(family.pos(model), position("pos"))
    try:
        with exact():
            got.output = family.run(model, ids, forward)
    finally:
        for handle in handles:
            handle.remove()
    return got

"""A model spread over devices: sums are made where the caller asks, and nothing is mixed up.

One machine has one device, so the second is played: a torch function mode keeps two kinds of
tensors apart as CUDA would, refusing every operation on both at once.
"""

import pytest
import tiny
import torch
import zoo
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tl_valuealign.adapter import ModelView
from tl_valuealign.norms import InputNorm

pytestmark = pytest.mark.any_bridge

SECOND = torch.device("cpu:1")


class Far(torch.Tensor):
    """A tensor on the second device."""


def far(value):
    return value.as_subclass(Far) if isinstance(value, torch.Tensor) else value


def near(value):
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


class TwoDevices(TorchFunctionMode):
    """Results live where their operands do; only ``to``, ``cpu`` and ``device=`` move anything."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func == torch.Tensor.device.__get__:
            return SECOND if isinstance(args[0], Far) else torch.device("cpu")
        plain_args, plain_kwargs = tree_map(near, args), tree_map(near, kwargs)
        if func is torch.Tensor.cpu:
            return near(func(*plain_args))
        if func is torch.Tensor.to:
            places = [kwargs.get("device"), kwargs.get("other"), *args[1:]]
            there = isinstance(args[0], Far)
            for place in places:
                if isinstance(place, torch.Tensor):
                    there = isinstance(place, Far)
                elif isinstance(place, (str, torch.device)):
                    there = torch.device(place) == SECOND
            clear = [torch.device("cpu") if _is_device(a) else a for a in plain_args[1:]]
            if "device" in plain_kwargs:
                plain_kwargs["device"] = torch.device("cpu")
            return (far if there else near)(func(plain_args[0], *clear, **plain_kwargs))
        there = any(isinstance(tensor, Far) for tensor in tensors)
        if func is torch.Tensor.__getitem__ and there == isinstance(args[0], Far):
            made = func(*plain_args)  # CUDA, too, takes indices from the CPU
            return far(made) if there else made
        if there and any(t.dim() and not isinstance(t, Far) for t in tensors):
            raise RuntimeError(f"{func} got tensors on two devices")
        if plain_kwargs.get("device") is not None:
            there = torch.device(plain_kwargs["device"]) == SECOND
            plain_kwargs["device"] = torch.device("cpu")
        made = func(*plain_args, **plain_kwargs)
        return tree_map(far, made) if there else made


def _is_device(value):
    return isinstance(value, torch.device) or (isinstance(value, str) and "cpu" in value)


@pytest.fixture
def spread(monkeypatch):
    """spread(first): blocks from ``first`` on have weights and activations on the second device."""
    run, weight, stored = ModelView.run, ModelView.weight, ModelView.stored
    candidates = ModelView.norm_candidates

    def plant(first):
        def on_its_device(name, value):
            block = int(name.split(".")[1]) if name.startswith("blocks.") else 0
            return far(value) if block >= first else value

        def spread_run(view, ids, names, stop_at_layer=None):
            seen, stopped = run(view, near(ids), names, stop_at_layer)
            seen = {name: on_its_device(name, value) for name, value in seen.items()}
            if stopped is not None and stop_at_layer >= first:
                stopped = far(stopped)
            return seen, stopped

        def spread_norms(view, layer):
            found = candidates(view, layer)
            if layer < first:
                return found
            return [InputNorm(n.kind, far(n.gain), n.eps, n.gain_rule) for n in found]

        monkeypatch.setattr(ModelView, "run", spread_run)
        monkeypatch.setattr(ModelView, "norm_candidates", spread_norms)
        for name, good in (("weight", weight), ("stored", stored)):
            monkeypatch.setattr(
                ModelView,
                name,
                lambda view, layer, *rest, good=good: (far if layer >= first else near)(
                    good(view, layer, *rest)
                ),
            )

    return plant


def test_the_second_device_is_kept_apart():
    with TwoDevices():
        there, here = torch.ones(2, device=SECOND), torch.ones(2)
        assert (there.device, here.device) == (SECOND, torch.device("cpu"))
        assert (there + 1).device == SECOND and there.to(here).device == torch.device("cpu")
        with pytest.raises(RuntimeError, match="two devices"):
            there + here


@pytest.mark.parametrize(
    ("name", "first", "device"),
    [
        ("gpt2", 1, None),
        ("gpt2", 2, "cpu:1"),
        ("llama", 0, None),
        ("llama", 1, "cpu"),
        ("llama", 2, None),
        ("llama", 2, "cpu:1"),
    ],
)
def test_a_model_spread_over_two_devices(spread, name, first, device):
    options = {"roles": ("Q", "K", "V", "OV"), "components": ("attn_out", "mlp_out")}
    wanted = tiny.analyze(zoo.bridge(name), zoo.ids(), **options)
    model = zoo.bridge(name)
    spread(first)
    with TwoDevices():
        result = tiny.analyze(model, zoo.ids(), device=device, **options)
        devices = {
            value.device for values in result.roles.values() for value in vars(values).values()
        }
    assert devices == {torch.device("cpu")}
    tiny.assert_same_bits(wanted, result)

"""A run leaves nothing behind: not in the model, not in torch, not on disk, however it ends."""

import copy
import os
import random
import threading

import numpy as np
import pytest
import tiny
import torch
import zoo

import tl_valuealign as va

pytestmark = pytest.mark.any_bridge

SETTINGS = {"roles": ("Q", "K", "V", "OV"), "components": ("attn_out", "mlp_out")}


def snapshot(model):
    """Everything about a model that a run could change."""
    points = {id(point): point for point in model.hook_dict.values()}.values()
    return {
        "training": [
            module.training for module in (*model.modules(), *model.original_model.modules())
        ],
        "fwd": [[id(handle) for handle in point.fwd_hooks] for point in points],
        "bwd": [[id(handle) for handle in point.bwd_hooks] for point in points],
        "hooks": [list(point._forward_hooks) for point in points],
        "module hooks": [
            (list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()
        ],
        "cfg": copy.deepcopy({k: v for k, v in vars(model.cfg).items() if k != "_bridge_ref"}),
        "config": model.original_model.config.to_dict(),
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [p.grad is None for p in model.parameters()],
        "stop": [getattr(block, "_stop_at_layer_idx", None) for block in model.blocks],
        "context": getattr(model, "context_level", 0),
    }


def bits(model):
    return {key: value.detach().clone() for key, value in model.original_model.state_dict().items()}


def surroundings():
    """Everything about the process that a run could change."""
    return {
        "torch random": torch.random.get_rng_state().tolist(),
        "numpy random": str(np.random.get_state()),
        "random": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "environment": dict(os.environ),
        "folder": sorted(os.listdir()),
    }


@pytest.fixture(params=["raw", "compat"])
def model(request):
    return zoo.bridge("llama", compat=request.param == "compat")


@pytest.fixture(params=["returns", "exception", "interrupt", "refused", "half way", "bad input"])
def ending(request, model, monkeypatch):
    """A function that runs an analysis to this end."""
    from tl_valuealign.adapter import ModelView

    def finish(error, run):
        if error is None:
            return run()
        with pytest.raises(error):
            run()

    def hooked(error):
        def stop(value, hook):
            raise error("mine")

        def run():
            with model.hooks([("blocks.1.hook_resid_pre", stop)]):
                finish(error, lambda: tiny.analyze(model, zoo.ids(), **SETTINGS))

        return run

    if request.param == "refused":
        good = ModelView.weight
        roll = lambda view, layer, role: good(view, layer, role).roll(1, 0)  # noqa: E731
        monkeypatch.setattr(ModelView, "weight", roll)
        return lambda: finish(va.SelfCheckError, lambda: tiny.analyze(model, zoo.ids()))
    if request.param == "half way":

        def text():
            yield from zoo.ids()
            raise KeyboardInterrupt

        return lambda: finish(
            KeyboardInterrupt, lambda: tiny.analyze(model, text(), batch_size=1, **SETTINGS)
        )
    if request.param == "bad input":
        late = [[5, 6], [7, 9999]]
        return lambda: finish(va.InputError, lambda: tiny.analyze(model, late, batch_size=1))
    if request.param == "returns":
        return lambda: tiny.analyze(model, zoo.ids(), **SETTINGS)
    return hooked({"exception": ZeroDivisionError, "interrupt": KeyboardInterrupt}[request.param])


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_model_and_process_are_as_they_were(model, ending, training, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.train(training)
    model.original_model.model.layers[0].training = not training  # one module its own way
    with torch.no_grad():
        model(zoo.ids())  # the first forward pass wires hooks of TransformerLens's own
    heard = []
    model.blocks[0].hook_mlp_out.add_hook(lambda value, hook: heard.append("user"))
    model.add_perma_hook("blocks.1.attn.hook_v", lambda value, hook: heard.append("permanent"))
    before, weights, around = snapshot(model), bits(model), surroundings()
    ending()
    after, now = snapshot(model), surroundings()
    for key, value in before.items():
        assert after[key] == value, key
    for key, value in around.items():
        assert now[key] == value, key
    for key, value in bits(model).items():
        assert torch.equal(value, weights[key]), key
    heard.clear()
    with torch.no_grad():
        model(zoo.ids())
    assert sorted(set(heard)) == ["permanent", "user"]
    assert heard.count("user") == 1  # and only once: nothing was registered twice


@pytest.mark.parametrize("fault", ["drops the user's hooks", "leaves its own behind"])
def test_hooks_survive_releases_that_mislay_them(model, monkeypatch, fault):
    good, heard = type(model).run_with_cache, []

    def careless(self, *args, **options):
        try:
            return good(self, *args, **options)
        finally:
            if fault.startswith("drops"):
                self.reset_hooks()
            else:
                self.blocks[1].hook_mlp_out.add_hook(lambda value, hook: heard.append("left"))

    model.blocks[0].hook_mlp_out.add_hook(lambda value, hook: heard.append("user"))
    monkeypatch.setattr(type(model), "run_with_cache", careless)
    tiny.analyze(model, zoo.ids())
    heard.clear()
    with torch.no_grad():
        model(zoo.ids())
    assert heard == ["user"]


def test_dropout_is_off_during_the_run_only():
    """A model in training mode would not even add up."""
    options = zoo.ZOO["gpt2"].options | {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    zoo.ZOO["dropout"] = zoo.Entry("GPT2Config", "GPT2LMHeadModel", options)
    try:
        model = zoo.bridge("dropout")
    finally:
        del zoo.ZOO["dropout"]
    quiet = tiny.analyze(model, zoo.ids())
    model.train()
    tiny.assert_same_bits(quiet, tiny.analyze(model, zoo.ids()))
    assert all(module.training for module in model.modules())


def test_an_analysis_inside_the_users_own_hooks():
    """What the user edits is analysed as edited, and goes on being edited."""
    model, ids = zoo.bridge("llama"), zoo.ids()
    plain = tiny.analyze(model, ids)
    with model.hooks([("blocks.0.hook_mlp_out", lambda value, hook: 0 * value)]):
        edited = tiny.analyze(model, ids, components=("mlp_out",))
        again = tiny.analyze(model, ids)
    assert edited.norms[edited.sources.index("0_mlp_out")] == 0
    assert (again.full_norms[1] - plain.full_norms[1]).abs() > 0.1
    tiny.assert_same_bits(plain, tiny.analyze(model, ids))


# Surroundings of the caller ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    return tiny.analyze(zoo.bridge("llama"), zoo.ids(), **SETTINGS)


def tensors(result):
    yield from (result.norms, result.full_norms, result.checks.decomposition)
    yield from result.checks.read_in.values()
    for values in result.roles.values():
        yield from vars(values).values()
    for part in (result.sums, *result.sums.roles.values()):
        yield from (v for v in vars(part).values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize(
    "surrounding",
    [torch.enable_grad, torch.no_grad, torch.inference_mode],
    ids=lambda mode: mode.__name__,
)
def test_outputs_are_plain_tensors(reference, surrounding):
    with surrounding():
        result = tiny.analyze(zoo.bridge("llama"), zoo.ids(), **SETTINGS)
        assert torch.is_inference_mode_enabled() == (surrounding is torch.inference_mode)
        assert torch.is_grad_enabled() == (surrounding is torch.enable_grad)
    tiny.assert_same_bits(reference, result)
    for tensor in tensors(result):
        assert not tensor.requires_grad and not tensor.is_inference()
        assert tensor.device.type == "cpu"
    result.V.full.clone().add_(1)


def test_a_model_made_in_inference_mode(reference):
    with torch.inference_mode():
        model = zoo.bridge("llama")
    tiny.assert_same_bits(reference, tiny.analyze(model, zoo.ids(), **SETTINGS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(reference, dtype):
    before = torch.get_default_dtype()
    model = zoo.bridge("llama")
    torch.set_default_dtype(dtype)
    try:
        result = tiny.analyze(model, zoo.ids(), **SETTINGS)
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(before)
    tiny.assert_close(reference, result, atol=1e-6)


def test_the_random_state_does_not_matter(reference):
    torch.manual_seed(99)
    random.seed(99)
    tiny.assert_same_bits(reference, tiny.analyze(zoo.bridge("llama"), zoo.ids(), **SETTINGS))


def test_numpys_error_settings_do_not_matter(reference):
    with np.errstate(all="raise"):
        result = tiny.analyze(zoo.bridge("llama"), zoo.ids(), **SETTINGS)
        result.summary()
        result.boxes(significant=True)
    tiny.assert_same_bits(reference, result)


def test_two_threads_on_two_models():
    """Each gives what it gives alone."""
    names = ["gpt2", "llama"]
    models = {name: zoo.bridge(name) for name in names}
    alone = {name: tiny.analyze(zoo.bridge(name), zoo.ids(), **SETTINGS) for name in names}
    found, together = {name: [] for name in names}, threading.Barrier(2)

    def work(name):
        for _ in range(3):
            together.wait(timeout=60)
            found[name].append(tiny.analyze(models[name], zoo.ids(), batch_size=1, **SETTINGS))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert len(found[name]) == 3
        for result in found[name]:
            tiny.assert_close(alone[name], result, atol=1e-6)
            tiny.assert_same_bits(found[name][0], result)
        assert snapshot(models[name])["training"] == snapshot(zoo.bridge(name))["training"]


def test_nothing_is_printed_and_no_warning_is_raised(capsys, recwarn):
    model = zoo.bridge("llama")
    recwarn.clear()
    tiny.analyze(model, zoo.ids())
    assert capsys.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_importing_changes_nothing():
    """No plotly template, torch setting or logger of others is touched on import."""
    import subprocess
    import sys

    code = """
import logging, sys, torch, plotly.io
def state():
    return (
        plotly.io.templates.default, torch.get_default_dtype(), torch.get_num_threads(),
        torch.is_grad_enabled(), logging.getLogger().level, logging.getLogger().handlers[:],
    )
before = state()
import tl_valuealign
assert state() == before, (before, state())
assert "transformer_lens" not in sys.modules
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)

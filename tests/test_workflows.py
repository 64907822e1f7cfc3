"""In notebooks and scripts of other people: figures are returned, never shown; nothing is set."""

import subprocess
import sys

import plotly.graph_objects as go
import plotly.io as pio
import pytest
from fakes import fake_result
from test_compare import measured

import tl_valuealign as va
from tl_valuealign import plots

RESULT = fake_result(4, 3)
PLOTS = [name for name in plots.__all__ if name.startswith("plot_")]


def draw(name):
    if name == "compare":
        return va.compare({"a": measured(0), "b": measured(1)}).figure
    return getattr(plots, name)(RESULT)


@pytest.mark.parametrize("name", [*PLOTS, "compare"])
def test_a_figure_is_returned_and_never_shown(name, monkeypatch, capsys):
    def shown(*_, **__):
        raise AssertionError(f"{name} shows its figure")

    monkeypatch.setattr(go.Figure, "show", shown)
    monkeypatch.setattr(pio, "show", shown)
    monkeypatch.setattr("webbrowser.open", shown)
    before = (pio.templates.default, pio.renderers.default, list(pio.templates))
    figure = draw(name)
    assert isinstance(figure, go.Figure)
    assert (pio.templates.default, pio.renderers.default, list(pio.templates)) == before
    assert capsys.readouterr() == ("", "")


def test_importing_sets_nothing_of_others():
    """In a fresh interpreter, so that the import itself is seen."""
    code = """
import logging, warnings, sys
import pandas, plotly.graph_objects, scipy.stats, torch, typeguard  # their own settings come first
import plotly.io as pio
def state():
    return (
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
        torch.initial_seed(), pio.templates.default, pio.renderers.default,
        logging.getLogger().level, list(logging.getLogger().handlers),
        list(warnings.filters), sys.getrecursionlimit(),
    )
before, loaded = state(), set(sys.modules)
import tl_valuealign as va
assert state() == before, (before, state())
loaded = set(sys.modules) - loaded
assert not loaded & {"transformer_lens", "IPython", "xarray", "kaleido"}, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

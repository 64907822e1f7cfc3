"""In notebooks and scripts of other people: figures are returned, never shown; nothing is set."""

import sys

import plotly.graph_objects as go
import plotly.io as pio
import pytest
from fakes import fake_result
from test_compare import measured

import tl_valuealign as va
from tl_valuealign import plots

RESULT = fake_result(4, 3)
DRAWN = {
    **{
        name: (lambda draw=getattr(plots, name): draw(RESULT))
        for name in plots.__all__
        if name.startswith("plot_")
    },
    "compare": lambda: va.compare({"a": measured(0), "b": measured(1)}).figure,
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_returned_and_never_shown(name, monkeypatch, capsys):
    def shown(*_, **__):
        raise AssertionError(f"{name} shows its figure")

    monkeypatch.setattr(go.Figure, "show", shown)
    monkeypatch.setattr(pio, "show", shown)
    monkeypatch.setattr("webbrowser.open", shown)
    before = (pio.templates.default, pio.renderers.default, list(pio.templates))
    figure = DRAWN[name]()
    assert isinstance(figure, go.Figure)
    assert (pio.templates.default, pio.renderers.default, list(pio.templates)) == before
    assert capsys.readouterr() == ("", "")


def test_importing_and_drawing_set_nothing_of_others(tmp_path):
    """In a fresh interpreter, so that the import itself is seen."""
    import subprocess

    code = """
import logging, warnings, sys
import torch, plotly.io as pio
def state():
    return (
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
        torch.initial_seed(), pio.templates.default, pio.renderers.default,
        logging.getLogger().level, list(logging.getLogger().handlers),
        list(warnings.filters), sys.getrecursionlimit(),
    )
before = state()
import tl_valuealign as va
assert state() == before, (before, state())
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"transformer_lens", "IPython", "xarray", "kaleido"}, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""examples/tour.ipynb runs top to bottom, and is stored without what it printed."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TOUR = Path(__file__).parent.parent / "examples" / "tour.ipynb"
PLOTLY = "application/vnd.plotly.v1+json"
FIGURES = (
    "plot_full_stream",
    "plot_sources",
    "plot_norms",
    "plot_directions",
    "plot_projected_norms",
    "plot_explorer",
    "compare",
)


@pytest.fixture
def tour():
    return nbformat.read(TOUR, as_version=4)


def test_it_is_stored_without_outputs(tour):
    nbformat.validate(tour)
    code = [cell for cell in tour.cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.bridge
@pytest.mark.slow
def test_it_runs_and_every_figure_is_shown(tour, tmp_path, monkeypatch):
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    client = NotebookClient(
        tour, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises CellExecutionError with the cell and its traceback
    shown = [
        cell.source
        for cell in tour.cells
        if cell.cell_type == "code" and any(PLOTLY in out.get("data", {}) for out in cell.outputs)
    ]
    for name in FIGURES:
        assert any(f"va.{name}(" in source for source in shown), f"{name} is not shown"
    assert list(tmp_path.iterdir()) == [], "the tour leaves files beside itself"

"""The notebook: its code runs from top to bottom, and it is stored with the outputs of a run."""

from pathlib import Path

import pytest


nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
NOTEBOOK = Path(__file__).parents[1] / "examples/notebooks/tour.ipynb"
TIMEOUT = 180


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook) -> list[dict]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.slow
def test_code_runs(notebook):
    """Runs all cells, which raises their errors, and draws the pictures again."""
    num_pictures = len([output for output in outputs(notebook) if "image/png" in output.get("data", {})])
    nbclient.NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert len([output for output in outputs(notebook) if "image/png" in output.get("data", {})]) == num_pictures == 3


def test_stored_with_outputs(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))  # one run, from top to bottom
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert NOTEBOOK.stat().st_size < 700_000

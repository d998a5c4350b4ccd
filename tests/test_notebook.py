"""The notebook: its code runs from top to bottom, it is stored with the outputs of a run, and is a page of the site."""

import base64
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest


nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples/notebooks/tour.ipynb"
SITE_HOOKS = ROOT / "examples/guides/reference/site_hooks.py"
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
    assert not [output for output in outputs(notebook) if output.output_type == "error" or output.get("name") == "stderr"]
    assert NOTEBOOK.stat().st_size < 700_000


def test_picture_of_the_readme(notebook):
    """It is the notebook's picture of the caches."""
    (cell,) = [cell for cell in notebook.cells if "def cache_bytes" in cell.source]
    (picture,) = [output["data"]["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    assert base64.b64decode(picture) == (NOTEBOOK.parent / "cache.png").read_bytes()
    assert "tost-base: [111840, 111840, 111840, 111840]" in str(cell.outputs)  # README's numbers
    assert "73728000" in str(cell.outputs) and "4867008" in str(cell.outputs)


def test_page_of_the_site(notebook):
    pytest.importorskip("mkdocs")
    hooks = runpy.run_path(str(SITE_HOOKS))
    markdown, pictures = hooks["render_notebook"](notebook, "tour")
    assert [f"![Output]({name})" in markdown for name in pictures] == [True] * 3
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    assert all(cell.source in markdown for cell in notebook.cells)
    for output in outputs(notebook):
        if output.output_type == "stream":
            assert (output.text.rstrip() in markdown) == (output.name == "stdout")
    link = "[a](../notebooks/tour.ipynb), [b](x.md)"
    assert hooks["on_page_markdown"](link) == "[a](../notebooks/tour.md), [b](x.md)"


@pytest.mark.parametrize(("target", "returncode"), [("index.md", 0), ("none.md", 1)])
def test_site_is_silent_and_strict(tmp_path, target, returncode):
    """The command of `make docs`, on a notebook with a link."""
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[a](a.ipynb)")
    cells = [nbformat.v4.new_markdown_cell(f"[b]({target})")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "docs/a.ipynb")
    (tmp_path / "mkdocs.yml").write_text(f"{{site_name: a, theme: material, plugins: [], hooks: [{SITE_HOOKS}]}}")
    [options] = re.findall(r"mkdocs (build .*)--config-file", (ROOT / "Makefile").read_text())
    command = [sys.executable, "-m", "mkdocs", *options.split(), "--config-file", str(tmp_path / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert completed.returncode == returncode, completed.stderr
    assert (target in completed.stderr) == (returncode == 1) == bool(completed.stdout + completed.stderr)

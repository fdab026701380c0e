"""The course: each notebook runs; the checks give hints, and pass with the solutions.

`make test` runs the first notebook with its solutions. `make test-course` runs all with their
solutions in one folder, and then as they are in the same folder.
"""

import os
import re
from pathlib import Path

import nbformat
import pytest
from launching import ROOT
from nbclient import NotebookClient

NOTEBOOKS = sorted((ROOT / "course").glob("*.ipynb"))
LONG = os.environ.get("COURSE") == "long"
EXERCISES = ("1", "2", "3")


def read(path: Path) -> nbformat.NotebookNode:
    """Returns a notebook."""
    return nbformat.read(path, as_version=4)


def tagged(notebook: nbformat.NotebookNode, tag: str) -> list[nbformat.NotebookNode]:
    """Returns the cells with a tag."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Returns the cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def name_of(path: Path) -> str:
    """Returns a notebook's name, for the name of its test."""
    return path.stem


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of all notebooks."""
    return tmp_path_factory.mktemp("course")


@pytest.mark.parametrize("path", NOTEBOOKS if LONG else NOTEBOOKS[:1], ids=name_of)
@pytest.mark.parametrize("solved", [True, False] if LONG else [True])
def test_a_notebook_runs(path, solved, folder):
    notebook = read(path)
    if solved:
        for number in EXERCISES:
            [exercise] = tagged(notebook, f"exercise-{number}")
            [solution] = tagged(notebook, f"solution-{number}")
            exercise.source = solution.source
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources)
    client.execute()  # raises the error of a cell
    written = {found.name for found in folder.iterdir()}
    assert written <= {path.stem for path in NOTEBOOKS}  # each has its own folder
    printed = []
    for cell in tagged(notebook, "check"):
        for output in cell.outputs:
            printed += output.get("text", "").splitlines()
    verdict = "solved." if solved else "not yet. Hint: "
    for number, line in zip(EXERCISES, printed, strict=True):
        assert line.startswith(f"Exercise {number}: {verdict}")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_complete(path):
    notebook = read(path)
    assert notebook.cells[0].source.startswith(f"# {int(path.name[:2])} · ")
    code = code_cells(notebook)
    first = code_cells(read(NOTEBOOKS[0]))  # all notebooks begin alike
    assert [cell.source for cell in code[:2]] == [cell.source for cell in first[:2]]
    for cell in code:  # each name that a notebook imports exists
        for line in re.findall(r"^from gpt2_accel.* import .*[^(]$", cell.source, re.MULTILINE):
            exec(line)
    for cell in tagged(notebook, "solution"):
        assert cell.metadata["jupyter"]["source_hidden"]
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    # Stored outputs belong to the notebook as it is: it ran from top to bottom.
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not re.search(r"/(root|home|tmp|work)/", path.read_text(encoding="utf-8"))

"""The course: each notebook runs as handed out, where every check gives its hint, and with the solutions, where all pass.

`make test` runs the first notebook with its solutions, `make test-course` all of them, about 30 minutes on 2 CPU cores.
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


def solve(notebook: nbformat.NotebookNode) -> None:
    """Puts each solution into the cell of its exercise."""
    for number in EXERCISES:
        [exercise] = tagged(notebook, f"exercise-{number}")
        [solution] = tagged(notebook, f"solution-{number}")
        exercise.source = solution.source


def verdicts(notebook: nbformat.NotebookNode) -> list[str]:
    """Returns what the checks print, such as "Exercise 1: solved."."""
    lines = []
    for cell in tagged(notebook, "check"):
        for output in cell.outputs:
            lines += output.get("text", "").splitlines()
    return lines


def name_of(path: Path) -> str:
    """Returns a notebook's name, for the name of its test."""
    return path.stem


@pytest.mark.parametrize("path", NOTEBOOKS if LONG else NOTEBOOKS[:1], ids=name_of)
@pytest.mark.parametrize("solved", [True, False] if LONG else [True])
def test_a_notebook_runs(path, solved, tmp_path):
    notebook = read(path)
    if solved:
        solve(notebook)
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()  # raises the error of a cell
    expected = "Exercise {}: solved." if solved else "Exercise {}: not yet. Hint: "
    found = verdicts(notebook)
    assert len(found) == len(EXERCISES)
    for number, line in zip(EXERCISES, found, strict=True):
        assert line.startswith(expected.format(number))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_complete(path):
    notebook = read(path)
    first = read(NOTEBOOKS[0])
    titles = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert titles[0].startswith(f"# {path.name[0]} · ")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    given = [cell for cell in first.cells if cell.cell_type == "code"]
    assert [cell.source for cell in code[:2]] == [cell.source for cell in given[:2]]
    for cell in tagged(notebook, "solution"):
        assert cell.metadata["jupyter"]["source_hidden"]
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    # Stored outputs belong to the notebook as it is: it ran from top to bottom.
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert not re.search(r"/(root|home|tmp|work)/", path.read_text(encoding="utf-8"))

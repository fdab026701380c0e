"""The course: each notebook runs as handed out, solved, and with wrong answers, in one folder.

`make test` runs the first notebook with its solutions; `make test-course` runs all, in the three
ways one after the other. The answers are in tests/course/answers.yaml.
"""

import os
import re
from pathlib import Path

import nbformat
import pytest
import yaml
from launching import ROOT
from nbclient import NotebookClient
from tables import table

NOTEBOOKS = sorted((ROOT / "course").glob("*.ipynb"))
LONG = os.environ.get("COURSE") == "long"
EXERCISES = yaml.safe_load((ROOT / "course/exercises.yaml").read_text(encoding="utf-8"))
ANSWERS = table("course/answers")
# What the check and the solution's cell print, by the kind of answer.
PRINTED = {
    "empty": ("not written yet.", "the solution of "),
    "solved": ("solved.", "your "),
    "wrong": ("not yet.", "the solution of "),
}


def read(path: Path) -> nbformat.NotebookNode:
    """Returns a notebook."""
    return nbformat.read(path, as_version=4)


def tagged(notebook: nbformat.NotebookNode, tag: str) -> list[nbformat.NotebookNode]:
    """Returns the cells with a tag."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Returns the cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def names(notebook: nbformat.NotebookNode) -> list[str]:
    """Returns the names of a notebook's exercises."""
    return [re.search('check."(.+?)"', cell.source)[1] for cell in tagged(notebook, "check")]


def name_of(path: Path) -> str:
    """Returns a notebook's name, for the name of its test."""
    return path.stem


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of all notebooks."""
    return tmp_path_factory.mktemp("course")


@pytest.mark.skipif(not LONG, reason="in make test-course")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
@pytest.mark.parametrize("answers", PRINTED)
def test_a_notebook_runs(path, answers, folder):
    notebook = read(path)
    for cell, name in zip(tagged(notebook, "exercise"), names(notebook), strict=True):
        if answers == "solved":
            cell.source = EXERCISES[name]["solution"]
        if answers == "wrong":
            cell.source = ANSWERS[name]["wrong"][0][1]
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources)
    client.execute()  # raises the error of a cell
    written = {found.name for found in folder.iterdir()}
    assert written <= {path.stem for path in NOTEBOOKS}  # each has its own folder
    verdict, kept = PRINTED[answers]
    starts = {"check": f"NAME: {verdict}", "solution": f"The notebook goes on with {kept}NAME."}
    for tag, start in starts.items():
        for name, cell in zip(names(notebook), tagged(notebook, tag), strict=True):
            printed = "".join(output.get("text", "") for output in cell.outputs)
            assert start.replace("NAME", name) in printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_complete(path):
    notebook = read(path)
    assert notebook.cells[0].source.startswith(f"# {int(path.name[:2])} · ")
    code = code_cells(notebook)
    assert code[0].source == code_cells(read(NOTEBOOKS[0]))[0].source  # all begin alike
    for cell in code:  # each name that a notebook imports exists
        for line in re.findall(r"^from gpt2_accel.* import .*[^(]$", cell.source, re.MULTILINE):
            exec(line)
    for number, name in enumerate(names(notebook), 1):
        [exercise] = tagged(notebook, f"exercise-{number}")
        [solution] = tagged(notebook, f"solution-{number}")
        assert exercise.source == EXERCISES[name]["start"].strip()
        source = EXERCISES[name]["solution"].replace(f"def {name}(", "def solution(", 1)
        assert solution.source.startswith("# @title ")  # the caption, in JupyterLab and Colab
        assert solution.source.endswith(f'\n{source}\n\n{name} = keep("{name}", {name}, solution)')
        assert solution.metadata["jupyter"]["source_hidden"]
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    # Stored outputs belong to the notebook as it is: it ran from top to bottom.
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not re.search(r"/(root|home|tmp|work)/", path.read_text(encoding="utf-8"))

"""The checks of the course's exercises: right answers pass, wrong ones are told their mistake."""

import linecache
import math
import re
import statistics
import sys
import time
from collections import Counter
from types import ModuleType

import numpy as np
import pytest
import torch
from tables import table
from torch import nn
from torch.nn import functional as F

from gpt2_accel.tools.course import check, keep

checks = sys.modules[check.__module__]
ANSWERS = table("course/answers")
RIGHT = [
    (name, source)
    for name, entry in checks.EXERCISES.items()
    for source in [entry["solution"], *ANSWERS[name]["right"]]
]
WRONG = [(name, *row) for name, entry in ANSWERS.items() for row in entry["wrong"]]


def define(name: str, source: str):
    """Defines a function in the notebook's names, as a cell does, and returns it."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = checks.NOTEBOOK
    exec(compile(source, file, "exec"), names)
    return names[name]


PIECES = re.compile(r"<\|im_\w+\|>|\w+|\W")


class Tokens:
    """Gives words and signs token ids, and decodes them."""

    def __init__(self):
        self.pieces = []

    def encode(self, text):
        found = PIECES.findall(text)
        self.pieces += [piece for piece in found if piece not in self.pieces]
        return [self.pieces.index(piece) for piece in found]

    def decode(self, ids):
        return "".join(self.pieces[token] for token in ids)


@pytest.fixture(autouse=True)
def notebook(monkeypatch):
    """The names that the notebooks have where their exercises stand."""
    module = ModuleType("__main__")
    tokens = Tokens()
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"re", b" na"]

    def encode_bytes(text):
        data = text.encode()
        return [256, *data[2:]] if data.startswith(b"re") else list(data)

    names = dict(math=math, np=np, torch=torch, nn=nn, F=F, time=time, statistics=statistics)
    names |= dict(Counter=Counter, vocabulary=vocabulary, encode=encode_bytes, tokens=tokens)
    names |= dict(END=tokens.encode("<|im_end|>")[0], likeliest=lambda ids: 0)
    names |= dict(synchronize=lambda: None)
    names["mix"] = lambda x, key: x * np.uint64(2654435761) + np.uint64(key * 977) >> np.uint64(3)
    vars(module).update(names)
    monkeypatch.setattr(checks, "NOTEBOOK", vars(module))
    monkeypatch.setattr(checks, "SECONDS", 1)
    checks.tries.clear()
    return module


def notebook_of(name, notebook):
    """Notebook 10 has another `encode` than notebook 1."""
    if name in ("labels", "reply"):
        notebook.encode = notebook.tokens.encode
        exec(checks.EXERCISES["chatml"]["solution"], vars(notebook))


@pytest.mark.parametrize(("name", "source"), RIGHT)
def test_a_right_answer_passes(name, source, notebook, capsys):
    notebook_of(name, notebook)
    function = define(name, source)
    check(name, function)
    assert capsys.readouterr().out == f"{name}: solved.\n"


@pytest.mark.parametrize(("name", "words", "source"), WRONG)
def test_a_wrong_answer_is_told_its_mistake(name, words, source, notebook, capsys):
    notebook_of(name, notebook)
    check(name, define(name, source))
    told = capsys.readouterr().out
    print(told)
    assert f"{name}: not yet. " in told and words in told
    assert told.endswith(f"Hint: {checks.EXERCISES[name]['hints'][0]}\n")


def test_an_empty_answer_is_no_try_and_a_changed_one_gets_the_next_hint(capsys):
    hints = checks.EXERCISES["residual_std"]["hints"]
    head = "def residual_std(n_layer):\n    "
    check("residual_std", define("residual_std", checks.EXERCISES["residual_std"]["start"]))
    assert "not written yet" in capsys.readouterr().out
    answers = ("return a", "return b", "return 1", "return 1  # as before", "return 3", "return 4")
    for answer, hint in zip(answers, (0, 0, 1, 1, 2, 2), strict=True):
        check("residual_std", define("residual_std", head + answer))
        told = capsys.readouterr().out
        assert told.endswith(f"Hint: {hints[hint]}\n")
        assert ("Unchanged: did its cell run" in told) == ("as before" in answer)


def test_the_notebook_goes_on_with_a_right_answer_and_else_with_the_solution(capsys):
    source = checks.EXERCISES["residual_std"]["solution"]
    own = define("residual_std", source)
    solution = define("solution", source.replace("residual_std", "solution"))
    assert keep("residual_std", own, solution) is own
    wrong = define("residual_std", "def residual_std(n_layer):\n    return 1")
    assert keep("residual_std", wrong, solution) is solution
    assert keep("residual_std", solution, solution) is solution
    assert keep("residual_std", wrong)(8) == 0.005  # as in the handout
    told = capsys.readouterr().out.splitlines()
    assert [line.count(" your ") for line in told] == [1, 0, 0, 0]
    check("residual_std", solution)
    assert "solved" not in capsys.readouterr().out


@pytest.mark.parametrize("name", checks.EXERCISES)
def test_the_table_is_complete(name, notebook):
    """Each mistake is one: a case tells it from the solution."""
    entry = checks.EXERCISES[name]
    notebook_of(name, notebook)
    assert len(entry["hints"]) == 3 and len(entry["mistakes"]) >= 4
    assert len(ANSWERS[name]["right"]) >= 2 and len(ANSWERS[name]["wrong"]) >= 2
    right = define(name, entry["solution"])
    for sentence, *edits in entry["mistakes"]:
        source = entry["solution"] if edits[1:] else edits[0]
        for old, new in zip(edits[::2], edits[1::2], strict=False):
            assert old in source, (sentence, old)
            source = source.replace(old, new)
        wrong = define(name, source)
        pairs = (
            (checks.outcome(name, f, case)[0] for f in (wrong, right)) for case in entry["cases"]
        )
        assert any(checks.difference(*pair) for pair in pairs), sentence

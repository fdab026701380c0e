"""The checks of the course's exercises: right answers pass, wrong ones are told their mistake."""

import linecache
import math
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F

from gpt2_accel.tools.course import check

checks = sys.modules[check.__module__]
ANSWERS = yaml.safe_load((Path(__file__).parent / "answers.yaml").read_text(encoding="utf-8"))
RIGHT = [
    (name, source)
    for name, entry in checks.EXERCISES.items()
    for source in [entry["solution"], *ANSWERS.get(name, {"right": []})["right"]]
]
WRONG = [(name, *row) for name, entry in ANSWERS.items() for row in entry["wrong"]]
MUTANTS = [(name, *row) for name, entry in checks.EXERCISES.items() for row in entry["mistakes"]]


def define(name: str, source: str):
    """Defines a function in the notebook's names, as a cell does, and returns it."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = checks.NOTEBOOK
    exec(compile(source, file, "exec"), names)
    return names[name]


PIECES = re.compile(r"<\|im_\w+\|>|\w+|\W")


class Tokens:
    """Token ids of words and signs; it can decode the ids that it has seen."""

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

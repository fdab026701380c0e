"""The formulas of the metrics, and the files that a notebook loads by `evaluate.load`."""

import math
from pathlib import Path

import evaluate
import pytest
from tables import table

from gpt2_accel.evals import formulas, metrics

FOLDER = Path(metrics.__file__).parent


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`evaluate.load` of a file's name, without the network, as a notebook calls it."""
    monkeypatch.setattr("socket.socket.connect", pytest.fail)

    def load_file(name, *config):
        return evaluate.load(str(FOLDER / f"{name}.py"), *config, cache_dir=str(tmp_path))

    return load_file


def test_metrics_loaded_in_a_notebook_give_the_values_of_the_package(load):
    for name, (file, *config), columns, expected in table("evals/metrics"):
        results = getattr(formulas, file)(**columns, name=name)
        n = len(columns["references"])
        error = math.sqrt(expected * (1 - expected) / (n - 1))
        both = {f"{name}_stderr": error, f"{name}_stderr_n": n}
        assert results == pytest.approx({name: expected} | both)
        assert load(file, *config).compute(**columns) == results
    windows = {"nats": [3.0, 5.0], "tokens": [2, 2]}
    expected = formulas.token_loss(**windows, text_bytes=8)
    assert load("token_loss").compute(**windows, text_bytes=8) == expected

"""The formulas of the metrics, and the files that a notebook loads by `evaluate.load`."""

import math
from pathlib import Path

import evaluate
import pytest
import torch

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.data.loader import EvalLoader, open_split
from gpt2_accel.evals import formulas, metrics
from gpt2_accel.evals.validation import per_window, token_losses, validation_loss

FOLDER = Path(metrics.__file__).parent


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`evaluate.load` of a file's name, without the network, as a notebook calls it."""
    monkeypatch.setattr("socket.socket.connect", pytest.fail)

    def load_file(name, *config):
        return evaluate.load(str(FOLDER / f"{name}.py"), *config, cache_dir=str(tmp_path))

    return load_file


def test_losses_at_the_limits():
    assert formulas.mean_loss([2.0], [4]) == {"loss": 0.5}  # no standard error of one window
    assert formulas.token_loss([2e6], [1])["perplexity"] == math.inf
    with pytest.raises(ValueError):
        formulas.mean_loss([], [])


def test_a_notebook_that_loads_the_files_gets_the_digits_of_the_package(load):
    choices = {
        "scores": [[-1.0, -1.0], [-4.0, -3.0], [-2.0, -1.5], [0.0, math.nan]],
        "lengths": [[1, 1], [4, 1], [1, 1], [1, 1]],
        "references": [0, 0, 0, 0],
    }
    texts = {"predictions": [" yes\n", "Yes", "no"], "references": ["yes", "yes", "no "]}
    for name, file, columns, expected in [
        ("acc", "choice_accuracy", choices, 2 / 4),  # the first of equal ones; NaN is wrong
        ("exact_match", "exact_match", texts, 2 / 3),
    ]:
        found = metrics.combine("x", file, {name: columns})
        error = math.sqrt(expected * (1 - expected) / (len(columns["references"]) - 1))
        assert found == {f"x/{name}": expected, f"x/{name}_stderr": error}
        own = load(file).compute(**columns)
        assert {f"x/{key}": value for key, value in own.items()} == found
    assert load("choice_accuracy", "acc_norm").compute(**choices)["acc_norm"] == 2 / 4


def test_the_validation_loss_of_training_has_the_digits_of_the_metric(accelerator, data_dir, load):
    """The loop adds tensors; the metric gets batches of windows, in another order."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, n_positions=32, n_layer=1, n_head=1, n_embd=8))
    loader = EvalLoader(
        open_split(data_dir, "val"), sequence_length=32, batch_size=4, max_tokens=320
    )
    logged = validation_loss(accelerator, model, loader=loader)
    windows = per_window(accelerator, model, loader, token_losses, "")
    nats, tokens = windows["loss"].tolist(), windows["counted"].int().tolist()
    text_bytes = sum(tokens) * loader.bytes_per_token
    loss = load("token_loss")
    for part in (slice(7, 10), slice(0, 7)):
        loss.add_batch(nats=nats[part], tokens=tokens[part])
    found = loss.compute(text_bytes=text_bytes)
    assert {f"val/{name}": value for name, value in found.items()} == logged

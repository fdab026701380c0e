"""The formulas of the metrics, and the metrics of the `evaluate` library that compute them."""

import math

import pytest

from gpt2_accel.evals import formulas
from gpt2_accel.evals.metrics import TokenLoss


def test_formulas():
    loss = {"loss": 0.75, "loss_stderr": 0.125}
    assert formulas.mean_loss([2.0, 1.0], [3, 1]) == loss
    assert formulas.mean_loss([2.0], [4]) == {"loss": 0.5}
    assert formulas.perplexity(2e6) == math.inf
    assert formulas.bits_per_byte([math.log(2) * 3], 2) == pytest.approx(1.5)
    assert formulas.choice_accuracy([[1, 1], [0, 1], [2, 1]], [0, 0, 1])["accuracy"] == 1 / 3
    assert formulas.choice_accuracy([[1, math.nan], [math.nan, 1]], [0, 1])["accuracy"] == 0
    with pytest.raises(ValueError):
        formulas.mean_loss([], [])


def test_metrics_of_batches_and_of_one_call():
    loss = TokenLoss(keep_in_memory=True)
    loss.add_batch(nats=[2.0], tokens=[3])
    loss.add_batch(nats=[1.0], tokens=[1])
    perplexity = math.exp(0.75)
    assert loss.compute() == {"loss": 0.75, "loss_stderr": 0.125, "perplexity": perplexity}
    assert "nats" in loss.inputs_description and "mean loss per token" in loss.description

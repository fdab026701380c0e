"""The metrics of the `evaluate` library, used through that library only."""

import math

import pytest

from gpt2_accel.evals import formulas
from gpt2_accel.evals.metrics import BitsPerByte, ChoiceAccuracy, Perplexity, TokenLoss

NATS, TOKENS, BYTES = [3.5, 0.25, 7.0, 1.0, 2.0], [2, 1, 9, 1, 3], [5, 1, 20, 2, 9]
CHOICES, LABELS = (
    [[-1.0, -2.0], [-3.0, -1.0, -2.0], [0.5, 0.25], [1.0, 2.0], [4.0, 3.0]],
    [0, 1, 1, 1, 1],
)


def test_batches_and_one_call_give_the_same_result():
    loss = TokenLoss(keep_in_memory=True)
    loss.add_batch(nats=NATS[:1], tokens=TOKENS[:1])
    loss.add_batch(nats=NATS[1:], tokens=TOKENS[1:])
    assert loss.compute() == formulas.mean_loss(NATS, TOKENS)
    assert formulas.mean_loss(NATS, TOKENS)["loss"] == sum(NATS) / sum(TOKENS)
    found = Perplexity(keep_in_memory=True).compute(nats=NATS, tokens=TOKENS)
    assert found == {"perplexity": pytest.approx(math.exp(13.75 / 16))}
    found = BitsPerByte(keep_in_memory=True).compute(nats=NATS, bytes=BYTES)
    assert found == {"bits_per_byte": pytest.approx(13.75 / math.log(2) / 37)}
    found = ChoiceAccuracy(keep_in_memory=True).compute(predictions=CHOICES, references=LABELS)
    assert found == formulas.choice_accuracy(CHOICES, LABELS) and found["accuracy"] == 3 / 5
    assert "nats" in loss.inputs_description and "mean loss per token" in loss.description


def test_bad_samples_are_refused():
    metric = ChoiceAccuracy(keep_in_memory=True)
    with pytest.raises(
        ValueError, match="sample 1 has the label 2: give the index of one of its 2 choices"
    ):
        metric.compute(predictions=CHOICES[2:], references=[0, 2, 1])
    with pytest.raises(ValueError, match="at least one"):
        TokenLoss(keep_in_memory=True).compute(nats=[], tokens=[])

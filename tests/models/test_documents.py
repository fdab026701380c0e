"""Several texts in a row: positions restart with each, and attention stays inside it."""

import pytest
import torch
from conftest import assert_close, randomized, refused
from families import own_shape
from transformers import AutoModelForCausalLM

from gpt2_accel import save_pretrained
from gpt2_accel.config import ARCHITECTURES
from gpt2_accel.models.parts import document_positions

LENGTHS = ((5, 30, 1, 12), (48,), (20, 20, 8))  # tokens per text, for each row


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return randomized(own_shape(request.param, vocab_size=97).build())


@pytest.fixture
def batch():
    input_ids, targets = torch.randint(97, (2, len(LENGTHS), 48))
    targets[torch.rand(targets.shape) < 0.4] = -100
    documents = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    return input_ids, targets, documents


def alone(model, input_ids, targets, documents):
    """Returns the summed loss of the texts, each in a batch of its own."""
    total = 0.0
    for ids, goals, numbers in zip(input_ids, targets, documents, strict=True):
        for number in numbers.unique():
            mine = numbers == number
            total += model(ids[mine][None], goals[mine][None], reduction="none").sum()
    return total


def test_loss_and_gradients_equal_those_of_the_texts_alone(model, batch):
    input_ids, targets, documents = batch
    expected = alone(model, *batch)
    nats = model(input_ids, targets, documents=documents, reduction="none")
    assert nats.sum().item() == pytest.approx(expected.item(), rel=1e-6)
    mean = model(input_ids, targets, documents=documents)
    assert mean.item() == pytest.approx(expected.item() / (targets != -100).sum().item(), abs=1e-5)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(nats.sum(), parameters)
    expected_gradients = torch.autograd.grad(expected, parameters)
    for pair in zip(gradients, expected_gradients, strict=True):
        assert_close(*pair)
    longer = torch.zeros(1, 49, dtype=torch.int64)
    with refused("a sequence of 49 tokens is longer than n_positions"):
        model(longer, documents=longer)


@pytest.mark.parametrize("model", ["gpt2", "qwen3"], indirect=True)
def test_compiled_loss_is_the_same_without_a_graph_break(model, batch):
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        nats = forward(*batch[:2], documents=batch[2], reduction="none")
        assert nats.sum().item() == pytest.approx(alone(model, *batch).item(), rel=1e-6)


def test_transformers_has_the_same_logits(model, batch, tmp_path):
    """With `position_ids`, without a mask or a cache, transformers finds the texts by itself."""
    input_ids, _, documents = batch
    save_pretrained(model, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    positions = document_positions(documents, 48)
    with torch.no_grad():
        theirs = reference(input_ids, position_ids=positions, use_cache=False).logits
        ours = model(input_ids, documents=documents)
    assert_close(ours, theirs)

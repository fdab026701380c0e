"""Several texts in a row: positions restart with each, and attention stays inside it."""

from functools import partial

import pytest
import torch
from conftest import randomized, refused
from transformers import AutoModelForCausalLM

from gpt2_accel import GPTConfig
from gpt2_accel.hf.convert import hf_config
from gpt2_accel.hf.tensors import to_hf
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.models.nanochat import NanochatConfig
from gpt2_accel.models.parts import document_positions
from gpt2_accel.models.qwen3 import Qwen3Config

ROTARY = {"n_kv_head": 1, "head_dim": 16, "n_inner": 64}
KINDS = {
    "gpt2": GPTConfig,
    "llama": partial(LlamaConfig, **ROTARY),
    "llama, untied": partial(LlamaConfig, **ROTARY, tied=False),
    "qwen3": partial(Qwen3Config, **ROTARY),
    "nanochat": partial(NanochatConfig, **ROTARY),
}
LENGTHS = ((5, 30, 1, 12), (48,), (20, 20, 8))  # of the texts in each row


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def model(request):
    config = request.param(97, n_positions=48, n_layer=2, n_head=2, n_embd=32)
    return randomized(config.build())


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


def test_positions_restart():
    documents = torch.tensor([[1, 1, 1, 2, 3, 3], [0, 0, 0, 0, 0, 0], [0, 4, 4, 4, 4, 9]])
    expected = [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 0]]
    assert document_positions(documents, 6).tolist() == expected
    with refused("a sequence of 6 tokens is longer than n_positions"):
        document_positions(documents, 5)


def test_loss_and_gradients_equal_those_of_the_texts_alone(model, batch):
    input_ids, targets, documents = batch
    expected = alone(model, *batch)
    nats = model(input_ids, targets, documents=documents, reduction="none")
    assert nats.sum().item() == pytest.approx(expected.item(), rel=1e-6)
    mean = model(input_ids, targets, documents=documents)
    assert mean.item() == pytest.approx(expected.item() / (targets != -100).sum().item(), abs=1e-6)
    parameters = list(model.parameters())
    for found, whole in zip(
        torch.autograd.grad(nats.sum(), parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", [KINDS["gpt2"], KINDS["qwen3"], KINDS["nanochat"]], indirect=True)
def test_compiled_loss_is_the_same_without_a_graph_break(model, batch):
    forward = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        nats = forward(*batch[:2], documents=batch[2], reduction="none")
        assert nats.sum().item() == pytest.approx(alone(model, *batch).item(), rel=1e-6)


def test_transformers_has_the_same_logits(model, batch):
    """With `position_ids`, without a mask or a cache, transformers finds the texts by itself."""
    input_ids, _, documents = batch
    config = model.config
    ids = {"bos_token_id": None, "eos_token_id": None}
    theirs = hf_config(config, ids)
    reference = AutoModelForCausalLM.from_config(theirs).eval()
    state = {name: tensor.contiguous() for name, tensor in to_hf(model).items()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    positions = document_positions(documents, 48)
    with torch.no_grad():
        theirs = reference(input_ids, position_ids=positions, use_cache=False).logits
        ours = model(input_ids, documents=documents)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_a_separator_keeps_running_positions(batch):
    model = randomized(GPTConfig(97, n_positions=48, n_layer=2, n_head=2, n_embd=32).build())
    input_ids = batch[0]
    model.separator = 7
    documents = (input_ids == 7).cumsum(dim=1)
    mask = model.document_mask(documents)
    with torch.no_grad():
        found = model(input_ids)
        model.separator = None
        assert torch.equal(found, model(input_ids, attention_mask=mask))

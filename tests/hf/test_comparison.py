"""A model that differs a little from what `transformers` computes is found, fresh and trained, and saved in its own form."""

import copy
import functools
import json

import pytest
import torch
import torch.nn.functional as F
from conftest import losses, run, tiny_config

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.config import ARCHITECTURES
from gpt2_accel.hf import comparison
from gpt2_accel.models import configured_shape
from gpt2_accel.tokenizer import byte_tokenizer


def blocks(model):
    return model.h if hasattr(model, "h") else model.layers


def squared(model):
    """ReLU² in place of GELU and of SiLU."""
    for block in blocks(model):
        mlp = block.mlp
        if model.config.architecture == "gpt2":
            mlp.forward = lambda x, mlp=mlp: mlp.c_proj(F.relu(mlp.c_fc(x)).square())
        else:
            mlp.forward = lambda x, mlp=mlp: mlp.down_proj(
                F.relu(mlp.gate_proj(x)).square() * mlp.up_proj(x)
            )


def epsilon(model):
    """Twice the epsilon of all norms."""
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps *= 2


def residual(model):
    """MLPs that add one percent less to the residual stream."""
    for block in blocks(model):
        block.mlp.register_forward_hook(lambda mlp, inputs, output: 0.99 * output)


def reversed_positions(model):
    """Rotary angles, or learned positions, in the reverse order."""
    hidden, last = model.hidden, model.config.n_positions - 1
    model.hidden = lambda ids, positions, *rest: hidden(ids, last - positions, *rest)


def soft_cap(model):
    """Gemma 2's soft cap of the logits."""
    model.register_forward_hook(lambda module, inputs, logits: 30 * torch.tanh(logits / 30))


@pytest.fixture(scope="module")
def fresh_and_trained(data_dir, tmp_path_factory):
    """A function that returns the directories of a fresh model of an architecture and of one after 300 updates."""

    @functools.cache
    def train_one(architecture):
        folder = tmp_path_factory.mktemp(architecture)
        config = tiny_config(data_dir, folder / "300", architecture=architecture, max_steps=300)
        torch.manual_seed(0)
        save_pretrained(configured_shape(config, 257).build(), folder / "0", byte_tokenizer())
        assert losses(run(config))[-1] < 2.5
        return {0: folder / "0", 300: folder / "300"}

    return train_one


@pytest.mark.parametrize("updates", [0, 300])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("change", [None, squared, epsilon, residual, reversed_positions, soft_cap])
def test_a_model_that_differs_a_little_is_found(
    change, architecture, updates, fresh_and_trained, tmp_path
):
    model = from_pretrained(fresh_and_trained(architecture)[updates])
    before = copy.deepcopy(model.state_dict())
    if change is not None:
        change(model)
    printed = []
    files = comparison.ModelFiles(byte_tokenizer(), printed.append)
    files.save(model, tmp_path)
    saved_as = json.loads((tmp_path / "config.json").read_text())["model_type"]
    if change is None:
        assert (files.custom, saved_as, printed) == ("", architecture, [])
        assert comparison.difference(model, tmp_path) < comparison.LIMIT / 10
    else:
        assert "its logits differ by" in files.custom and saved_as == "gpt2_accel_custom"
        assert "transformers cannot open this model" in printed[0]
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)

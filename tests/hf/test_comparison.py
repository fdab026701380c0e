"""A model that differs from what `transformers` computes is found, and saved in its own form."""

import copy
import functools
import re

import pytest
import torch
from conftest import read_json, reset_accelerate, run, tiny_config

from gpt2_accel import GPT, from_pretrained
from gpt2_accel.config import ARCHITECTURES
from gpt2_accel.hf import comparison
from gpt2_accel.hf.convert import CUSTOM, configured_shape
from gpt2_accel.tokenizer import byte_tokenizer
from gpt2_accel.train import train


def blocks(model):
    return model.h if hasattr(model, "h") else model.layers


def epsilon(model):
    """Twice the epsilon of all norms; ten times nanochat's, on which fresh logits depend less."""
    factor = 10 if model.config.architecture == "nanochat" else 2
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps *= factor


def residual(model):
    """MLPs that add one percent less to the residual stream."""
    for block in blocks(model):
        block.mlp.register_forward_hook(lambda mlp, inputs, output: 0.99 * output)


def reversed_positions(model):
    """Rotary angles, or learned positions, in the reverse order."""
    positions = torch.arange(model.config.n_positions - 1, -1, -1)[None]
    model.register_forward_pre_hook(
        lambda module, inputs, names: (inputs, names | {"position_ids": positions}),
        with_kwargs=True,
    )


def soft_cap(model):
    """Gemma 2's soft cap of the logits."""
    model.register_forward_hook(lambda module, inputs, logits: 30 * torch.tanh(logits / 30))


CASES = [(architecture, "fresh") for architecture in ARCHITECTURES] + [("gpt2", "trained")]


@pytest.mark.parametrize(("architecture", "how"), CASES)
@pytest.mark.parametrize("change", [None, epsilon, residual, reversed_positions, soft_cap])
def test_a_model_that_differs_a_little_is_found(
    change, architecture, how, trained, tmp_path, monkeypatch
):
    model = from_pretrained(trained)
    if how == "fresh":
        torch.manual_seed(0)
        config = tiny_config("data", tmp_path, architecture=architecture)
        model = configured_shape(config, 257).build().bfloat16()
    before = copy.deepcopy(model.state_dict())
    if change is not None:
        change(model)
    printed = []
    files = comparison.ModelFiles(byte_tokenizer(), printed.append)
    files.save(model, tmp_path)
    if change is None:
        assert files.custom == ""
        assert saved_as(tmp_path) == architecture
        assert printed == []
        other_kernels = functools.partial(comparison.open_class, attn_implementation="eager")
        monkeypatch.setattr(comparison, "open_class", other_kernels)
        assert comparison.difference(model, tmp_path) < comparison.LIMIT / 3
    else:
        message = r"its logits differ by (\S+) times their rounding error"
        assert float(re.fullmatch(message, files.custom)[1]) > comparison.LIMIT * 3
        assert saved_as(tmp_path) == CUSTOM
        assert "transformers cannot open this model" in printed[0]
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def saved_as(folder):
    return read_json(folder / "config.json")["model_type"]


def test_the_final_model_is_compared_again(tiny, tmp_path, monkeypatch, capsys):
    """A change that acts after the first checkpoint."""
    hidden = GPT.hidden

    class Changes:
        def on_step_end(self, run, skipped):
            if run.step == 5:
                monkeypatch.setattr(GPT, "hidden", lambda self, *a: hidden(self, *a) ** 3)

    reset_accelerate()
    train(tiny("run", save_every=2, keep_last=9), callbacks=[Changes()])
    assert saved_as(tmp_path / "run/checkpoint-2") == "gpt2"
    assert saved_as(tmp_path / "run") == CUSTOM
    assert capsys.readouterr().out.count("its logits differ by") == 1


def test_dropout_and_the_document_mask_are_not_differences(tiny, tmp_path):
    run(tiny(max_steps=2, dropout=0.3, document_mask=True))
    assert saved_as(tmp_path / "checkpoint-2") == saved_as(tmp_path) == "gpt2"

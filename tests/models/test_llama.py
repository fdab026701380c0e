"""Llama, Qwen3 and nanochat equal those of transformers."""

import random

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from tables import table
from transformers import AutoModelForCausalLM

from gpt2_accel.hf.convert import hf_config
from gpt2_accel.hf.tensors import from_hf
from gpt2_accel.models import config_class
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.models.nanochat import NanochatConfig
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.optim import hidden_matrices


@pytest.fixture(
    params=[LlamaConfig, Qwen3Config, NanochatConfig], ids=["llama", "qwen3", "nanochat"]
)
def kind(request):
    """The config's class."""
    return request.param


def tiny(kind, **changes):
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_embd": 48, "n_inner": 96}
    return kind(**{"vocab_size": 100, "n_positions": 64} | sizes | changes)


def test_logits_and_gradients_equal_those_of_transformers(kind):
    draw = random.Random(0)
    for _ in range(8):
        kv_heads, groups = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
        config = kind(
            draw.choice([100, 128, 301]),
            64,
            n_layer=draw.choice([1, 2, 3]),
            n_head=kv_heads * groups,
            n_kv_head=kv_heads,
            head_dim=draw.choice([8, 16, 32]),
            n_embd=kv_heads * groups * draw.choice([4, 8]),
            n_inner=draw.choice([40, 96]),
            rope_theta=draw.choice([1e4, 1e5, 1e6]),
            norm_eps=draw.choice([1e-6, 1e-5, 1e-3]),
            tied=draw.random() < 0.5,
        )
        theirs = hf_config(config, {"bos_token_id": None, "eos_token_id": None})
        reference = AutoModelForCausalLM.from_config(theirs).float()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.normal_(0 if parameter.ndim > 1 else 1, 0.2)
            if kind is NanochatConfig:  # logits near the cap of 15
                reference.get_output_embeddings().weight.mul_(10)
        model = from_hf(reference.state_dict().items(), config, "the reference")
        assert sum(p.numel() for p in reference.parameters()) == config.parameter_count
        input_ids = torch.randint(config.vocab_size, (2, draw.choice([2, 33, 64])))
        targets = input_ids.roll(-1, dims=1)
        expected = reference(input_ids).logits
        assert_close(model(input_ids), expected)
        F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
        model(input_ids, targets).backward()
        gradients = {name: p.grad for name, p in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            expected = gradients[name if name == "lm_head.weight" else f"model.{name}"]
            gradient, padding = parameter.grad[: len(expected)], parameter.grad[len(expected) :]
            # Ten times as much: HF has norms and angles in fp32, and gradients of gains are small.
            assert_close(gradient, expected, 1e-4)
            assert not padding.any()


def test_new_projections_to_the_residual_stream_are_smaller(kind):
    """By 1 / sqrt(2 · n_layer): the GPT-2 paper, section 2.3."""
    smaller = ("o_proj.weight", "down_proj.weight", "fc2.weight")
    for name, weight in tiny(kind, n_layer=8).build().named_parameters():
        if weight.ndim > 1:
            std = 0.02 / 4 if name.endswith(smaller) else 0.02
            assert weight[:100].std().item() == pytest.approx(std, rel=0.1), name


def test_muon_updates_neither_embedding_nor_head(kind):
    names = set(hidden_matrices(tiny(kind, tied=False).build()))
    of_layer = 6 if kind is NanochatConfig else 7
    assert len(names) == 2 * of_layer
    assert all(name.startswith("layers.") for name in names)


class Settings:
    n_layer, n_head, n_embd, n_positions, dropout, bias = 2, 2, 128, 128, 0.0, True
    architecture = depth = None


@pytest.mark.parametrize(
    ("architecture", "of_two_heads", "of_depth_12", "tied"), table("models/cases")["shapes"]
)
def test_shapes_follow_from_depth_and_from_single_settings(
    architecture, of_two_heads, of_depth_12, tied
):
    kind = config_class(architecture)
    settings = Settings()
    shape = kind.from_settings(settings, 100)
    assert shape.head_dim == 64
    assert shape.tied == tied
    assert [shape.n_kv_head, shape.n_inner] == of_two_heads
    settings.depth = 12
    shape = kind.from_settings(settings, 100)
    assert shape.n_layer == 12
    assert shape.n_embd == 768
    assert shape.n_head * shape.head_dim == 768
    assert [shape.n_kv_head, shape.n_inner] == of_depth_12

"""nanochat beside `test_llama.py`: each part changes the logits, and everything reads capped ones."""

import pytest
import torch
import torch.nn.functional as F
from conftest import refused
from transformers import AutoModelForCausalLM

from gpt2_accel.evals.likelihood import Row, token_scores
from gpt2_accel.generation.kv_cache import KVCache
from gpt2_accel.hf.convert import hf_config, read_config
from gpt2_accel.hf.tensors import from_hf
from gpt2_accel.kernels import cross_entropy
from gpt2_accel.models import llama, nanochat
from gpt2_accel.models.nanochat import NanochatConfig
from gpt2_accel.models.parts import rms_norm, rotate

CAP = 15.0


def tiny(**changes):
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_embd": 64, "n_inner": 96}
    return NanochatConfig(**{"vocab_size": 100, "n_positions": 64} | sizes | changes)


def pair(config):
    """Returns HF's model with random weights, and the same model of this package."""
    reference = AutoModelForCausalLM.from_config(
        hf_config(config, {"bos_token_id": None, "eos_token_id": None})
    )
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, 0.2)
        reference.lm_head.weight.mul_(10)  # logits of 16: the cap is felt
    model = from_hf(reference.state_dict().items(), config)
    return reference.eval(), model.eval()


@torch.no_grad()
def difference(reference, model):
    input_ids = torch.randint(100, (2, 48))
    return (reference(input_ids).logits - model(input_ids)).abs().max().item()


def test_logits_are_those_of_transformers_and_capped():
    reference, model = pair(tiny())
    assert difference(reference, model) < 1e-5
    with torch.no_grad():
        logits = model(torch.randint(100, (2, 48)))
    assert 14 < logits.abs().max() < CAP


def turned_as_llama(self, x, cos, sin):
    return rms_norm(rotate(x, cos, sin), self.config.norm_eps)


def without_norm(self, x, cos, sin):
    return rotate(x, cos, -sin)


@pytest.mark.parametrize(
    "owner, name, planted",
    [
        (nanochat.Attention, "positioned", turned_as_llama),
        (nanochat.Attention, "positioned", without_norm),
        (nanochat.Nanochat, "embed", llama.Llama.embed),
        (NanochatConfig, "soft_cap", None),
    ],
    ids=["Llama's rotation", "no norm of queries and keys", "no norm of the embedding", "no cap"],
)
def test_a_model_without_one_of_the_parts_differs(owner, name, planted, monkeypatch):
    reference, model = pair(tiny())
    if owner is NanochatConfig:
        model.config.soft_cap = planted
    else:
        monkeypatch.setattr(owner, name, planted)
    assert difference(reference, model) > 0.1


@torch.no_grad()
def test_scores_and_sampling_read_capped_logits():
    reference, model = pair(tiny())
    input_ids = torch.randint(100, (1, 20))
    logits = reference(input_ids).logits
    expected = -F.log_softmax(logits[0, 9:-1], dim=-1).gather(1, input_ids[0, 10:, None])
    [found] = token_scores(model, [Row(input_ids[0].tolist(), 10)])
    torch.testing.assert_close(found, expected[:, 0], rtol=1e-4, atol=1e-5)
    [next_logits] = KVCache(model).start([input_ids[0].tolist()])
    torch.testing.assert_close(next_logits, logits[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels_used", [True, False])
def test_bf16_losses_equal_those_of_transformers(kernels_used, monkeypatch):
    """Under autocast, chunked and whole; the loss of uncapped logits differs by more."""
    if kernels_used:
        monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", 10 * 128)
    reference, model = pair(tiny())
    input_ids = torch.randint(100, (4, 33))
    expected = reference(input_ids, labels=input_ids).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(input_ids[:, :-1], input_ids[:, 1:]).item()
        model.config.soft_cap = None
        uncapped = model(input_ids[:, :-1], input_ids[:, 1:]).item()
    assert found == pytest.approx(expected, rel=0.01)
    assert uncapped > 1.1 * expected


def test_a_cap_that_is_absent_or_not_positive(tmp_path):
    reference, model = pair(tiny(soft_cap=None))
    assert difference(reference, model) < 1e-4
    reference.config.save_pretrained(tmp_path)
    assert read_config(tmp_path) == tiny(soft_cap=None)
    with refused("soft_cap must be above 0, got 0.0"):
        tiny(soft_cap=0.0)


def test_a_new_models_padding_token_is_not_frozen():
    """The class gives no gradient to the embedding of its `pad_token_id`, by default token 1."""
    reference, _ = pair(tiny())
    reference(torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()
    assert reference.model.embed_tokens.weight.grad[1].any()

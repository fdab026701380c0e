"""Weights in bf16 and fp16: losses, their sums and norms are those of fp64, given the logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import randomized
from families import family_model, own_shape

from gpt2_accel import from_pretrained
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import Batch, EvalLoader
from gpt2_accel.data.source import open_data
from gpt2_accel.evals.likelihood import Row, log_likelihoods
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.hf.lora import add_lora, set_dtype
from gpt2_accel.kernels import cross_entropy
from gpt2_accel.models import convert_parameters
from gpt2_accel.models.any_model import AnyConfig
from gpt2_accel.preferences import Preferences
from gpt2_accel.runtime.accelerator import clip_gradients
from gpt2_accel.train import next_token_loss

pytestmark = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
LORA = TrainConfig(lora=4, dtype="bfloat16")


def built(kind):
    """Returns a model with random weights, or an adapter around one."""
    if kind in ("gpt2", "nanochat"):
        return randomized(own_shape(kind).build())
    model = AnyConfig(family_model(kind.removeprefix("lora ")).config.to_dict()).build()
    if kind.startswith("lora"):
        add_lora(model, LORA, (), "")
    return model


def nats(model, ids, targets):
    """Returns the loss of each target in fp64, from the model's logits."""
    logits = model(ids, logits_to_keep=targets.shape[1]).double()
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


@pytest.mark.parametrize("at_once", [2**25, 2**10])  # plain and in chunks
@pytest.mark.parametrize("kind", ["gpt2", "nanochat", "granite", "lora llama"])
def test_training_losses(kind, at_once, dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_ONCE", at_once)
    model = built(kind).eval()
    set_dtype(model, LORA) if "lora" in kind else convert_parameters(model, dtype)
    ids, targets = torch.randint(257, (2, 2, 40))
    targets[0, :7] = -100
    expected = nats(model, ids, targets)
    mean = expected[targets != -100].mean()
    found = model(ids, targets, reduction="none").double()
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-5)
    loss = next_token_loss(model, Batch(ids, targets))
    assert loss.item() == pytest.approx(mean.item(), rel=1e-4)


@torch.no_grad()
def test_evaluations(trained, data_dir, accelerator, dtype):
    model = from_pretrained(trained).eval()
    convert_parameters(model, dtype)
    ids = torch.tensor([list(b"the cat sees a dog in the house")])
    expected = nats(model, ids[:, :-1], ids[:, -12:]).sum().item()
    row = Row(ids[0].tolist(), 12)
    [[found]] = log_likelihoods(accelerator, model, [[row]], lambda: False)
    assert -found == pytest.approx(expected, rel=1e-6)

    split = open_data(data_dir).split("val")
    sizes = {"sequence_length": 32, "batch_size": 4, "max_tokens": 256}
    batches = list(EvalLoader(split, **sizes))
    expected = torch.cat([nats(model, b.input_ids, b.targets) for b in batches]).mean().item()
    found = validation_loss(accelerator, model, loader=EvalLoader(split, **sizes))
    assert found["val/loss"] == pytest.approx(expected, rel=1e-6)

    ids, targets = torch.randint(256, (2, 1, 40))
    logs = -nats(model, ids.view(2, 20), targets.view(2, 20)).sum(dim=1)
    margin = 0.1 * (logs[0] - logs[1]).item()
    figures = Preferences(trained).measure(model, Batch(ids, targets))
    rounding = 0.1 * 2 * 4 * 2**-15  # of two sums of up to 512 nats, in fp32
    assert figures["margin"].item() == pytest.approx(margin, abs=rounding)
    loss = math.log1p(math.exp(-margin))
    assert figures["loss"].item() == pytest.approx(loss, abs=rounding)


@pytest.mark.parametrize("scale", [1, 1e4])  # fp16 ends at 65,504
def test_gradient_norms(scale, accelerator, dtype):
    model = torch.nn.Linear(300, 100).to(dtype)
    for parameter in model.parameters():
        parameter.grad = (torch.randn(parameter.shape) * scale).to(dtype)
    grads = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    norm = clip_gradients(accelerator, model, 1.0)
    assert norm.item() == pytest.approx(grads.norm().item(), rel=1e-5)
    clipped = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    assert clipped.norm().item() == pytest.approx(1, rel=1e-3)

"""Models of `transformers` that the package has no module for: opened, trained, saved as their own class would."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import losses, run
from families import FAMILIES, save_family
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gpt2_accel.data.loader import TrainLoader, open_split

UPDATES, PEAK = 20, 3e-3


def plain_losses(directory, data_dir, updates):
    """Returns the losses of a plain loop around the class of transformers, and the model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    experts = (
        {"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}
    )
    named = dict(model.named_parameters()).values()
    groups = [
        {"params": [p for p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    split = open_split(data_dir, "train")
    loader = TrainLoader(split, sequence_length=32, micro_batch_size=4, seed=1337)
    found = []
    for step in range(updates):
        total = 0.0
        for input_ids, targets, *_ in loader.update(step * 8, 8):
            out = model(input_ids, use_cache=False, **experts)
            loss = F.cross_entropy(out.logits.float().flatten(0, 1), targets.flatten())
            if experts:
                loss = loss + model.config.router_aux_loss_coef * out.aux_loss
            (loss / 2).backward()
            total += loss.item() / 2
        torch.nn.utils.clip_grad_norm_(list(named), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = PEAK / 10 + 0.45 * PEAK * (1 + math.cos(math.pi * step / updates))
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found, model


@pytest.mark.parametrize("kind", FAMILIES)
def test_training_equals_a_plain_loop_around_the_class(kind, tiny, data_dir, tmp_path):
    start = save_family(kind, tmp_path / "start")
    config = tiny(
        "run",
        init_from=str(start),
        max_steps=UPDATES,
        warmup_steps=0,
        learning_rate=PEAK,
        total_batch_size=8 * 32,
    )
    lines = run(config)
    expected, model = plain_losses(start, data_dir, UPDATES)
    assert losses(lines) == pytest.approx(expected, abs=1e-6)
    assert expected[-1] < expected[0] - 0.5
    folder = tmp_path / "run"
    final = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    final.save_pretrained(tmp_path / "again")
    saved, again = (load_file(p / "model.safetensors") for p in (folder, tmp_path / "again"))
    assert (folder / "model.safetensors").read_bytes() == (
        tmp_path / "again/model.safetensors"
    ).read_bytes()
    assert saved.keys() == again.keys()
    ids = torch.arange(32)[None]
    torch.testing.assert_close(final(ids).logits, model.eval()(ids).logits, atol=1e-4, rtol=0)

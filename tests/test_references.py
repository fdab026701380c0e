"""Training equals a plain loop around transformers, sampling its logits processors."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import as_flags, losses, metrics, run
from launching import launch
from transformers import (
    AutoModelForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.source import open_data
from gpt2_accel.generation.sampling import Sampling, sample_next
from gpt2_accel.tokenizer import byte_tokenizer

WARMUP, PEAK = 1, 3e-3
ADAM = {"betas": (0.8, 0.95), "eps": 1e-5}


def nanogpt_rate(step, updates, warmup):
    """nanoGPT's learning rate: linear warmup, then cosine decay to a tenth."""
    if step < warmup:
        return PEAK * (step + 1) / (warmup + 1)
    decayed = (step - warmup) / (updates - warmup)
    return PEAK / 10 + 0.5 * (1 + math.cos(math.pi * decayed)) * (PEAK - PEAK / 10)


@pytest.fixture
def start(tmp_path):
    torch.manual_seed(0)
    save_pretrained(GPT(GPTConfig(257, 32, 2, 2, 32)), tmp_path / "start", byte_tokenizer())
    return str(tmp_path / "start")


def plain_losses(start, data_dir, sizes, **options):
    """Returns the losses of a plain loop around transformers, with updates of `sizes` sequences.

    The schedule is that of updates of the largest size. Also returns the model.
    """
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).train()
    balancing = getattr(model.config, "router_aux_loss_coef", None)
    outputs = {} if balancing is None else {"output_router_logits": True}
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **{"betas": (0.9, 0.95)} | options)
    loader = TrainLoader(
        open_data(data_dir).split("train"), sequence_length=32, micro_batch_size=4, seed=1337
    )
    expected = []
    seen = 0
    for size in sizes:
        total = 0.0
        for input_ids, targets, *_ in loader.update(seen, size):
            out = model(input_ids, use_cache=False, **outputs)
            loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
            if balancing is not None:
                loss = loss + balancing * out.aux_loss
            (loss / (size / 4)).backward()
            total += loss.item() / (size / 4)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = nanogpt_rate(seen / max(sizes), sum(sizes) / max(sizes), WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
        seen += size
    assert expected[-1] < expected[0] - 0.02
    return expected, model


# The batch ramp of GPT-3: from 4 to 16 sequences over 24, in steps of 4, up to 48 sequences.
RAMP = [4, 4, 8, 12, 16, 4]


def test_losses_equal_a_plain_loop_around_transformers_on_any_number_of_processes(
    tiny, data_dir, start, tmp_path
):
    settings = {"max_steps": 3, "total_batch_size": 16 * 32, "beta1": 0.8, "adam_eps": 1e-5}
    settings |= {"ramp_tokens": 24 * 32, "ramp_start": 4, "warmup_steps": WARMUP}
    settings |= {"learning_rate": PEAK, "init_from": start, "micro_batch_size": 8}
    expected, _ = plain_losses(start, data_dir, RAMP, **ADAM)
    flags = as_flags(tiny("two", **settings, save_every=3, keep_last=9))
    launch("tests/train_script.py", *flags, processes=2)
    assert losses(run(tiny("one", **settings))) == pytest.approx(expected, abs=1e-5)
    checkpoint = str(tmp_path / "two/checkpoint-3")
    resumed = run(tiny("resumed", **settings, resume_from=checkpoint))
    assert losses(resumed) == pytest.approx(expected[3:], abs=1e-5)
    lines = metrics(tmp_path / "two")
    assert losses(lines) == pytest.approx(expected, abs=1e-5)
    assert [line["tokens"] for line in lines] == [32 * sum(RAMP[:n]) for n in range(1, 7)]
    assert sum(RAMP) == 3 * 16


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}]
)
def test_samples_follow_the_distribution_of_transformers_processors(settings):
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    logits = torch.randn(20) * 2
    draws = 4000
    scores = TemperatureLogitsWarper(options["temperature"])(None, logits[None])
    if options["top_k"]:
        scores = TopKLogitsWarper(options["top_k"])(None, scores)
    if options["top_p"] < 1:
        scores = TopPLogitsWarper(options["top_p"])(None, scores)
    expected = scores[0].softmax(-1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(draws)]
    sampled = sample_next(logits.expand(draws, -1), Sampling(1, **options), generators)
    shares = torch.bincount(sampled, minlength=20) / draws
    assert not shares[expected == 0].any()
    # Four standard deviations, since there are twenty tokens.
    allowed = 4 * (expected * (1 - expected) / draws).sqrt() + 1e-3
    assert ((shares - expected).abs() <= allowed).all()

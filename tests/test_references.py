"""Training and sampling, compared with transformers: a plain training loop, and its logits processors."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import losses, run
from transformers import (
    GPT2LMHeadModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.data.loader import TrainLoader, open_split
from gpt2_accel.generation.sampling import Sampling, choose
from gpt2_accel.tokenizer import byte_tokenizer

UPDATES, WARMUP, PEAK = 20, 3, 3e-3


def nanogpt_rate(step):
    """nanoGPT's learning rate: linear warmup, then cosine decay to a tenth."""
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    share = (step - WARMUP) / (UPDATES - WARMUP)
    return PEAK / 10 + 0.5 * (1 + math.cos(math.pi * share)) * (PEAK - PEAK / 10)


def test_losses_equal_a_plain_loop_around_transformers(tiny, data_dir, tmp_path):
    torch.manual_seed(0)
    save_pretrained(GPT(GPTConfig(257, 32, 2, 2, 32)), tmp_path / "start", byte_tokenizer())
    lines = run(
        tiny(
            "run",
            init_from=str(tmp_path / "start"),
            max_steps=UPDATES,
            warmup_steps=WARMUP,
            learning_rate=PEAK,
            total_batch_size=8 * 32,  # two micro-batches
        )
    )
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "start", dtype=torch.float32)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    loader = TrainLoader(
        open_split(data_dir, "train"), sequence_length=32, micro_batch_size=4, seed=1337
    )
    expected = []
    for step in range(UPDATES):
        total = 0.0
        for input_ids, targets, *_ in loader.update(step * 8, 8):
            logits = model(input_ids).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = nanogpt_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    assert losses(lines) == pytest.approx(expected, abs=2e-5)
    assert expected[-1] < expected[0] - 0.5


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}],
)
def test_samples_follow_the_distribution_of_transformers_processors(settings):
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
    logits, draws = torch.randn(20) * 2, 4000
    scores = TemperatureLogitsWarper(options["temperature"])(None, logits[None])
    if options["top_k"]:
        scores = TopKLogitsWarper(options["top_k"])(None, scores)
    if options["top_p"] < 1:
        scores = TopPLogitsWarper(options["top_p"])(None, scores)
    expected = scores[0].softmax(-1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(draws)]
    found = choose(logits.expand(draws, -1), Sampling(1, **options), generators)
    shares = torch.bincount(found, minlength=20) / draws
    assert not shares[expected == 0].any()
    # Four standard deviations, since there are twenty tokens.
    allowed = 4 * (expected * (1 - expected) / draws).sqrt() + 1e-3
    assert ((shares - expected).abs() <= allowed).all()

"""Muon equals torch's, the schedules have known values, ranks share Muon's matrices."""

import json

import pytest
import torch
from conftest import refused
from launching import launch
from tables import table

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.config import TrainConfig
from gpt2_accel.optim import build_optimizer, learning_rate, muon

CONFIG = GPTConfig(vocab_size=64, n_positions=16, n_layer=3, n_head=2, n_embd=32)


def train_step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    input_ids, targets = torch.randint(0, 64, (2, 4, 16), generator=generator)
    optimizer.zero_grad()
    model(input_ids, targets).backward()
    optimizer.step()


def test_muon_equals_torchs_muon_and_adamw(monkeypatch):
    # torch's Muon iterates in bf16 on every CPU; ours uses fp32 on a CPU that emulates bf16.
    monkeypatch.setattr(muon, "iteration_dtype", lambda device: torch.bfloat16)
    model = GPT(CONFIG)
    ours = build_optimizer(model, TrainConfig(optimizer="muon", learning_rate=1e-2))
    copies = {}  # of each parameter; q, k and v are separate matrices
    matrices = []
    embeddings = []
    vectors = []
    for name, parameter in model.named_parameters():
        parts = parameter.detach().clone().chunk(3 if "c_attn" in name else 1)
        copies[name] = [torch.nn.Parameter(part) for part in parts]
        if parameter.ndim == 1:
            vectors += copies[name]
        elif name.startswith("h."):
            matrices += copies[name]
        else:
            embeddings += copies[name]
    theirs = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}],
            lr=1e-2,
            betas=(0.9, 0.95),
        ),
    ]
    for seed in range(3):
        train_step(model, ours, seed)
        for name, parameter in model.named_parameters():
            parts = copies[name]
            for part, grad in zip(parts, parameter.grad.chunk(len(parts)), strict=True):
                part.grad = grad.clone()
        for optimizer in theirs:
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, torch.cat(copies[name]), atol=2e-4, rtol=0, msg=name)


def test_the_schedules_have_known_values():
    def rate(schedule, step):
        settings = TrainConfig(
            learning_rate=1.0, lr_schedule=schedule, warmup_steps=9, max_steps=109
        )
        return learning_rate(settings, step)

    for schedule, values in table("optim").items():
        for step, expected in values.items():
            assert rate(schedule, step) == pytest.approx(expected), (schedule, step)


def test_a_batch_ramp_counts_tokens():
    shape = {"n_positions": 32, "total_batch_size": 16 * 32, "ramp_start": 4}
    config = TrainConfig(**shape, max_steps=36, ramp_tokens=260 * 32)
    schedule = config.batch_schedule(2)
    assert schedule.updates == 60
    assert schedule.first(60) == 36 * 16
    assert schedule.sequences(59) == 12
    config.ramp_start = 1
    with refused("multiple of"):
        config.batch_schedule(2)


def test_ranks_share_the_matrices_of_muon():
    """With DDP and FSDP2. There are more ranks than matrices, and 5 does not divide the rows."""
    results = json.loads(launch("tests/muon_script.py", processes=5).stdout)
    # In 3 updates of 3 blocks: 12 square matrices and 6 of 33 x 132, of which 5 ranks take 3 and 2
    # at most. FSDP2's rows are exchanged for each of 4 parameters.
    assert sorted(count for count, _ in results["GPT ddp"]) == [0, 9, 15, 15, 15]
    assert {count for count, _ in results["GPT fsdp"]} == {12, 0}
    for model in ("GPT", "Llama"):  # FSDP2 shards the state
        assert sum(size for _, size in results[f"{model} fsdp"]) == results[f"{model} ddp"][0][1]

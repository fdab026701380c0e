"""The baseline: nanoGPT's plain training loop, with this toolkit's model but a plain loss.

    python benchmarks/nanogpt.py --input shakespeare.txt --output_dir runs/baseline

As a script it trains a character-level model with nanoGPT's settings for a CPU: 4 layers of 128
channels, 2,000 updates of 12 x 64 tokens in fp32, and every 250 updates the losses on 20 batches of
the training and the validation split.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from reference_model import PlainLoss
from torch import nn

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.runtime.device import AUTOCAST_DTYPES
from gpt2_accel.tokenizer import char_tokenizer

Batch = tuple[torch.Tensor, torch.Tensor]  # input_ids and targets, (B, T) int64

CPU_SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, "bias": False}
BATCH_SIZE = 12
UPDATES = 2000
WARMUP = 100
EVAL_EVERY = 250
EVAL_BATCHES = 20
PEAK = 1e-3
LOWEST = 1e-4


def plain_optimizer(
    model: nn.Module, lr: float, beta2: float, **options: bool
) -> torch.optim.AdamW:
    """Builds nanoGPT's AdamW: fused only on a GPU, weight decay only on matrices. `options` are
    further options of `AdamW`."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = {"fused": parameters[0].is_cuda or None} | options
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), **options)


def plain_update(
    loss_of: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    precision: str = "no",
    accumulation: int = 1,
    prefetch: bool = False,
) -> Callable[[], torch.Tensor]:
    """Returns a function that makes an update (forward and backward of `accumulation` batches,
    clipping to a norm of 1, step) and returns the last batch's loss, a scalar in nats.

    `loss_of` maps a batch to its loss; DDP reduces gradients with the last batch only. `precision`
    is "no", "bf16" or "fp16". With `prefetch` the next batch is made while a GPU is busy.
    """
    parameters = list(loss_of.parameters())
    device = parameters[0].device.type
    dtype = AUTOCAST_DTYPES.get(precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    upcoming: Batch | None = None

    def update() -> torch.Tensor:
        nonlocal upcoming
        for left in reversed(range(accumulation)):
            batch = upcoming or next(batches)
            is_ddp = hasattr(loss_of, "no_sync")
            with loss_of.no_sync() if left and is_ddp else nullcontext():
                with torch.autocast(device, dtype, enabled=dtype is not None):
                    loss = loss_of(*batch)
                scaler.scale(loss / accumulation if accumulation > 1 else loss).backward()
            upcoming = next(batches) if prefetch else None
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return update


def random_batches(
    tokens: torch.Tensor, B: int, T: int, device: torch.device | str = "cpu", pinned: bool = False
) -> Iterator[Batch]:
    """Yields random windows of `tokens`, (N,) int64, and their targets, (B, T) each, on `device`,
    copied from pinned memory if `pinned`."""

    def move(windows: torch.Tensor) -> torch.Tensor:
        if pinned:
            return windows.pin_memory().to(device, non_blocking=True)
        return windows.to(device)

    while True:
        starts = torch.randint(len(tokens) - T, (B,)).tolist()
        inputs = move(torch.stack([tokens[i : i + T] for i in starts]))
        yield inputs, move(torch.stack([tokens[i + 1 : i + 1 + T] for i in starts]))


@torch.no_grad()
def estimate(loss_of: PlainLoss, batches: Iterator[Batch]) -> float:
    """Returns the mean loss of `EVAL_BATCHES` batches, in nats per token."""
    total = 0.0
    for _ in range(EVAL_BATCHES):
        total += loss_of(*next(batches)).item()
    return total / EVAL_BATCHES


def learning_rate(step: int) -> float:
    """Returns the learning rate of a step: linear warmup, then cosine decay."""
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    progress = (step - WARMUP) / (UPDATES - WARMUP)
    return LOWEST + (PEAK - LOWEST) * 0.5 * (1 + math.cos(math.pi * progress))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, help="text file")
    parser.add_argument("--output_dir", required=True, help="folder of the model")
    options = parser.parse_args()
    text = Path(options.input).read_text(encoding="utf-8")
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text])
    end = int(len(tokens) * 0.9)
    train = random_batches(tokens[:end], BATCH_SIZE, CPU_SHAPE["n_positions"])
    val = random_batches(tokens[end:], BATCH_SIZE, CPU_SHAPE["n_positions"])
    torch.manual_seed(1337)
    model = GPT(GPTConfig(len(number), **CPU_SHAPE))
    loss_of = PlainLoss(model)
    optimizer = plain_optimizer(model, PEAK, beta2=0.99)
    update = plain_update(loss_of, optimizer, train)
    for step in range(UPDATES + 1):
        if step % EVAL_EVERY == 0:
            train_loss = estimate(loss_of, train)
            val_loss = estimate(loss_of, val)
            print(f"step {step}: train {train_loss:.4f}, val {val_loss:.4f}", flush=True)
        if step < UPDATES:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            update()
    save_pretrained(model, options.output_dir, char_tokenizer(text))


if __name__ == "__main__":
    main()

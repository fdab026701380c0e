"""The baseline: nanoGPT's plain training loop, with this toolkit's model but a plain loss.

    python benchmarks/nanogpt.py --input shakespeare.txt --output_dir runs/baseline

As a script it trains a character-level model with nanoGPT's settings for a CPU: 4 layers of 128 channels, 2,000 updates
of 12 x 64 tokens in fp32, and every 250 updates the losses on 20 batches of the training and the validation split.
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
BATCH_SIZE, UPDATES, WARMUP, EVAL_EVERY, EVAL_BATCHES = 12, 2000, 100, 250, 20
PEAK, LOWEST = 1e-3, 1e-4


def plain_optimizer(
    model: nn.Module, lr: float, beta2: float, **options: bool
) -> torch.optim.AdamW:
    """Builds nanoGPT's AdamW: fused on a GPU only, weight decay on matrices only. `options` are those of `AdamW`."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = {"fused": parameters[0].is_cuda or None, **options}
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), **options)


def plain_update(
    loss_of: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    precision: str = "no",
    accumulation: int = 1,
    prefetch: bool = False,
) -> Callable[[], torch.Tensor]:
    """Returns a function that makes an update: forward and backward of `accumulation` batches, clipping to 1, step.

    It returns the last batch's loss, a scalar in nats. `loss_of` maps a batch to it; DDP reduces the gradients of the
    last batch only. `precision` is "no", "bf16" or "fp16". With `prefetch` the next batch is made while a GPU is busy.
    """
    parameters = list(loss_of.parameters())
    device, dtype = parameters[0].device.type, AUTOCAST_DTYPES.get(precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    upcoming: Batch | None = None

    def update() -> torch.Tensor:
        nonlocal upcoming
        for left in reversed(range(accumulation)):
            batch = upcoming or next(batches)
            wait = left and hasattr(loss_of, "no_sync")
            with loss_of.no_sync() if wait else nullcontext():
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
    """Yields random windows of `tokens`, (N,) int64, and their targets on `device`, if `pinned` from pinned memory."""
    while True:
        starts = torch.randint(len(tokens) - T, (B,)).tolist()
        windows = (torch.stack([tokens[i + k : i + k + T] for i in starts]) for k in (0, 1))
        if pinned:
            yield tuple(part.pin_memory().to(device, non_blocking=True) for part in windows)
        else:
            yield tuple(part.to(device) for part in windows)


@torch.no_grad()
def estimate(loss_of: PlainLoss, batches: Iterator[Batch]) -> float:
    """Returns the mean loss of `EVAL_BATCHES` batches in nats."""
    return sum(loss_of(*next(batches)).item() for _ in range(EVAL_BATCHES)) / EVAL_BATCHES


def learning_rate(step: int) -> float:
    """Returns the learning rate: linear warmup, then cosine decay."""
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
    train, val = (
        random_batches(split, BATCH_SIZE, CPU_SHAPE["n_positions"])
        for split in tokens.tensor_split([int(len(tokens) * 0.9)])
    )
    torch.manual_seed(1337)
    model = GPT(GPTConfig(len(number), **CPU_SHAPE))
    loss_of, optimizer = PlainLoss(model), plain_optimizer(model, PEAK, beta2=0.99)
    update = plain_update(loss_of, optimizer, train)
    for step in range(UPDATES + 1):
        if step % EVAL_EVERY == 0:
            losses = estimate(loss_of, train), estimate(loss_of, val)
            print("step {}: train {:.4f}, val {:.4f}".format(step, *losses), flush=True)
        if step < UPDATES:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            update()
    save_pretrained(model, options.output_dir, char_tokenizer(text))


if __name__ == "__main__":
    main()

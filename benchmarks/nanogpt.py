"""The baseline: nanoGPT's plain training loop, with this toolkit's model but a plain loss.

    python benchmarks/nanogpt.py --input shakespeare.txt --output_dir runs/baseline

As a script it trains a character-level model with nanoGPT's settings for a CPU: 4 layers of 128 channels, 2,000 updates
of 12 x 64 tokens in fp32, and every 250 updates the losses on 20 batches of the training and the validation split.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from reference_model import PlainLoss

from gpt2_accel.models.gpt2 import GPT, GPTConfig

Batch = tuple[torch.Tensor, torch.Tensor]

CPU_SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, "bias": False}
BATCH_SIZE, UPDATES, WARMUP, EVAL_EVERY, EVAL_BATCHES = 12, 2000, 100, 250, 20
PEAK, LOWEST = 1e-3, 1e-4


def plain_optimizer(model: GPT, lr: float, beta2: float) -> torch.optim.AdamW:
    """Builds nanoGPT's AdamW: fused on a GPU only, weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=parameters[0].is_cuda or None)


def update(
    loss_of: Callable[..., torch.Tensor],
    model: GPT,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    bf16: bool,
) -> None:
    """Makes one update of `model`: forward through `loss_of(input_ids, targets)`, backward, clipping, step."""
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=bf16):
        loss = loss_of(*batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def random_batch(tokens: torch.Tensor) -> Batch:
    """Returns `BATCH_SIZE` random windows of `tokens`, and their targets."""
    T = CPU_SHAPE["n_positions"]
    starts = torch.randint(len(tokens) - T, (BATCH_SIZE,)).tolist()
    return (
        torch.stack([tokens[i : i + T] for i in starts]),
        torch.stack([tokens[i + 1 : i + 1 + T] for i in starts]),
    )


@torch.no_grad()
def estimate(loss_of: PlainLoss, tokens: torch.Tensor) -> float:
    """Returns the mean loss of `EVAL_BATCHES` random batches."""
    return sum(loss_of(*random_batch(tokens)).item() for _ in range(EVAL_BATCHES)) / EVAL_BATCHES


def learning_rate(step: int, updates: int) -> float:
    """Returns the learning rate: linear warmup, then cosine decay."""
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    progress = (step - WARMUP) / max(updates - WARMUP, 1)
    return LOWEST + (PEAK - LOWEST) * 0.5 * (1 + math.cos(math.pi * progress))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, help="text file")
    parser.add_argument("--output_dir", required=True, help="folder of the weights, model.pt")
    parser.add_argument("--updates", type=int, default=UPDATES)
    options = parser.parse_args()
    text = Path(options.input).read_text(encoding="utf-8")
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text])
    train, val = tokens.tensor_split([int(len(tokens) * 0.9)])
    torch.manual_seed(1337)
    model = GPT(GPTConfig(len(number), **CPU_SHAPE))
    loss_of, optimizer = PlainLoss(model), plain_optimizer(model, PEAK, beta2=0.99)
    for step in range(options.updates + 1):
        if step % EVAL_EVERY == 0 or step == options.updates:
            losses = estimate(loss_of, train), estimate(loss_of, val)
            print("step {}: train {:.4f}, val {:.4f}".format(step, *losses), flush=True)
        if step < options.updates:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options.updates)
            update(loss_of, model, optimizer, random_batch(train), bf16=False)
    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), Path(options.output_dir) / "model.pt")


if __name__ == "__main__":
    main()

"""Validation loss over a fixed set of windows."""

import math
from collections.abc import Callable

import torch
from accelerate import Accelerator

from gpt2_accel.data.loader import EvalLoader


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader: EvalLoader,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Loss of the prepared `model` on the windows of `loader`. All ranks call it, each with its own.

    `interrupted`, asked before each batch and the same on all ranks, ends it without a result.

    `val/loss` is the mean over tokens, in nats; `val/perplexity` its exponential; `val/bits_per_byte`
    the code length of the tokens, separators included, by the bytes of the text behind them, which
    compares across tokenizers; it is left out where the bytes are not known.
    """
    model.eval()
    totals = torch.zeros(2, device=accelerator.device)  # nats, tokens
    for input_ids, targets in loader:
        if interrupted():
            model.train()
            return {}
        tokens = (targets != -100).sum()
        nats = torch.where(tokens > 0, model(input_ids, targets) * tokens, 0.0)  # without any: NaN
        totals += torch.stack((nats, tokens))
    model.train()
    nats, tokens = accelerator.reduce(totals, "sum").tolist()
    loss = nats / tokens
    results = {"val/loss": loss, "val/perplexity": math.exp(loss)}
    if loader.bytes_per_token:
        results["val/bits_per_byte"] = loss / math.log(2) / loader.bytes_per_token
    return results

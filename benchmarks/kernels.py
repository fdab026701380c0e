"""Measures forward and backward of the head with its loss, and of causal attention, alone.

    python benchmarks/kernels.py

Losses: all logits at once, compiled; the toolkit's chunks, as many as on a CPU, 8 and as many as it takes on the
device; and where importable torch's `linear_cross_entropy`, Liger and cut-cross-entropy. Attention: each of torch's
kernels that runs, and FlexAttention with a block mask of documents. In bf16 on a GPU, tiny in fp32 elsewhere.
"""

import argparse
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from results import RESULTS, summary, write_result
from timing import peak_memory, seconds_each, this_device
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2_accel import kernels
from gpt2_accel.device import has_block_masks, logits_at_once, total_memory
from gpt2_accel.kernels import block_attention, cross_entropy

Step = Callable[[], object]
# Modules and functions of other losses, which map (x, weight, targets) to the mean loss.
OTHERS = {
    "torch linear_cross_entropy": "torch.nn.functional linear_cross_entropy",
    "Liger": "liger_kernel.transformers.functional liger_fused_linear_cross_entropy",
    "cut-cross-entropy": "cut_cross_entropy linear_cross_entropy",
}


def losses(rows: int, width: int, vocab: int, device: torch.device) -> dict[str, Step]:
    """Returns the contestants of the loss: each computes it and the gradients of its inputs."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    x = torch.randn(rows, width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=device) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), device=device)

    def step(loss: Callable[..., torch.Tensor]) -> Step:
        return lambda: torch.autograd.grad(loss(x, weight, targets), (x, weight))

    def ours(logits: int) -> Step:
        def loss(x, weight, targets):
            kernels.choose(logits_at_once=logits)
            return cross_entropy.linear_cross_entropy(x, weight, targets, vocab_size=vocab)

        return step(loss)

    def plain(x, weight, targets):
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    kernels.choose(fuse=cuda)
    found = {
        f"all logits{', compiled' * cuda}": step(torch.compile(plain) if cuda else plain),
        "toolkit, chunks of a CPU": ours(cross_entropy.LOGITS_AT_ONCE),
        "toolkit, 8 chunks": ours(-(-rows * vocab // 8)),
        "toolkit": ours(logits_at_once(total_memory(device), "bf16") if cuda else rows * vocab),
    }
    for name, place in OTHERS.items():
        module, function = place.split()
        with suppress(ImportError, AttributeError):
            found[name] = step(getattr(import_module(module), function))
    return found


def attentions(shape: tuple[int, int, int, int], device: torch.device) -> dict[str, Step]:
    """Returns the contestants of attention, (B, H, T, D): each computes it and the gradients of its inputs."""
    B, _, T, _ = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)

    def step(attention: Callable[[], torch.Tensor]) -> Step:
        return lambda: torch.autograd.grad(attention(), (q, k, v), grad)

    def only(kind: SDPBackend) -> Step:
        def attention():
            with sdpa_kernel(kind):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return step(attention)

    kinds = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    found = {name.lower(): only(getattr(SDPBackend, name)) for name in kinds}
    documents = (torch.rand(B, T, device=device) < 0.003).cumsum(dim=1)
    dense = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    masked = partial(F.scaled_dot_product_attention, q, k, v, attn_mask=dense)
    found["documents, dense mask"] = step(masked)
    if has_block_masks(device):
        blocks = block_attention.document_blocks(documents)
        masked = partial(block_attention.block_attention, q, k, v, blocks)
        found["documents, block mask"] = step(masked)
    return found


def measure(contestants: dict[str, Step], device: torch.device, repeats: int) -> dict[str, dict]:
    """Returns milliseconds and on a GPU the peak memory of each; a contestant that fails has a `problem`."""
    found = {}
    for name, run in contestants.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            seconds = seconds_each(run, device, warmup=3, repeats=repeats)
        except Exception as error:  # a contestant may not support the device
            found[name] = {"problem": str(error).strip().splitlines()[0][:200]}
        else:
            found[name] = {"milliseconds": summary([1e3 * one for one in seconds])}
            if device.type == "cuda":
                found[name]["memory"] = peak_memory(device)
        print(name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    device = this_device()
    cuda = device.type == "cuda"
    rows, width, vocab = (65536, 768, 50304) if cuda else (64, 32, 512)
    size = {"rows": rows, "width": width, "vocab": vocab}
    shape = (32, 12, 1024, 64) if cuda else (1, 2, 32, 16)
    figures = {
        "size": size,
        "shape": shape,
        "loss": measure(losses(**size, device=device), device, 20 if cuda else 2),
        "attention": measure(attentions(shape, device), device, 20 if cuda else 2),
    }
    write_result("kernels", figures, options.results)


if __name__ == "__main__":
    main()

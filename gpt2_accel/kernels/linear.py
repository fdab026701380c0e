"""Linear layers with a faster matrix-vector product for single-token decoding on a CPU."""

import functools

import torch
import torch.nn.functional as F

from gpt2_accel import kernels
from gpt2_accel.device import cpu_instructions


def applies(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether to multiply x: (…, in) and weight: (out, in) by `torch.mv`: a single row on a CPU, outside of training.

    `F.linear` packs the weight for a larger product, and takes 4/3 of the time in bf16. Inductor's product is slower.
    """
    if not kernels.enabled or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if x.numel() != weight.shape[1] or x.device.type != "cpu":
        return False
    return x.dtype != torch.bfloat16 or not has_dot_products()


@functools.cache
def has_dot_products() -> bool:
    """Whether the CPU has AVX512-BF16 but not AMX: `F.linear` then takes 2/3 of the time of `torch.mv` in bf16."""
    units = cpu_instructions().split()
    return {"AVX512", "bf16"} <= set(units) and "amx" not in units


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`: x (…, in), weight (out, in), bias (out) -> (…, out)."""
    if not applies(x, weight):
        return F.linear(x, weight, bias)
    vector = x.view(-1)
    y = torch.mv(weight, vector) if bias is None else torch.addmv(bias, weight, vector)
    return y.view(*x.shape[:-1], -1)


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` with the matrix-vector product for a single token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, in) -> (…, out)."""
        return linear(x, self.weight, self.bias)

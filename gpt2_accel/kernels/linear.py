"""Linear layers with a faster matrix-vector product for single-token decoding on a CPU."""

import functools

import torch
import torch.nn.functional as F

from gpt2_accel import kernels
from gpt2_accel.device import cpu_instructions


def applies(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x: (…, in) is one row, for weight: (out, in), on a CPU and outside of training."""
    if not kernels.choices.enabled or torch.is_grad_enabled():
        return False
    return x.numel() == weight.shape[1] and x.device.type == "cpu"


@functools.cache
def has_dot_products() -> bool:
    """Whether the CPU has AVX512-BF16 but not AMX: `F.linear` then takes 2/3 of the time of `torch.mv` in bf16."""
    units = cpu_instructions().split()
    return {"AVX512", "bf16"} <= set(units) and "amx" not in units


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`: x (…, in), weight (out, in), bias (out) -> (…, out).

    For a single row the time is that of reading the weight. `F.linear` packs the weight for a larger product first. In
    bf16 `torch.mv` takes 3/4 of its time on CPUs without AVX512-BF16 or with AMX. In a compiled model inductor fuses the
    product and its sum in fp32 into one loop over the weight. With AVX512 this takes less than half of `F.linear`'s time.
    """
    if not applies(x, weight):
        return F.linear(x, weight, bias)
    vector = x.view(-1)
    if torch.compiler.is_compiling():
        accumulate_dtype = torch.promote_types(x.dtype, torch.float32)
        y = (weight.to(accumulate_dtype) * vector.to(accumulate_dtype)).sum(-1)
        y = (y if bias is None else y + bias.to(accumulate_dtype)).to(x.dtype)
    elif x.dtype == torch.bfloat16 and has_dot_products():
        return F.linear(x, weight, bias)
    else:
        y = torch.mv(weight, vector) if bias is None else torch.addmv(bias, weight, vector)
    return y.view(*x.shape[:-1], -1)


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` with the matrix-vector product for a single token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, in) -> (…, out)."""
        return linear(x, self.weight, self.bias)

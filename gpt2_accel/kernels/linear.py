"""Linear layers with a faster matrix-vector product for single-token decoding on a CPU."""

import torch
import torch.nn.functional as F

from gpt2_accel import kernels


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`: x (…, in), weight (out, in), bias (out) -> (…, out).

    Decoding one row multiplies each weight by one vector. On a CPU in bf16 `torch.mv` takes three quarters of the time
    of `F.linear`, because it does not pack the weight for a larger product. Inductor's matrix-vector product is slower.
    """
    if not kernels.enabled or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    if x.numel() != weight.shape[1] or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    vector = x.view(-1)
    y = torch.mv(weight, vector) if bias is None else torch.addmv(bias, weight, vector)
    return y.view(*x.shape[:-1], -1)


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` with the matrix-vector product for a single token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, in) -> (…, out)."""
        return linear(x, self.weight, self.bias)

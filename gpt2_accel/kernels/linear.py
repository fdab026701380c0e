"""A Linear whose bias gradient is a matrix product.

The gradient of a bias is the sum of the output's gradient over all tokens. As a sum of columns a
GPU reads it at a third of its memory's speed, as a product with ones at nearly all of it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpt2_accel import kernels

ROWS = 8  # of ones: the smallest product that runs on tensor cores


class Linear(nn.Linear):
    """`nn.Linear`. With `bias_products` half precision takes `BiasProduct`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, in_features) -> (…, out_features)."""
        device = x.device.type
        dtype = x.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        chosen = kernels.choices.enabled and kernels.choices.bias_products
        if not chosen or self.bias is None or dtype.itemsize > 2:
            return super().forward(x)
        return BiasProduct.apply(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class BiasProduct(torch.autograd.Function):
    """`F.linear`, with a bias gradient by a product. The backward has no derivative."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        ones = rows.new_ones(ROWS, len(rows))
        return grad @ weight, rows.t() @ x.flatten(0, -2), (ones @ rows)[0]

"""GELU: torch's own, except compiled for a CPU, where its hyperbolic tangent takes longer than all else of it."""

import math

import torch
import torch.nn.functional as F


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """GELU of x, any shape, in its dtype: with `approximate` "none" exactly, with "tanh" as in GPT-2."""
    if approximate == "tanh" and x.device.type == "cpu" and torch.compiler.is_compiling():
        return tanh_gelu(x)
    return F.gelu(x, approximate=approximate)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """The approximation with a hyperbolic tangent (Hendrycks and Gimpel, 2016, arXiv:1606.08415), which is
    x · sigmoid(2u), since (1 + tanh(u)) / 2 = sigmoid(2u): an exponential takes a third of the time."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide * torch.sigmoid(2 * u)).to(x.dtype)

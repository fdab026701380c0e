"""Elementwise functions as one compiled kernel each, for the operators that a compiler does not look into."""

import functools
from collections.abc import Callable

import torch


@functools.cache
def fused(function: Callable) -> Callable:
    """`function` compiled by inductor, once for all shapes."""
    return torch.compile(function, dynamic=True)

"""Compiles the kernels' elementwise parts, and sets the key of inductor's cache."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpt2_accel.runtime.device import cpu_instructions


@functools.cache
def fused(function: Callable) -> Callable:
    """Compiles an elementwise `function` into one inductor kernel, for use in custom operators.

    Those are opaque to Dynamo. The last dimension of tensors, such as the vocabulary, is static;
    others, such as rows, are dynamic.
    """
    compiled = torch.compile(function, dynamic=True)

    def call(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                torch._dynamo.mark_static(arg, arg.ndim - 1)
        return compiled(*args)

    return call


def tag_compile_cache() -> None:
    """Adds the source of this folder and the CPU's instruction sets to the key of inductor's cache.

    Inductor's own key has neither. It does not see the source of custom operators, so it would
    reuse code compiled for another release's operators. It also reuses AVX2 code on a CPU with
    AVX-512 and vice versa, which computes wrong numbers or corrupts memory (seen with torch 2.13),
    for example where machines share a home folder. Every model imports this file, so the key is set
    before anything is compiled.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    torch.compiler.config.cache_key_tag = f"{digest.hexdigest()} {cpu_instructions()}"


tag_compile_cache()

"""Compilation of the kernels' elementwise parts, and what inductor's cache has to tell apart."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from gpt2_accel.device import cpu_instructions


@functools.cache
def fused(function: Callable) -> Callable:
    """An elementwise `function` compiled by inductor as one kernel, once for all shapes.

    For use inside custom operators, which are opaque to Dynamo.
    """
    return torch.compile(function, dynamic=True)


def tag_compile_cache() -> None:
    """Puts into the key of inductor's cache what inductor leaves out: the source of this folder and the CPU's
    instructions.

    Inductor does not see the source of custom operators, and would take code compiled for another release's operators
    from the cache. And it takes code generated for AVX2 on a CPU with AVX-512 and the other way round, which computes
    wrong numbers or corrupts memory (seen with torch 2.13): home folders are shared by different machines. Every model
    imports this file, so that the key is there before anything is compiled.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    torch.compiler.config.cache_key_tag = f"{digest.hexdigest()} {cpu_instructions()}"


tag_compile_cache()

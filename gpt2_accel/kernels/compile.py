"""Compilation of the kernels' elementwise parts, and the fingerprint of their source for inductor's cache."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch


@functools.cache
def fused(function: Callable) -> Callable:
    """An elementwise `function` compiled by inductor as one kernel, once for all shapes.

    For use inside custom operators, which are opaque to Dynamo.
    """
    return torch.compile(function, dynamic=True)


def kernels_fingerprint() -> str:
    """SHA-256 (hex) of this folder's source.

    Inductor's cache does not see the source of custom operators, so that code compiled for another release's
    operators would be taken from the cache. The fingerprint goes into its key.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

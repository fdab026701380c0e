"""The former name of `gpt2_accel.generation.sampling`."""

from gpt2_accel.generation.sampling import (
    Completion,
    Sampling,
    complete,
    encode_prompt,
    likeliest,
    load,
    stream,
    tokens,
)

__all__ = [
    "Completion",
    "Sampling",
    "complete",
    "encode_prompt",
    "likeliest",
    "load",
    "stream",
    "tokens",
]

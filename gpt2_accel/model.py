"""The former name of `gpt2_accel.models.gpt2`."""

from gpt2_accel.models.gpt2 import (
    GPT,
    MLP,
    SIZES,
    Block,
    CausalSelfAttention,
    GPTConfig,
    document_mask,
)

__all__ = ["GPT", "MLP", "SIZES", "Block", "CausalSelfAttention", "GPTConfig", "document_mask"]

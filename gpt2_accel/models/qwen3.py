"""Qwen3, a `models/llama.py` that normalises queries and keys.

The architecture of "Qwen3 Technical Report" (Yang et al., 2025, arXiv:2505.09388) as in Hugging
Face's `Qwen3ForCausalLM`. Shape letters as in `models/llama.py`.
"""

from dataclasses import dataclass

import torch

from gpt2_accel.models import llama
from gpt2_accel.models.parts import RMSNorm


@dataclass
class Qwen3Config(llama.LlamaConfig):
    """The shape of a Qwen3, with the fields of `LlamaConfig`; the defaults give Qwen3-0.6B."""

    architecture = "qwen3"
    # A new model has Qwen3-0.6B's proportions. Its MLP has three times the width.
    group = 2
    inner_thirds = 9
    inner_multiple = 1

    vocab_size: int = 151936
    n_positions: int = 40960
    n_layer: int = 28
    n_head: int = 16
    n_kv_head: int = 8
    head_dim: int = 128
    n_embd: int = 1024
    n_inner: int = 3072
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    tied: bool = True

    def build(self) -> "Qwen3":
        return Qwen3(self)


CONFIG = Qwen3Config


class Attention(llama.Attention):
    """Llama's attention with an RMSNorm of queries and keys (Dehghani et al., 2023,
    arXiv:2302.05442)."""

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class Qwen3(llama.Llama):
    """A Qwen3 language model."""

    config_class = Qwen3Config
    attention = Attention

"""nanochat's model, a `models/llama.py` with other norms, rotation, MLP and logits.

The architecture of karpathy/nanochat as in Hugging Face's `NanoChatForCausalLM`.
Differences from Llama:
- no norm has weights, and the token embedding is normalised too;
- the rotation turns by the negative angle, and queries and keys are normalised after it;
- the MLP is fc2(relu(fc1(x))²);
- logits are soft-capped, and the head is not tied to the token embedding.

Shape letters as in `models/llama.py`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gpt2_accel.models import llama
from gpt2_accel.models.parts import rms_norm, rotate


@dataclass
class NanochatConfig(llama.LlamaConfig):
    """The shape of a nanochat; the defaults give karpathy/nanochat-d32.

    It adds `soft_cap` to `LlamaConfig`: logits become `soft_cap` · tanh(logits / `soft_cap`); None
    does not cap them. Raises `ValueError` if it is not positive.
    """

    architecture = "nanochat"
    depth_head = 128
    # A new model has nanochat's proportions. Its MLP has four times the width.
    group = 1
    inner_thirds = 12
    inner_multiple = 1

    vocab_size: int = 65536
    n_positions: int = 2048
    n_layer: int = 32
    n_head: int = 16
    n_kv_head: int = 16
    head_dim: int = 128
    n_embd: int = 2048
    n_inner: int = 8192
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied: bool = False
    soft_cap: float | None = 15.0

    def norm(self) -> nn.Module:
        return nn.RMSNorm(self.n_embd, self.norm_eps, elementwise_affine=False)

    def build(self) -> "Nanochat":
        return Nanochat(self)


CONFIG = NanochatConfig


class Attention(llama.Attention):
    """Llama's attention with reversed rotation, and an RMSNorm of the rotated queries and keys."""

    def positioned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rms_norm(rotate(x, cos, -sin), self.config.norm_eps)


class MLP(nn.Module):
    """Linear, squared ReLU (So et al., 2021, arXiv:2109.08668), Linear back."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(width, inner, bias=False)
        self.fc2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C)."""
        return self.fc2(F.relu(self.fc1(x)).square())


class Nanochat(llama.Llama):
    """nanochat's language model."""

    config_class = NanochatConfig
    attention = Attention
    mlp = MLP
    residual = ("o_proj", "fc2")

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(super().embed(input_ids))

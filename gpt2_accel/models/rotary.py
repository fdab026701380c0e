"""The angles of rotary position embeddings, and how Llama 3 scales them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class RotaryScaling(NamedTuple):
    """Scaled rotary frequencies, for contexts longer than those of the first training.

    Frequencies that turn less than `low_freq_factor` times in `original_positions` are divided by `factor`, those that turn
    more than `high_freq_factor` times stay, and the ones between are interpolated ("The Llama 3 Herd of Models", 2024,
    arXiv:2407.21783; the formula is that of `rope_type: llama3` in `transformers`). The default `original_positions` of
    0 divides all of them (`linear`; Chen et al., 2023, arXiv:2306.15595).
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


def rotary_frequencies(
    head_dim: int,
    theta: float,
    scaling: Sequence[float] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Returns the angle per position of each pair of channels, theta^(-2i/D) before `scaling`, a `RotaryScaling`: (D/2,) fp32."""
    steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (steps / head_dim)
    if not scaling:
        return frequencies
    factor, low, high, original = scaling
    turns = original / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def rotary_angles(
    position_ids: torch.Tensor,
    head_dim: int,
    theta: float,
    scaling: RotaryScaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and sines of the rotary position embedding (Su et al., 2021, arXiv:2104.09864).

    position_ids: (T,) or (B, T) -> two of (1 or B, 1, T, D) fp32. Channel i and channel i + D/2 turn together, by
    position times `rotary_frequencies`.
    """
    frequencies = rotary_frequencies(head_dim, theta, scaling, position_ids.device)
    angles = position_ids[..., None].float() * frequencies  # (…, T, D/2)
    angles = torch.cat((angles, angles), dim=-1).view(-1, 1, position_ids.shape[-1], head_dim)
    return angles.cos(), angles.sin()

"""The angles of rotary position embeddings, computed once in a compiled model instead of for each head of each layer."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gpt2_accel import kernels


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
    exporting = torch.compiler.is_exporting()  # an exported graph has torch's operators only
    once = kernels.choices.enabled and torch.compiler.is_compiling() and not exporting
    return (opaque_angles if once else plain_angles)(position_ids, head_dim, theta, scaling)


def plain_angles(
    position_ids: torch.Tensor, head_dim: int, theta: float, scaling: Sequence[float] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_angles` in plain PyTorch."""
    frequencies = rotary_frequencies(head_dim, theta, scaling, position_ids.device)
    angles = position_ids[..., None].float() * frequencies  # (…, T, D/2)
    angles = torch.cat((angles, angles), dim=-1).view(-1, 1, position_ids.shape[-1], head_dim)
    return angles.cos(), angles.sin()


# A custom operator, opaque to Dynamo. Otherwise inductor fuses the powers, cosines and sines into each use.
@torch.library.custom_op("gpt2_accel::rotary_angles", mutates_args=())
def opaque_angles(
    position_ids: torch.Tensor, head_dim: int, theta: float, scaling: Sequence[float] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_angles` as an operator."""
    return plain_angles(position_ids, head_dim, theta, scaling)


@opaque_angles.register_fake
def _(position_ids, head_dim, theta, scaling):
    rows = position_ids.shape[0] if position_ids.ndim > 1 else 1
    shape = (rows, 1, position_ids.shape[-1], head_dim)
    return tuple(position_ids.new_empty(shape, dtype=torch.float32) for _ in range(2))

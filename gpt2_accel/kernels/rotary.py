"""The angles of rotary position embeddings, computed once in a compiled model instead of for each head of each layer."""

import torch

from gpt2_accel import kernels


def rotary_angles(
    position_ids: torch.Tensor, head_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and sines of the rotary position embedding (Su et al., 2021, arXiv:2104.09864).

    position_ids: (T,) or (B, T) -> two of (1 or B, 1, T, D) fp32. Channel i and channel i + D/2 turn together, by
    position · theta^(-2i/D).
    """
    exporting = torch.compiler.is_exporting()  # an exported graph has torch's operators only
    once = kernels.choices.enabled and torch.compiler.is_compiling() and not exporting
    return (opaque_angles if once else plain_angles)(position_ids, head_dim, theta)


def plain_angles(
    position_ids: torch.Tensor, head_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_angles` in plain PyTorch."""
    steps = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (steps / head_dim)
    angles = position_ids[..., None].float() * frequencies  # (…, T, D/2)
    angles = torch.cat((angles, angles), dim=-1).view(-1, 1, position_ids.shape[-1], head_dim)
    return angles.cos(), angles.sin()


# A custom operator, opaque to Dynamo. Otherwise inductor fuses the powers, cosines and sines into each use.
@torch.library.custom_op("gpt2_accel::rotary_angles", mutates_args=())
def opaque_angles(
    position_ids: torch.Tensor, head_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_angles` as an operator."""
    return plain_angles(position_ids, head_dim, theta)


@opaque_angles.register_fake
def _(position_ids, head_dim, theta):
    rows = position_ids.shape[0] if position_ids.ndim > 1 else 1
    shape = (rows, 1, position_ids.shape[-1], head_dim)
    return tuple(position_ids.new_empty(shape, dtype=torch.float32) for _ in range(2))

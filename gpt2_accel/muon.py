"""Muon: an optimizer for the matrices of the blocks, with AdamW for the other parameters."""

import math

import torch
import torch.distributed as dist
from torch import nn

from gpt2_accel.device import has_bf16


class Muon(torch.optim.AdamW):
    """Muon for the parameter groups marked `"muon": True`, fused AdamW for the others.

    Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum
    by the nearest semi-orthogonal matrix, found by Newton-Schulz iteration. The update is scaled by
    0.2·sqrt(max(rows, columns)), the size of an AdamW update, so that Muon and AdamW share one learning rate and
    weight decay (`match_rms_adamw`; Liu et al., 2025, arXiv:2502.16982). The result equals `torch.optim.Muon`;
    matrices of one shape go through the iteration in one batch.

    `stacked` gives the number of equal matrices that a parameter stacks along its rows, such as 3 for queries, keys
    and values. Muon updates each of them separately, with the scale of its own shape.

    With several ranks (DDP) each rank orthogonalizes its share of the matrices; the updates are gathered.
    """

    momentum = 0.95

    def __init__(self, params, stacked: dict[nn.Parameter, int] | None = None, **adamw_options):
        super().__init__(params, fused=True, **adamw_options)
        self.stacked = stacked or {}
        for group in self.param_groups:
            group.setdefault("muon", False)
        # Only AdamW's fused kernel can read a GradScaler's overflow flag; the scaler decides for both optimizers.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict) -> None:
        # AdamW's own method updates the state of old torch releases and fails on Muon's state.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure=None):
        """Makes one update. Returns the loss of `closure`, if there is one."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self.muon_step(group)
        return loss

    def muon_step(self, group: dict) -> None:
        """Updates the matrices of `group`, batched by shape."""
        by_shape: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            if not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        grads = [param.grad for param in params]
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
        nesterov = torch._foreach_lerp(grads, buffers, self.momentum)
        for param, momentum in zip(params, nesterov, strict=True):
            count = self.stacked.get(param, 1)
            for pair in zip(param.chunk(count), momentum.chunk(count), strict=True):
                by_shape.setdefault(pair[0].shape, []).append(pair)
        for shape, pairs in by_shape.items():
            matrices, momenta = zip(*pairs, strict=True)
            updates = orthogonalize_shared(torch.stack(momenta)).to(matrices[0].dtype)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            scale = 0.2 * math.sqrt(max(shape))
            torch._foreach_add_(matrices, updates.unbind(), alpha=-scale * group["lr"])


def orthogonalize_shared(matrices: torch.Tensor) -> torch.Tensor:
    """Orthogonalizes matrices that are equal on all ranks: each rank takes a share, the results are gathered."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1:
        return orthogonalize(matrices)
    share, rank = -(-len(matrices) // ranks), dist.get_rank()
    own = matrices[rank * share : (rank + 1) * share]
    shape, dtype = matrices.shape[1:], iteration_dtype(matrices.device)
    padded = torch.zeros(share, *shape, dtype=dtype, device=matrices.device)
    if len(own):
        padded[: len(own)] = orthogonalize(own)
    gathered = padded.new_empty(share * ranks, *shape)
    # The older name warns from torch 2.13 on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, padded)
    return gathered[: len(matrices)]


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximates the nearest semi-orthogonal matrix of each matrix.

    Quintic Newton-Schulz iteration with the coefficients of Jordan et al., 2024. Singular values above 0.2% of the
    matrix's Frobenius norm end between 0.5 and 1.5. Smaller ones, which random square matrices have, grow by a factor
    of up to 485 and may stay below 0.5.

    matrices: (N, rows, columns), any float dtype -> the same shape, in bf16 (fp32 on a CPU without bf16 units).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(iteration_dtype(matrices.device))
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # singular values of at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16, as Muon's authors use, or fp32 on a CPU that only emulates bf16."""
    emulated = device.type == "cpu" and not has_bf16(device)
    return torch.float32 if emulated else torch.bfloat16

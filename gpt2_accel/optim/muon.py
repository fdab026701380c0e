"""Muon: an optimizer for the matrices of the blocks, with AdamW for the other parameters."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpt2_accel.rounding import ceil_div
from gpt2_accel.runtime.device import has_bf16, is_shard


class Muon(torch.optim.AdamW):
    """Muon for the parameter groups marked `"muon": True`, fused AdamW for the others.

    Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) replaces a matrix's
    momentum by the nearest semi-orthogonal matrix, found by Newton-Schulz iteration. The update is
    scaled by 0.2·sqrt(max(rows, columns)), the size of an AdamW update, so that Muon and AdamW
    share one learning rate and weight decay (`match_rms_adamw`; Liu et al., 2025,
    arXiv:2502.16982). The result equals `torch.optim.Muon`; matrices of one shape go through the
    iteration in one batch. A parameter of three dimensions is a matrix for each expert.

    `stacked` maps a parameter's name to the number of equal matrices that it stacks along its rows,
    such as 3 for queries, keys and values. Muon updates each of them separately, with the scale of
    its own shape.

    Each rank orthogonalizes a part of the matrices. With DDP the results are gathered. FSDP2 shards
    each matrix by its rows: the ranks exchange rows for full matrices and back (as Dion does, Ahn
    et al., 2025, arXiv:2504.05295), within each replica if there are several.
    """

    momentum = 0.95

    def __init__(
        self, params: Any, stacked: dict[str, int] | None = None, **adamw_options: Any
    ) -> None:
        super().__init__(params, fused=True, **adamw_options)
        self.stacked = stacked or {}
        for group in self.param_groups:
            group.setdefault("muon", False)
        # Only AdamW's fused kernel can read a GradScaler's overflow flag. It decides for both.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict) -> None:
        # AdamW's own method updates the state of old torch releases and fails on Muon's state.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
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
        """Updates the matrices of `group`, all matrices of one shape in one batch.

        A CPU is slow at many small products.
        """
        batches: dict[tuple, list[tuple[nn.Parameter, int, list[torch.Tensor]]]] = {}
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            count = param.shape[0] if param.ndim == 3 else self.stacked.get(name, 1)
            parts = [own_part(t, count) for t in (param, param.grad, state["momentum_buffer"])]
            key = (param.shape, count) if is_shard(param) else parts[0].shape[1:]
            batches.setdefault(key, []).append((param, count, parts))
        for batch in batches.values():
            param, count, _ = batch[0]
            weights, grads, buffers = zip(*(parts for _, _, parts in batch), strict=True)
            torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
            nesterov = torch.cat(torch._foreach_lerp(grads, buffers, self.momentum))
            nesterov = nesterov.to(iteration_dtype(nesterov.device))
            if not is_shard(param):
                updates = orthogonalize_shared(nesterov)
            elif param.ndim == 2:
                team = param.device_mesh.get_group(-1)  # the ranks of this replica
                updates = orthogonalize_rows(nesterov, len(param), count, team)
            else:  # a rank has whole experts, or none
                experts = nesterov.shape[1]
                updates = orthogonalize(nesterov, experts) if experts else nesterov
            updates = updates.to(param.dtype).split([len(part) for part in weights])
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            columns = param.shape[-1]
            scale = 0.2 * math.sqrt(max(param.numel() // columns // count, columns))
            torch._foreach_add_(weights, updates, alpha=-scale * group["lr"])


def own_part(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a view of this rank's part of a parameter, as a batch of matrices.

    For a tensor that FSDP2 has sharded it has this rank's rows, (1, rows, columns), or experts,
    (1, experts, rows, columns). For others it has the `count` matrices that the tensor stacks,
    (count, fewer, more): tall ones are transposed.
    """
    if is_shard(tensor):
        return tensor.to_local()[None]
    matrices = tensor.view(count, -1, tensor.shape[-1])
    return matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices


def orthogonalize_shared(matrices: torch.Tensor) -> torch.Tensor:
    """Orthogonalizes matrices that are equal on all ranks: each rank a part, then all gather.

    matrices: (N, rows, columns) -> the same shape.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return orthogonalize(matrices)
    rank = dist.get_rank()
    share = ceil_div(len(matrices), ranks)
    mine = matrices[rank * share : (rank + 1) * share]
    padded = matrices.new_zeros(share, *matrices.shape[1:])
    if len(mine):
        padded[: len(mine)] = orthogonalize(mine)
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded)
    return torch.cat(gathered)[: len(matrices)]


def orthogonalize_rows(
    shards: torch.Tensor, rows: int, count: int, team: dist.ProcessGroup
) -> torch.Tensor:
    """Orthogonalizes matrices whose rows are sharded over the ranks of `team`.

    Each rank receives some full matrices and sends their new rows back. shards: (N, this rank's
    rows, columns) -> the same shape. The matrices have `rows` rows, each a stack of `count`. The
    rows are divided as by `torch.chunk`; a rank may have none.
    """
    ranks = team.size()
    rank = team.rank()
    columns = shards.shape[2]
    step = ceil_div(rows, ranks)
    share = ceil_div(len(shards), ranks)  # matrices of a rank
    heights = [max(0, min(step, rows - r * step)) for r in range(ranks)]
    owned = [max(0, min(share, len(shards) - r * share)) for r in range(ranks)]  # matrices
    sent = [number * heights[rank] * columns for number in owned]
    received = [owned[rank] * height * columns for height in heights]
    pieces = exchange(shards.flatten(), sent, received, team)
    shapes = [(owned[rank], height, columns) for height in heights]
    full = torch.cat([p.view(s) for p, s in zip(pieces, shapes, strict=True)], dim=1)
    if len(full):
        full = orthogonalize(full, count)
    back = torch.cat([piece.flatten() for piece in full.split(heights, dim=1)])
    return torch.cat(exchange(back, received, sent, team)).view(shards.shape)


def exchange(
    data: torch.Tensor, sent: list[int], received: list[int], team: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Sends parts of `data`, of the sizes `sent`, to the ranks of `team`.

    Returns the parts that they send, of the sizes `received`.
    """
    parts = data.new_empty(sum(received))
    dist.all_to_all_single(parts, data, received, sent, team)
    return list(parts.split(received))


def orthogonalize(matrices: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Approximates the nearest semi-orthogonal matrix of each matrix.

    Quintic Newton-Schulz iteration with the coefficients of Jordan et al., 2024. Singular values
    above 0.2% of the matrix's Frobenius norm end between 0.5 and 1.5. Smaller ones, which random
    square matrices have, grow by a factor of up to 485 and may stay below 0.5.

    matrices: (N, rows, columns) or (N, experts, rows, columns), in `iteration_dtype`, each a
    stack of `count` along its rows -> the same shape.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.view(len(matrices) * count, -1, matrices.shape[-1])
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # singular values of at most 1
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16, as Muon's authors use, or fp32 on a CPU that only emulates bf16."""
    emulated = device.type == "cpu" and not has_bf16(device)
    return torch.float32 if emulated else torch.bfloat16

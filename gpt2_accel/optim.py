"""AdamW, Muon, and the schedules of the learning rate and the data.

Both schedules are pure functions of the step. The loop writes the learning rate into the optimizer, so a resume needs
only the step, and there is no scheduler object to prepare or to save.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from gpt2_accel.device import has_bf16

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "wsd", "constant")


def learning_rate(
    step: float,
    *,
    peak: float,
    schedule: str = "cosine",
    warmup_steps: int = 0,
    max_steps: int,
    min_ratio: float = 0.1,
    decay_share: float = 0.2,
) -> float:
    """Returns the learning rate of update `step`, which counts from 0.

    `step` counts updates of the full batch. After a resume with another batch size it may be a fraction, so that the
    rate is a function of the tokens.

    Linear warmup over `warmup_steps`; update 0 has a rate above 0. Then one of
    - `cosine`, `linear`: from `peak` down to `min_ratio * peak` at `max_steps`;
    - `wsd`: warmup, stable, decay (Hägele et al., 2024, arXiv:2405.18392): `peak`, then their 1 - sqrt decay over the
      last `decay_share` of all steps;
    - `constant`.

    Raises `ValueError` for an unknown `schedule`.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    decay_steps = max(decay_share * max_steps, 1)
    decayed = min(max((step - (max_steps - decay_steps)) / decay_steps, 0.0), 1.0)
    remaining = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": 1 - math.sqrt(decayed),
        "constant": 1.0,
    }[schedule]
    return peak * (min_ratio + (1 - min_ratio) * remaining)


class BatchSchedule:
    """Updates of `full` sequences each, from update `step` on, before which the run has seen `seen` sequences.

    A resume with another batch size starts a new schedule at its step.
    """

    def __init__(self, full: int, step: int = 0, seen: int = 0):
        self.full, self.step, self.seen = full, step, seen

    def first(self, step: int) -> int:
        """Returns the number of sequences before update `step`, which must not precede the schedule's first."""
        assert step >= self.step, (step, self.step)
        return self.seen + (step - self.step) * self.full

    def updates(self, full_updates: int) -> int:
        """Returns the updates, from the start of the run, that see at least `full_updates` x `full` sequences."""
        return self.step + max(0, -(-(full_updates * self.full - self.seen) // self.full))


def halved(size: int, total: int) -> int:
    """Halves the micro-batch `size` until it divides `total` sequences. Halving keeps the number of compiled shapes
    small."""
    while total % size:
        size = max(size // 2, 1)
    return size


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Writes `value` into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Builds the optimizer. `adamw` is fused AdamW; `muon` is Muon for the matrices of the blocks and AdamW for the
    other parameters.

    Weight decay applies to matrices and embeddings, not to biases and LayerNorm gains (as in the GPT-3 paper and
    nanoGPT). Muon and AdamW share one learning rate, see `Muon`.

    Raises `ValueError` for an unknown `name`.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    named = list(model.named_parameters())
    matrices = [(n, p) for n, p in named if p.ndim >= 2]
    vectors = [(n, p) for n, p in named if p.ndim < 2]
    if name == "adamw":
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    hidden = hidden_matrices(model)
    hidden_names = {n for n, _ in hidden}
    stacked = {m.weight: m.stacked for m in model.modules() if hasattr(m, "stacked")}
    groups = [
        {"params": hidden, "muon": True},
        {"params": [(n, p) for n, p in matrices if n not in hidden_names]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return Muon(groups, stacked, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)


def hidden_matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that Muon updates: all matrices except the embeddings and the output head."""
    others = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others.add(id(getattr(model, "head_weight", None)))
    named = model.named_parameters()
    return [(name, p) for name, p in named if p.ndim >= 2 and id(p) not in others]


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

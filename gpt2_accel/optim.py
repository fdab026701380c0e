"""Optimizers, and the schedules of the learning rate and of the batch size.

Both schedules are pure functions, of the step and of the tokens before it; the loop writes the learning
rate into the optimizer. So a resume needs nothing but the step, and no scheduler object has to be prepared
or saved.
"""

import bisect
import math

import torch
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
    """The learning rate of update `step` (the first is 0), counted in updates of the full batch: where the
    batch is still smaller `step` is a fraction, and the rate a function of the tokens.

    Linear warmup over `warmup_steps`, in which update 0 already moves; then `cosine` or `linear` from
    `peak` down to `min_ratio * peak` at `max_steps`, or `constant`, or `wsd` (warmup, stable, decay:
    Hägele et al., 2024, arXiv:2405.18392), which stays at the peak and falls, by their 1 - sqrt, in the last
    `decay_share` of all steps.

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
    """How many sequences each update has: `full`, or at first fewer.

    With `ramp_sequences` the batch grows linearly with the sequences seen, from `start` to `full` over so
    many of them, in multiples of `start` (the GPT-3 paper, Brown et al., 2020, appendix B: from 32k tokens
    over the first 4 to 12 billion). The same on any number of processes.

    A run that goes on with another batch begins at update `step`, before which `seen` sequences were read.

    Raises `ValueError` if `full` is not a multiple of `start`.
    """

    def __init__(
        self, full: int, start: int = 1, ramp_sequences: int = 0, *, step: int = 0, seen: int = 0
    ):
        if ramp_sequences and full % start:
            raise ValueError(
                f"the ramp begins with {start} sequences an update, which does not divide the full "
                f"{full}: set --ramp_start so that it does"
            )
        self.full, self.step = full, step
        # Sequences before each update of the ramp, from `step` on, and before the first full one.
        self.before = [seen]
        while (seen := self.before[-1]) < ramp_sequences:
            size = start + (full - start) * seen // ramp_sequences
            self.before.append(seen + size // start * start)

    def first(self, step: int) -> int:
        """The number of sequences before update `step`, which is not before the schedule's own."""
        number, ramp = step - self.step, len(self.before) - 1
        assert number >= 0, (step, self.step)
        if number <= ramp:
            return self.before[number]
        return self.before[-1] + (number - ramp) * self.full

    def sequences(self, step: int) -> int:
        """The number of sequences of update `step`."""
        return self.first(step + 1) - self.first(step)

    def updates(self, full_updates: int) -> int:
        """How many updates, those before the schedule's own included, see at least as many sequences as so many full
        ones."""
        wanted = full_updates * self.full
        if wanted <= self.before[-1]:
            return self.step + bisect.bisect_left(self.before, wanted)
        return self.step + len(self.before) - 1 + -(-(wanted - self.before[-1]) // self.full)


def halved(size: int, total: int) -> int:
    """The micro-batch `size`, halved until it divides `total` sequences; by halves, compiled code sees few shapes."""
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
    """`adamw`: fused AdamW. `muon`: Muon for the matrices of the blocks, AdamW for all else.

    Weight decay is on matrices and embeddings only, not on biases and LayerNorm gains (the GPT-3
    paper's and nanoGPT's choice). One learning rate serves both optimizers, see `Muon`.

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
    """The matrices of the blocks, which Muon takes: all with two dimensions but the embeddings."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    named = model.named_parameters()
    return [(name, p) for name, p in named if p.ndim >= 2 and id(p) not in embeddings]


class Muon(torch.optim.AdamW):
    """Muon for the parameter groups marked `"muon": True`, fused AdamW for the others.

    Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum
    by the nearest semi-orthogonal matrix, found by Newton-Schulz iteration. The update is scaled by
    0.2·sqrt(max(rows, columns)), which gives it the size of an AdamW update, so that one learning
    rate and weight decay serve both (`match_rms_adamw`; Liu et al., 2025, arXiv:2502.16982). It does
    what `torch.optim.Muon` does, but takes all matrices of one shape through the iteration together.

    `stacked` gives the number of matrices in a parameter that holds several of one shape below one another, as that
    of queries, keys and values does. Each is updated by itself, with the scale of its own shape.
    """

    momentum = 0.95

    def __init__(self, params, stacked: dict[nn.Parameter, int] | None = None, **adamw_options):
        super().__init__(params, fused=True, **adamw_options)
        self.stacked = stacked or {}
        for group in self.param_groups:
            group.setdefault("muon", False)
        # Only the fused kernel of AdamW can look at a GradScaler's flag by itself; let the scaler
        # decide for both.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict) -> None:
        # AdamW's own brings the state of old releases up to date, and stumbles over Muon's.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure=None):
        """One update. `closure`, if given, recomputes the loss, which is returned."""
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
        """Updates the matrices of `group`, those of one shape together."""
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
            updates = orthogonalize(torch.stack(momenta)).to(matrices[0].dtype)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            scale = 0.2 * math.sqrt(max(shape))
            torch._foreach_add_(matrices, updates.unbind(), alpha=-scale * group["lr"])


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrix of each matrix, roughly.

    Singular values above 0.2% of the matrix's Frobenius norm end between 0.5 and 1.5; smaller ones, which a random
    square matrix has, grow by a factor of up to 485 and may stay below.

    matrices: (N, rows, columns), any float dtype -> the same shape, in bf16 (fp32 on a CPU without
    bf16 units). Quintic Newton-Schulz iteration with the coefficients of Jordan et al., 2024.
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
    """bf16, as Muon's authors use, unless the CPU would have to emulate it."""
    emulated = device.type == "cpu" and not has_bf16(device)
    return torch.float32 if emulated else torch.bfloat16

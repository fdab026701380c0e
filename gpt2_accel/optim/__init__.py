"""The optimizer of a model, and the schedule of the learning rate.

The schedule is a pure function of the step. The loop writes the learning rate into the optimizer,
so a resume needs only the step, and there is no scheduler to prepare or to save.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpt2_accel.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn


def learning_rate(settings: TrainConfig, step: float) -> float:
    """Returns the learning rate of update `step`, which counts from 0.

    `step` counts updates of the full batch. It is a fraction during a batch-size ramp and after a
    resume with another batch size, so the rate is a function of the tokens.

    Linear warmup over `warmup_steps`; update 0 has a rate above 0. Then one of
    - `cosine`, `linear`: from the peak, `learning_rate`, down to `min_lr_ratio` of it at
      `max_steps`;
    - `wsd`: warmup, stable, decay (Hägele et al., 2024, arXiv:2405.18392): the peak, then their
      1 - sqrt decay over the last `decay_share` of all steps;
    - `wsd_linear`: the same with a linear decay, as in nanochat;
    - `constant`.
    """
    peak = settings.learning_rate
    warmup_steps = settings.warmup_steps
    max_steps = settings.max_steps
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    decay_steps = max(settings.decay_share * max_steps, 1)
    decayed = min(max((step - (max_steps - decay_steps)) / decay_steps, 0.0), 1.0)
    remaining = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": 1 - math.sqrt(decayed),
        "wsd_linear": 1 - decayed,
        "constant": 1.0,
    }[settings.lr_schedule]
    lowest = settings.min_lr_ratio
    return peak * (lowest + (1 - lowest) * remaining)


def set_learning_rate(optimizer: "torch.optim.Optimizer", value: float, peak: float) -> None:
    """Writes the learning rate into the parameter groups.

    A group that the optimizer was built with at the rate `peak` gets `value`. Other groups keep
    their ratio to it.
    """
    for group in optimizer.param_groups:
        first = group.setdefault("initial_lr", group["lr"])
        group["lr"] = value if first == peak else value * (first / (peak or 1))


def set_training(optimizer: "torch.optim.Optimizer", training: bool) -> None:
    """Puts an optimizer that has modes, such as a schedule-free one, into one of them."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwraps Accelerate's optimizer
    switch = getattr(optimizer, "train" if training else "eval", None)
    if switch is not None:
        switch()


@contextmanager
def evaluating_optimizer(optimizer: "torch.optim.Optimizer") -> Iterator[None]:
    """Runs the block in the optimizer's evaluation mode: the model has the weights to use."""
    set_training(optimizer, False)
    try:
        yield
    finally:
        set_training(optimizer, True)


def build_optimizer(model: "nn.Module", settings: TrainConfig) -> "torch.optim.Optimizer":
    """Builds the optimizer of the settings, for the parameters that are trained.

    `adamw` is fused AdamW; `muon` is Muon for the matrices of the blocks and AdamW for the other
    parameters. Weight decay applies to matrices and embeddings, not to biases and LayerNorm gains
    (as in the GPT-3 paper and nanoGPT). Muon and AdamW share one learning rate, see `Muon`.
    """
    import torch

    from gpt2_accel.optim.muon import Muon

    muon = settings.optimizer == "muon"
    hidden = hidden_matrices(model) if muon else {}
    groups: list[dict[str, Any]] = [
        {"params": [], "muon": True},
        {"params": []},
        {"params": [], "weight_decay": 0.0},
    ]
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        number = 2 if parameter.ndim < 2 else 1
        if key in hidden:
            number = 0
        groups[number]["params"].append((key, parameter))
    groups = [group for group in groups if group["params"]]  # torch refuses an empty one
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.adam_eps,
        "weight_decay": settings.weight_decay,
    }
    if not muon:
        return torch.optim.AdamW(groups, **options, fused=True)
    stacked = {f"{n}.weight": m.stacked for n, m in model.named_modules() if hasattr(m, "stacked")}
    return Muon(groups, stacked, **options)


def hidden_matrices(model: "nn.Module") -> dict[str, "nn.Parameter"]:
    """Returns the parameters that Muon updates, by their names.

    They are all matrices except the embeddings and the output head, or `matrices_of_units` for a
    class of `transformers`.
    """
    from torch import nn

    units = getattr(model, "_no_split_modules", None)
    if units:
        return matrices_of_units(model, units)
    others = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others.add(id(getattr(model, "head_weight", None)))
    named = model.named_parameters()
    return {name: p for name, p in named if p.ndim >= 2 and id(p) not in others}


def matrices_of_units(model: "nn.Module", units: Collection[str]) -> dict[str, "nn.Parameter"]:
    """Returns the matrices in the modules whose class is one of `units`, by their names.

    They are the weights of linear layers and of experts, (experts, rows, columns), without the
    routers and gates of experts, and without adapters.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    left_out = ("gate", "router", "lora_A.default", "lora_B.default")
    insides: list[str] = []
    linear = set()
    for name, module in model.named_modules():
        if type(module).__name__ in units:
            insides.append(f"{name}.")
        if isinstance(module, (nn.Linear, Conv1D)) and not name.endswith(left_out):
            linear.add(f"{name}.weight")
    chosen = {}
    for name, parameter in model.named_parameters():
        matrix = name in linear or is_expert(name, parameter)
        if matrix and name.startswith(tuple(insides)):
            chosen[name] = parameter
    return chosen


def is_expert(name: str, parameter: "torch.Tensor") -> bool:
    """Whether a parameter holds a matrix for each expert, (experts, rows, columns)."""
    return parameter.ndim == 3 and "experts." in name

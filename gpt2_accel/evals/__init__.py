"""Evaluations. The ranks share the samples by index; each sample counts once."""

from collections.abc import Callable

# (accelerator, model, interrupted) -> {"TASK/METRIC": value}. All ranks call it. `interrupted` is
# called before each round of batches and must agree on all ranks; if True, the result is empty.
Evaluation = Callable[..., dict[str, float]]

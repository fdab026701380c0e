"""Skips non-finite and spiking updates; early stopping."""

import math
import statistics
from dataclasses import dataclass

MAX_BAD_STEPS = 5  # skipped updates in a row, after which the run has diverged
WINDOW = 100  # the last good updates, whose mean and standard deviation define a spike
# The fp16 gradient scaler starts at 2^16 and halves its scale at each overflow. After 50 in a row the scale cannot be
# the cause: the gradients themselves are not finite.
MAX_OVERFLOWS = 50


class Diverged(ValueError):
    """A run whose loss, gradients or weights are not finite. `status.json` names it, so that a study records the outcome."""


class AnomalyGuard:
    """Checks the loss and gradient norm of each update, both over all ranks.

    An update is bad if one of them is not finite. With `spike_z` above 0 it is also bad if one of them lies more than
    `spike_z` standard deviations above the mean of the last `WINDOW` good updates. `bad_in_a_row` counts the bad
    updates since the last good one.
    """

    def __init__(self, spike_z: float = 0.0):
        self.spike_z = spike_z
        self.bad_in_a_row = 0
        self.overflows_in_a_row = 0
        self.recent: dict[str, list[float]] = {"loss": [], "gradient norm": []}

    def check(self, loss: float, grad_norm: float, *, scaled: bool = False) -> str | None:
        """Returns what is wrong with an update; None if it is good.

        `scaled` means that the fp16 gradient scaler is in use. It skips updates with a non-finite gradient norm itself,
        to find its scale. Such an update is bad only after `MAX_OVERFLOWS` of them in a row.
        """
        values = {"loss": loss, "gradient norm": grad_norm}
        if scaled and not math.isfinite(grad_norm) and math.isfinite(loss):
            self.overflows_in_a_row += 1
            if self.overflows_in_a_row <= MAX_OVERFLOWS:
                return None
        else:
            self.overflows_in_a_row = 0
        for name, value in values.items():
            if problem := self._problem(name, value):
                self.bad_in_a_row += 1
                return problem
        self.bad_in_a_row = 0
        if self.spike_z:
            for name, value in values.items():
                self.recent[name] = [*self.recent[name], value][-WINDOW:]
        return None

    def _problem(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"the {name} is {value}"
        recent = self.recent[name]
        if self.spike_z and len(recent) == WINDOW:
            mean, deviation = statistics.fmean(recent), statistics.pstdev(recent)
            if value > mean + self.spike_z * deviation:
                return f"the {name} is {value:.4g}, after a mean of {mean:.4g} ± {deviation:.2g}"
        return None

    def state(self) -> dict:
        """Returns the state to save in a checkpoint."""
        return {"recent": dict(self.recent)}  # a checkpoint is written while training goes on

    def load(self, state: dict) -> None:
        """Restores the result of `state()`."""
        self.recent |= state.get("recent", {})


@dataclass
class EarlyStopping:
    """Counts evaluations in a row without a lower validation loss. `limit` of them end the run; 0 means never."""

    limit: int = 0
    waited: int = 0
    best: float | None = None

    def count(self, loss: float) -> None:
        """Counts an evaluation."""
        if self.best is None or loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1

    @property
    def ended(self) -> bool:
        """Whether early stopping has ended the run, also before a resume."""
        return self.limit > 0 and self.waited >= self.limit

    def state(self) -> dict:
        """Returns the state to save in a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def load(self, state: dict) -> None:
        """Restores the result of `state()`."""
        self.best, self.waited = state["best"], state["waited"]

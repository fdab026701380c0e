"""Skips updates that are not finite, and spikes."""

import math
import statistics
from dataclasses import dataclass, field

MAX_BAD_STEPS = 5  # skipped updates in a row, after which the run has diverged
# The fp16 gradient scaler starts at 2^16 and halves its scale at each overflow. After 50 in a row
# the scale cannot be the cause: the gradients themselves are not finite.
MAX_OVERFLOWS = 50
WINDOW = 100  # good updates whose mean and standard deviation define a spike


class Diverged(ValueError):
    """A run whose loss, gradients or weights are not finite.

    `status.json` names it, so that a study records the outcome.
    """


@dataclass
class AnomalyGuard:
    """Checks the loss and the gradient norm before clipping of each update, both over all ranks.

    An update is bad if one of them is not finite. With `spike_z` above 0 it is also bad if one of
    them exceeds the mean of the last `WINDOW` good updates by more than `spike_z` of their standard
    deviations. `recent` has the values of these updates by name; a checkpoint keeps it.
    `bad_in_a_row` counts the bad updates since the last good one.
    """

    spike_z: float = 0.0
    recent: dict[str, list[float]] = field(default_factory=dict)
    bad_in_a_row: int = 0
    overflows_in_a_row: int = 0

    def check(self, loss: float, grad_norm: float, *, scaled: bool = False) -> str | None:
        """Returns the problem with an update; None if it is good.

        `scaled` means that the fp16 gradient scaler is in use. To find its scale, it skips updates
        with a non-finite gradient norm itself. Such an update is bad only after `MAX_OVERFLOWS` of
        them in a row.
        """
        overflow = scaled and not math.isfinite(grad_norm) and math.isfinite(loss)
        self.overflows_in_a_row = self.overflows_in_a_row + 1 if overflow else 0
        if 0 < self.overflows_in_a_row <= MAX_OVERFLOWS:
            return None
        values = {"loss": loss, "gradient norm": grad_norm}
        for name, value in values.items():
            problem = self.problem(name, value)
            if problem is not None:
                self.bad_in_a_row += 1
                return problem
        self.bad_in_a_row = 0
        for name, value in values.items():
            self.recent[name] = [*self.recent.get(name, []), value][-WINDOW:]
        return None

    def problem(self, name: str, value: float) -> str | None:
        """Returns the problem with a value; None if it is good."""
        if not math.isfinite(value):
            return f"the {name} is {value}"
        recent = self.recent.get(name, [])
        if self.spike_z and len(recent) == WINDOW:
            mean = statistics.fmean(recent)
            deviation = statistics.pstdev(recent)
            if value > mean + self.spike_z * deviation:
                return f"the {name} is {value:.4g}, after a mean of {mean:.4g} (sd {deviation:.2g})"
        return None

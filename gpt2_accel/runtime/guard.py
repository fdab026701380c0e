"""Skips non-finite updates."""

import math
from dataclasses import dataclass

MAX_BAD_STEPS = 5  # skipped updates in a row, after which the run has diverged
# The fp16 gradient scaler starts at 2^16 and halves its scale at each overflow. After 50 in a row the scale cannot be
# the cause: the gradients themselves are not finite.
MAX_OVERFLOWS = 50


class Diverged(ValueError):
    """A run whose loss, gradients or weights are not finite. `status.json` names it, so that a study records the outcome."""


@dataclass
class AnomalyGuard:
    """Checks that the loss and gradient norm of each update, both over all ranks, are finite.

    `bad_in_a_row` counts the bad updates since the last good one.
    """

    bad_in_a_row: int = 0
    overflows_in_a_row: int = 0

    def check(self, loss: float, grad_norm: float, *, scaled: bool = False) -> str | None:
        """Returns what is wrong with an update; None if it is good.

        `scaled` means that the fp16 gradient scaler is in use. It skips updates with a non-finite gradient norm itself,
        to find its scale. Such an update is bad only after `MAX_OVERFLOWS` of them in a row.
        """
        overflow = scaled and not math.isfinite(grad_norm) and math.isfinite(loss)
        self.overflows_in_a_row = self.overflows_in_a_row + 1 if overflow else 0
        if 0 < self.overflows_in_a_row <= MAX_OVERFLOWS:
            return None
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                self.bad_in_a_row += 1
                return f"the {name} is {value}"
        self.bad_in_a_row = 0
        return None

"""Skips non-finite and spiking updates."""

import math
import statistics

WINDOW = 100  # good updates that a spike is measured against
# fp16's scaler halves its scale, 2^16 at first, at each overflow: after so many in a row the scale is far below
# any that helps, and the gradients themselves are not finite.
MAX_OVERFLOWS = 50


class AnomalyGuard:
    """Judges each update by its loss and gradient norm, both over all ranks.

    `spike_z`, if above 0, also refuses an update whose loss or gradient norm lies more than so many
    standard deviations above the mean of the last `WINDOW` good ones. `bad_in_a_row` counts the refused
    ones since the last good one.
    """

    def __init__(self, spike_z: float = 0.0):
        self.spike_z = spike_z
        self.bad_in_a_row = 0
        self.overflows_in_a_row = 0
        self.recent: dict[str, list[float]] = {"loss": [], "gradient norm": []}

    def check(self, loss: float, grad_norm: float, *, scaled: bool = False) -> str | None:
        """What is wrong with an update, None if it is good.

        With `scaled`, fp16's gradient scaler is at work: a norm that is not finite is its way to find the scale, and
        it skips such an update by itself. Only more than `MAX_OVERFLOWS` of them in a row are bad.
        """
        values = {"loss": loss, "gradient norm": grad_norm}
        if scaled and not math.isfinite(grad_norm) and math.isfinite(loss):
            self.overflows_in_a_row += 1
            if self.overflows_in_a_row <= MAX_OVERFLOWS:
                return None
        else:
            self.overflows_in_a_row = 0
        problem = next(
            (p for name, value in values.items() if (p := self._problem(name, value))), None
        )
        if problem is not None:
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
        """What a resume needs."""
        return {"recent": self.recent}

    def load(self, state: dict) -> None:
        """Takes `state()` of an earlier run."""
        self.recent |= state.get("recent", {})

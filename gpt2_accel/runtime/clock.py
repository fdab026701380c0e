"""The speed of training and the time left."""

import time
from collections.abc import Callable

from gpt2_accel.device import memory_gb
from gpt2_accel.estimate.flops import duration

# Updates that are timed for the estimate of the remaining time. The first update, which may compile, is not timed.
TIMED_UPDATES = 5


class TrainingClock:
    """Measures the training time, without evaluations, samples and checkpoints.

    `step` updates are done before, of `last_step`; `tokens_at(step)` is the number of tokens in the first `step`
    updates. `seconds` is the training time, including that before a resume. `flops_per_second` is the peak of all
    devices together, None if unknown. `device_type` is that whose memory is measured.
    """

    def __init__(
        self,
        step: int,
        last_step: int,
        tokens_at: Callable[[int], int],
        *,
        seconds: float = 0.0,
        flops_per_token: float,
        flops_per_second: float | None,
        device_type: str = "cpu",
    ):
        self.step = self._first_step = step
        self.last_step, self.tokens_at, self.seconds = last_step, tokens_at, seconds
        self.flops_per_token, self.flops_per_second = flops_per_token, flops_per_second
        self.device_type = device_type
        self._measured = (step, seconds)  # at the last call of `measure`
        self._timed_from = (step, seconds)  # at the first update
        self.resume()

    def resume(self) -> None:
        """Starts the clock again. It stands still from the end of an update until this call."""
        self._now = time.perf_counter()

    def advance(self, step: int) -> str | None:
        """Notes that `step` updates are done. Returns the estimate of the time left, once in a run."""
        now = time.perf_counter()
        self.seconds += now - self._now
        self.step, self._now = step, now
        done = step - self._first_step
        if done == 1:
            self._timed_from = (step, self.seconds)
        if done != 1 + TIMED_UPDATES or step == self.last_step:
            return None
        speed = self._speed_since(*self._timed_from)
        left = (self.tokens_at(self.last_step) - self.tokens_at(step)) / speed
        return f"expected: {duration(left)} of training, at {speed:,.0f} tokens/s"

    def measure(self) -> dict[str, float]:
        """Returns the speed since the last call, the training time in seconds, the memory, and the MFU if known."""
        speed = self._speed_since(*self._measured)
        self._measured = (self.step, self.seconds)
        found = {
            "tokens_per_second": speed,
            "seconds": round(self.seconds, 3),
            "memory_gb": round(memory_gb(self.device_type), 3),
        }
        if self.flops_per_second:
            found["mfu"] = speed * self.flops_per_token / self.flops_per_second
        return found

    def _speed_since(self, step: int, seconds: float) -> float:
        """Returns the tokens per second since an earlier step and training time."""
        return (self.tokens_at(self.step) - self.tokens_at(step)) / (self.seconds - seconds)

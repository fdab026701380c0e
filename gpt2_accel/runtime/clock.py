"""The speed of training."""

import time
from collections.abc import Callable

from gpt2_accel.device import memory_gb


class TrainingClock:
    """Measures the training time, without evaluations, samples and checkpoints.

    `step` updates are done before; `tokens_at(step)` is the number of tokens in the first `step`
    updates. `seconds` is the training time, including that before a resume. `flops_per_second` is the peak of all
    devices together, None if unknown. `device_type` is that whose memory is measured.
    """

    def __init__(
        self,
        step: int,
        tokens_at: Callable[[int], int],
        *,
        seconds: float = 0.0,
        flops_per_token: float,
        flops_per_second: float | None,
        device_type: str = "cpu",
    ):
        self.step, self.tokens_at, self.seconds = step, tokens_at, seconds
        self.flops_per_token, self.flops_per_second = flops_per_token, flops_per_second
        self.device_type = device_type
        self._measured = (step, seconds)  # at the last call of `measure`
        self.resume()

    def resume(self) -> None:
        """Starts the clock again. It stands still from the end of an update until this call."""
        self._now = time.perf_counter()

    def advance(self, step: int) -> None:
        """Notes that `step` updates are done."""
        now = time.perf_counter()
        self.seconds += now - self._now
        self.step, self._now = step, now

    def measure(self) -> dict[str, float]:
        """Returns the speed since the last call, the training time in seconds, the memory, and the MFU if known."""
        step, seconds = self._measured
        tokens = self.tokens_at(self.step) - self.tokens_at(step)
        speed = tokens / (self.seconds - seconds)
        self._measured = (self.step, self.seconds)
        found = {
            "tokens_per_second": speed,
            "seconds": round(self.seconds, 3),
            "memory_gb": round(memory_gb(self.device_type), 3),
        }
        if self.flops_per_second:
            found["mfu"] = speed * self.flops_per_token / self.flops_per_second
        return found

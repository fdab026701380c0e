"""Shows the progress of a run: a progress bar on a terminal, plain lines in a pipe or file."""

import sys
import time

from tqdm import tqdm

from gpt2_accel.estimate.flops import duration

PAUSE = 15.0  # least seconds between plain lines


class Progress:
    """A progress bar that follows the terminal's width. If stderr is a pipe or a file: a line every `PAUSE` seconds.

    `done` of `total` updates are done before. Prints nothing unless `enabled`.
    """

    def __init__(self, done: int, total: int, *, enabled: bool = True):
        self.done, self.total, self.enabled = done, total, enabled
        self._bar = tqdm(
            initial=done,
            total=total,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5,
            disable=not (enabled and sys.stderr.isatty()),
        )
        self._first, self._start = done, time.monotonic()
        self._next_line = 0.0

    def advance(self) -> None:
        """Notes that one more update is done."""
        self.done += 1
        self._bar.update()

    def show(self, step: int, figures: dict[str, str]) -> None:
        """Shows the figures of update `step`, name -> formatted value, beside the bar."""
        self._bar.set_postfix({"at": step, **figures}, refresh=False)
        now = time.monotonic()
        if self.enabled and self._bar.disable and now >= self._next_line:
            self._next_line = now + PAUSE
            rate = (self.done - self._first) / max(now - self._start, 1e-9)
            left = duration((self.total - self.done) / rate) if rate else "unknown time"
            shown = ", ".join(f"{name} {figure}" for name, figure in figures.items())
            line = f"step {self.done}/{self.total} ({self.done / self.total:.0%}): {shown}, {left} left"
            print(line, file=sys.stderr, flush=True)

    def print_line(self, text: str) -> None:
        """Prints a line above the bar."""
        if self.enabled:
            self._bar.write(text)
            sys.stdout.flush()  # keeps the order with stderr if both go to one pipe

    def close(self) -> None:
        """Ends the bar, which stays on the terminal."""
        self._bar.close()

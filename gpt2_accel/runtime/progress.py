"""Shows a run on the terminal: a progress bar, or plain lines in a pipe or file."""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

from gpt2_accel.estimate.flops import duration
from gpt2_accel.progress import PAUSE
from gpt2_accel.runtime.log import Sink

# The figures that every run logs; the terminal shows any other one by its name.
FIGURES = {
    f"train/{name}"
    for name in [
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "seconds",
        "memory_gb",
        "mfu",
    ]
}


class Terminal(Sink):
    """A progress bar that follows the terminal's width. If stderr is a pipe or a file: a line every `PAUSE` seconds.

    A context manager around the run's loop. `done` of `total` updates are done before.
    """

    def __init__(self, done: int, total: int):
        self._done, self._total = done, total
        self._bar = tqdm(
            initial=done,
            total=total,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5,
            disable=not sys.stderr.isatty(),
        )
        self._timed_from: tuple[int, float] | None = (
            None  # after the first update, which may compile
        )
        self._next_line = 0.0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_) -> None:
        """Ends the bar, which stays on the terminal."""
        self._bar.close()

    def advance(self, step: int) -> None:
        self._bar.update(step - self._done)
        self._done = step
        self._timed_from = self._timed_from or (step, time.monotonic())

    def write(self, line: dict) -> None:
        """Shows the figures of a training update beside the bar."""
        if "train/loss" not in line:
            return
        shown = {
            "loss": f"{line['train/loss']:.3f}",
            "lr": f"{line['train/learning_rate']:.1e}",
            "tok/s": f"{line['train/tokens_per_second']:,.0f}",
        }
        if "train/mfu" in line:
            shown["mfu"] = f"{line['train/mfu']:.1%}"
        own = (name for name in line if name.startswith("train/") and name not in FIGURES)
        shown |= {name.removeprefix("train/"): f"{line[name]:.4g}" for name in own}
        self._bar.set_postfix({"at": line["step"], **shown}, refresh=False)
        now = time.monotonic()
        if self._bar.disable and now >= self._next_line:
            self._next_line = now + PAUSE
            figures = ", ".join(f"{name} {figure}" for name, figure in shown.items())
            text = f"step {self._done}/{self._total} ({self._done / self._total:.0%}): {figures}"
            if self._timed_from and self._done > self._timed_from[0] + 1:
                first, start = self._timed_from
                seconds = (now - start) / (self._done - first) * (self._total - self._done)
                text += f", {duration(seconds)} left"
            print(text, file=sys.stderr, flush=True)

    def sample(self, sample: dict) -> None:
        self.print_line(f"step {sample['step']}: sample\n{sample['text']}\n")

    def print_line(self, text: str) -> None:
        """Prints a line above the bar."""
        self._bar.write(text)
        sys.stdout.flush()  # keeps the order with stderr if both go to one pipe


@contextmanager
def lasting_output() -> Iterator[None]:
    """In the block, and later at the end of the process, stdout and stderr may be gone: a closed terminal or pipe raises
    no error."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stdout, sys.stderr = lasting = [LastingStream(stream or nowhere) for stream in before]
        try:
            yield
        finally:
            for stream in lasting:
                stream.flush()
            sys.stdout, sys.stderr = before


class LastingStream:
    """A text stream whose writes raise no `OSError`. When its terminal or pipe is gone, the rest goes to /dev/null."""

    def __init__(self, stream: Any):
        self._stream = stream
        with suppress(AttributeError, OSError):
            stream.reconfigure(errors="backslashreplace")  # for a terminal that is not UTF-8

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text; returns its length."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)

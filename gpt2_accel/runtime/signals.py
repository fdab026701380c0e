"""When a run has to stop before its end: signals, and the hours it was given."""

import ctypes
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
GRACE = 15.0  # seconds after a signal in which the process ends; launchers and schedulers kill it after 30
ECHO = 0.5  # seconds in which a second signal is the first: Slurm signals all, and the launcher passes its own on
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class StopRequest:
    """Notes that the run is to stop; a context manager around its loop.

    `reason` is None, or the signal that came (SIGTERM, SIGINT, SIGUSR1), or `max_hours` once that many
    hours have passed since the start. A second Ctrl-C raises `KeyboardInterrupt` at once.
    """

    def __init__(self, max_hours: float | None = None):
        self._ends = None if max_hours is None else time.monotonic() + max_hours * 3600
        self._signal: str | None = None
        self._came = math.inf  # when the signal came
        self._insisted = False  # a second one came
        self._handlers: dict[int, object] = {}

    @property
    def reason(self) -> str | None:
        if self._signal is None and self._ends is not None and time.monotonic() >= self._ends:
            return "max_hours"
        return self._signal

    @property
    def seconds_left(self) -> float:
        """How long the run may wait for something that it can do without: `GRACE` from the signal on, not at all
        after a second one."""
        return 0.0 if self._insisted else max(0.0, self._came + GRACE - time.monotonic())

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                if number := getattr(signal, name, None):
                    self._handlers[number] = signal.signal(number, self._note)
        die_with_launcher()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _) -> None:
        if self._signal is None:
            self._signal, self._came = signal.Signals(number).name, time.monotonic()
            return
        if time.monotonic() < self._came + ECHO:
            return
        self._insisted = True
        if number == signal.SIGINT and self._signal == "SIGINT":
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # a third must not cut short what it ends with
            raise KeyboardInterrupt


def die_with_launcher() -> None:
    """Has Linux send SIGTERM to this process when its launcher dies.

    With one process, `accelerate launch` does not pass a signal on, but dies of it. Only for a parent
    that is such a launcher: a shell that ends must not stop the run.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return
    if b"accelerate" in command or b"torchrun" in command or b"torch.distributed" in command:
        end_with_parent(signal.SIGTERM)


def end_with_parent(number: signal.Signals) -> None:
    """Has Linux send the signal to this process when its parent dies; elsewhere does nothing."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)

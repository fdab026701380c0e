"""Ends a run early, by a signal or `max_hours`; keeps it alive when its terminal is gone."""

import ctypes
import errno
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGHUP,
    signal.SIGXCPU,
    signal.SIGQUIT,
)
# From a signal to the end of the process; launchers and schedulers kill it after 30 seconds.
SECONDS_TO_STOP = 15.0
# Seconds within which a second signal counts as the same one: Slurm signals all processes, and the
# launcher forwards its own signal.
ECHO = 0.5
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Accelerate's and torch's launchers set these in each process that they start.
LAUNCHERS = {"ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID"}
DRIVER = "GPT2_ACCEL_DRIVER"  # the variable with the process id of the study that started this one
exit_code = 0  # this process ends with it; the signal that stopped its run sets it


class StopRequest:
    """Records that a run has to stop; a context manager around its loop.

    `reason` is None, the first signal of `SIGNALS`, `max_hours` after that many hours, or the
    reason of a `request`. A second Ctrl-C raises `KeyboardInterrupt`. SIGHUP, which the end of a
    terminal sends, stays ignored under `nohup`.
    """

    def __init__(self, max_hours: float | None = None):
        self._ends = math.inf if max_hours is None else time.monotonic() + max_hours * 3600
        self._signal: str | None = None
        self._requested: str | None = None
        self._received = math.inf  # time of the first signal, -infinity after a second
        self._handlers: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        if self._signal is None and time.monotonic() >= self._ends:
            return "max_hours"
        return self._signal or self._requested

    @property
    def requeue(self) -> bool:
        """Whether the run should be started again: not after Ctrl-C or a callback's request."""
        return self._requested is None and self._signal != "SIGINT"

    def request(self, reason: str) -> None:
        """Ends the run because of `reason`, unless it already has one."""
        self._requested = self._requested or reason

    @property
    def exit_code(self) -> int:
        """128 plus the number of the signal, as in shells; 0 after `max_hours`.

        Also 0 under a launcher, which would report another code as a failure and restart the run.
        """
        if self._signal is None or launched():
            return 0
        return 128 + signal.Signals[self._signal]

    @property
    def seconds_left(self) -> float:
        """The seconds that optional waits may still take.

        Infinite before a signal, `SECONDS_TO_STOP` at the first signal, 0 after a second one.
        """
        return max(0.0, self._received + SECONDS_TO_STOP - time.monotonic())

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._note)
        die_with_launcher()
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        if self._signal is None:
            self._received = time.monotonic()
            self._signal = signal.Signals(number).name
            if is_first():
                with suppress(OSError):  # print could be interrupted by this handler
                    os.write(2, f"{self._signal}: the run stops after this update\n".encode())
            return
        if time.monotonic() < self._received + ECHO:
            return
        self._received = -math.inf
        if number == signal.SIGINT and self._signal == "SIGINT":
            # A third Ctrl-C must not interrupt the cleanup.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt


def launched() -> bool:
    """Whether a launcher started this process."""
    return not LAUNCHERS.isdisjoint(os.environ)


def is_first(variable: str = "LOCAL_RANK") -> bool:
    """Whether this is the first process of its machine, or by `RANK` of its launch.

    Without a launcher the variable is from elsewhere, and does not count.
    """
    return not launched() or os.environ.get(variable, "0") == "0"


def die_with_launcher() -> None:
    """On Linux, ends this process (SIGTERM) when its launcher or the study that started it dies.

    With one process, `accelerate launch` dies of a signal without forwarding it. Does nothing
    without a launcher or a study: the end of a shell must not stop the run.
    """
    if launched() or os.environ.get(DRIVER) == str(os.getppid()):
        end_with_parent(signal.SIGTERM)


def end_with_parent(number: signal.Signals) -> None:
    """On Linux, makes the kernel send the signal `number` to this process when its parent dies."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Ignores a closed stdout or stderr, in the block and at the end of the process.

    Other errors, such as a full disk, are printed once.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        lasting = [LastingStream(stream or nowhere) for stream in before]
        sys.stdout, sys.stderr = lasting
        try:
            yield
        finally:
            for stream in lasting:
                stream.flush(last=True)
            sys.stdout, sys.stderr = before


class LastingStream:
    """A text stream whose writes raise no `OSError`.

    When its terminal or pipe is gone, the rest goes to /dev/null.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self._reported = False
        with suppress(AttributeError, OSError):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not be UTF-8

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text; returns its length."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self, last: bool = False) -> None:
        """Writes the buffered text; the `last` time drops what cannot be written."""
        self._try(self._stream.flush, last=last)

    def _try(self, action: Callable, *arguments: str, last: bool = False) -> None:
        try:
            action(*arguments)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                last = True
            elif not self._reported:
                self._reported = True
                print(f"output cannot be written: {error.strerror}", file=sys.stderr)
            if last:
                with open(os.devnull, "w") as null:
                    os.dup2(null.fileno(), self._stream.fileno())

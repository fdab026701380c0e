"""Claims of runs on a disk that several processes share, which may be on several machines: who trains what.

A claim is a file `claim-<n>` in the run's folder. It is created under its final name with its content, which succeeds for one
process only. Its holder renews its time. If that stops, another process creates `claim-<n+1>`, and the holder of `claim-<n>`,
should it still be there, finds it and stops without a record. `flock`, which the training loop uses for its folder, may not
reach across machines.
"""

import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

HEARTBEAT = 10.0  # seconds between renewals
# Seconds without one after which a claim is stale. Network file systems show other machines' times up to a minute late.
SILENCE = 180.0


class Claim:
    """A claim of this process on the run in `folder`."""

    def __init__(self, path: Path):
        self.path = path
        self.next = path.with_name(f"claim-{number_of(path) + 1}")

    def renew(self) -> None:
        """Shows the others that this process still trains the run."""
        with suppress(FileNotFoundError):  # the folder was removed: the run ends by itself
            os.utime(self.path)

    def superseded(self) -> bool:
        """Whether another process has taken the run."""
        return self.next.exists()

    def release(self) -> None:
        """Lets others take the run immediately."""
        with suppress(FileNotFoundError):
            os.truncate(self.path, 0)


def claim(folder: Path) -> Claim | None:
    """Claims the run in `folder` for this process. Returns None if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(folder.glob("claim-*"), key=number_of, default=None)
    if newest is not None and not is_stale(newest):
        return None
    path = folder / f"claim-{number_of(newest) + 1 if newest else 1}"
    content, name = tempfile.mkstemp(prefix=".claim-", dir=folder)
    with open(content, "w", encoding="utf-8") as file:
        file.write(own_name())
    try:
        os.link(name, path)
    except FileExistsError:
        return None
    finally:
        os.unlink(name)
    return Claim(path)


def holder(folder: Path) -> str:
    """Returns the name of the process that has claimed the run in `folder`; empty if there is none."""
    newest = max(folder.glob("claim-*"), key=number_of, default=None)
    with suppress(OSError):
        return newest.read_text(encoding="utf-8") if newest else ""
    return ""


def is_stale(path: Path) -> bool:
    """Whether a claim's holder has released it or has died: on this machine if there is no such process, on another if it
    was silent for `SILENCE` seconds by the clock of the file server."""
    try:
        name = path.read_text(encoding="utf-8")
        gone = name.endswith(f" on {socket.gethostname()}") and not is_running(name)
        silence = file_server_time(path.parent) - path.stat().st_mtime
    except FileNotFoundError:
        return True
    return not name or gone or silence > SILENCE


def file_server_time(folder: Path) -> float:
    """Returns the time that the file system of `folder` gives a new file, in seconds since 1970."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def number_of(path: Path) -> int:
    """Returns the number in a claim's name."""
    return int(path.name.rpartition("-")[2])


def own_name() -> str:
    """Returns the name of this process in a claim."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def is_running(name: str) -> bool:
    """Whether `name`, `process PID on HOST`, is another running process of this machine."""
    words = name.split()
    if len(words) != 4 or words[3] != socket.gethostname() or not words[1].isdigit():
        return False
    return int(words[1]) != os.getpid() and psutil.pid_exists(int(words[1]))

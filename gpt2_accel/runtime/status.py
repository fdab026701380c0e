"""`status.json`: what a run is doing, with a heartbeat, and whether to start it again."""

import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

from gpt2_accel.files import write_json
from gpt2_accel.runtime.log import Sink
from gpt2_accel.runtime.processes import peer_failed
from gpt2_accel.runtime.signals import StopRequest

HEARTBEAT = (
    30.0  # seconds between writes of `status.json` during a run, far less than `find.SILENCE`
)


class Status(Sink):
    """Writes `status.json` of a run; a context manager around its loop. `step` updates are done before.

    It has the `state` (`running`, `finished`, `stopped` or `failed`), the `reason`, the `step`, the `time` of the last
    heartbeat, and `requeue`: whether the same command, started again, would continue the run. It is true for `running`
    (if its process is gone, it was killed) and `stopped`, unless by Ctrl-C, and for `failed` if `stop` has a reason or another process was
    lost after some progress.
    """

    def __init__(self, run_dir: str | Path, step: int, stop: StopRequest):
        self._path, self._stop = Path(run_dir) / "status.json", stop
        self._step = self._first_step = step
        self._state = {"state": "running", "reason": "", "requeue": True}
        self._writing, self._ended = threading.Lock(), threading.Event()

    def __enter__(self) -> "Status":
        self._write()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        if kind is not None and not self._ended.is_set():  # an error after the end does not count
            if issubclass(kind, KeyboardInterrupt):
                self._end("stopped", "SIGINT, twice", requeue=False)
            else:
                progress = self._step > self._first_step
                requeue = progress if peer_failed(error) else self._stop.reason is not None
                self._end("failed", f"{kind.__name__}: {error}", requeue=requeue)
        self._ended.set()

    def advance(self, step: int) -> None:
        self._step = step

    def finished(self) -> None:
        """Writes that the run is complete and its final model is written."""
        self._end("finished", "", requeue=False)

    def stopped(self, reason: str) -> None:
        """Writes that the run ends before it is complete."""
        self._end("stopped", reason, requeue=reason != "SIGINT")

    def _end(self, state: str, reason: str, *, requeue: bool) -> None:
        """Writes the final status immediately: the process may have little time left."""
        self._ended.set()
        self._state = {"state": state, "reason": reason, "requeue": requeue}
        self._write()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            self._write()

    def _write(self) -> None:
        with self._writing:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            try:
                write_json(self._path, {**self._state, "step": self._step, "time": now})
            except OSError as failure:  # for example a full disk; must not hide why the run ended
                print(f"could not write {self._path}: {failure}", file=sys.stderr)

"""Logs a run to the terminal, `metrics.jsonl`, `samples.jsonl` and `status.json`."""

import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpt2_accel.device import memory_gb
from gpt2_accel.estimate.flops import duration
from gpt2_accel.files import JsonLines, parse_json, read_json_lines, write_json
from gpt2_accel.runtime.processes import peer_failed
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.runtime.signals import StopRequest

# Updates that are timed for the estimate of the remaining time. The first update, which may compile, is not timed.
TIMED_UPDATES = 5
HEARTBEAT = 30.0  # seconds between writes of `status.json` during a run
SILENCE = timedelta(minutes=3)  # a running run without a heartbeat for this long was killed


class RunLog:
    """Writes the logs of a run to its folder and the terminal; a context manager around its loop.

    `first_step` is the number of updates done before, `tokens_at(step)` the tokens of the first `step` updates, and
    `flops_per_second` the peak of all devices together, None if unknown. `enabled` is False on all ranks but the main
    process; then nothing is written.

    `status.json` has the `state` (`running`, `finished`, `stopped` or `failed`), the `reason`, the `time` of the last
    heartbeat, and `requeue`: whether the same command, started again, would continue the run. It is true for `running`
    (a run without a process was killed) and `stopped`, and for `failed` if `stop` has a reason or another process was
    lost after some progress.

    `publish`, if set, is called with each line before it is written to `metrics.jsonl`. `results` has the newest
    evaluations, `evaluated` the update of each, and `seconds` the training time, including that before a resume.
    """

    publish: Callable[[dict], None] | None = None

    def __init__(
        self,
        run_dir: str | Path,
        *,
        first_step: int,
        max_steps: int,
        tokens_at: Callable[[int], int],
        flops_per_token: float,
        flops_per_second: float | None,
        stop: StopRequest,
        device_type: str = "cpu",
        enabled: bool = True,
    ):
        self.run_dir, self.enabled = Path(run_dir), enabled
        self.step = self._first_step = first_step
        self.max_steps, self.stop = max_steps, stop
        self.tokens_at, self.flops_per_token = tokens_at, flops_per_token
        self.flops_per_second, self.device_type = flops_per_second, device_type
        self._entry: dict[str, float] = {}
        self._training_tokens, self._training_seconds = 0, 0.0
        self.results: dict[str, float] = {}
        self.evaluated: dict[str, int] = {}
        self.seconds = 0.0
        self._status = {"state": "running", "reason": "", "requeue": True}
        self._writing, self._ended = threading.Lock(), threading.Event()
        if enabled:
            self._metrics = JsonLines(self.run_dir / "metrics.jsonl", first_step)
            self._recall(read_json_lines(self.run_dir / "metrics.jsonl"))
            self._samples = JsonLines(self.run_dir / "samples.jsonl", first_step)

    def __enter__(self) -> "RunLog":
        self._write_status()
        if self.enabled:
            threading.Thread(target=self._beat, daemon=True).start()
        self._progress = Progress(self.step, self.max_steps, enabled=self.enabled)
        self._clock = time.perf_counter()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        self._progress.close()
        if (
            kind is not None and not self._ended.is_set()
        ):  # an error after the end does not change the status
            if issubclass(kind, KeyboardInterrupt):
                self._end("stopped", "SIGINT, twice", requeue=True)
            else:
                lost = peer_failed(error) and self.step > self._first_step
                requeue = lost or self.stop.reason is not None
                self._end("failed", f"{kind.__name__}: {error}", requeue=requeue)
        self._ended.set()
        if self.enabled:
            self._metrics.close()
            self._samples.close()

    def advance(self, step: int) -> None:
        """Notes that `step` updates are done, and moves the progress bar."""
        self._training_tokens += self.tokens_at(step) - self.tokens_at(self.step)
        self.step = step
        self._progress.advance()
        self._add_training_time()
        self._estimate()

    def training(self, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Logs the last update, and the training speed since the last call."""
        self._add_training_time()
        speed = self._training_tokens / self._training_seconds
        self.seconds += self._training_seconds
        self._training_tokens = self._training_seconds = 0
        self._entry |= {
            "train/loss": loss,
            "train/grad_norm": grad_norm,
            "train/learning_rate": learning_rate,
            "train/tokens_per_second": speed,
            "train/seconds": round(self.seconds, 3),
            "train/memory_gb": round(memory_gb(self.device_type), 3),
        }
        shown = {"loss": f"{loss:.3f}", "lr": f"{learning_rate:.1e}", "tok/s": f"{speed:,.0f}"}
        if self.flops_per_second:
            mfu = speed * self.flops_per_token / self.flops_per_second
            self._entry["train/mfu"] = mfu
            shown["mfu"] = f"{mfu:.1%}"
        self._progress.show(self.step, shown)

    def skipped(self, problem: str, samples: list) -> None:
        """Logs that the last update was skipped because of `problem`, and the samples that it read."""
        self._entry |= {"skipped": problem, "samples": samples}
        shown = f"{samples[:8]}" + (" and more, see metrics.jsonl" if len(samples) > 8 else "")
        self.print_line(f"skipped because {problem}; samples {shown}")

    def finished(self) -> None:
        """Writes to `status.json` that the run is complete and its final model is written."""
        self._end("finished")

    def stopped(self, reason: str) -> None:
        """Writes to `status.json` that the run ends before it is complete."""
        self._end("stopped", reason, requeue=True)
        self.print_line(f"stopped ({reason}); continue with --resume_from latest")

    def at_this_step(self, name: str) -> float | None:
        """Returns a figure of the last update; None if it was not logged."""
        return self._entry.get(name)

    def evaluation(self, results: dict[str, float]) -> None:
        """Logs and prints the results of an evaluation."""
        if not results:  # interrupted
            return
        self._entry |= results
        self.results |= results
        self.evaluated |= dict.fromkeys(results, self.step)
        self.print_line(in_words(results))

    def sample(self, prompt: str, text: str) -> None:
        """Writes a sample to `samples.jsonl` and prints it."""
        if self.enabled:
            self._samples.write({"step": self.step, "prompt": prompt, "text": text})
        self.print_line(f"sample\n{text}\n")

    def print_line(self, text: str) -> None:
        """Prints a line above the progress bar."""
        self._progress.print_line(f"step {self.step}: {text}")

    def end_step(self) -> None:
        """Writes one line of `metrics.jsonl` if anything was logged since the last call."""
        if self.enabled and self._entry:
            line = {"step": self.step, "tokens": self.tokens_at(self.step), **self._entry}
            if self.publish is not None:
                self.publish(line)
            self._metrics.write(line)
        self._entry = {}
        self._clock = time.perf_counter()

    def _recall(self, entries: list[dict]) -> None:
        """Restores training time and results from the lines before a resume."""
        for entry in entries:
            self.seconds = entry.get("train/seconds", self.seconds)
            found = {
                name: value
                for name, value in entry.items()
                if "/" in name and not name.startswith("train/") and value is not None
            }
            self.results |= found
            self.evaluated |= dict.fromkeys(found, entry["step"])

    def _estimate(self) -> None:
        """Prints an estimate of the remaining training time, once."""
        done, seconds = self.step - self._first_step, self.seconds + self._training_seconds
        if done == 1:
            self._timed_from = self.tokens_at(self.step), seconds
        elif done == 1 + TIMED_UPDATES:
            tokens, before = self._timed_from
            speed = (self.tokens_at(self.step) - tokens) / (seconds - before)
            left = (self.tokens_at(self.max_steps) - self.tokens_at(self.step)) / speed
            self.print_line(f"expected: {duration(left)} of training, at {speed:,.0f} tokens/s")

    def _add_training_time(self) -> None:
        now = time.perf_counter()
        self._training_seconds += now - self._clock
        self._clock = now

    def _end(self, state: str, reason: str = "", *, requeue: bool = False) -> None:
        """Writes the final status immediately: the process may have little time left."""
        self._ended.set()
        self._status = {"state": state, "reason": reason, "requeue": requeue}
        self._write_status()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            self._write_status()

    def _write_status(self) -> None:
        if not self.enabled:
            return
        with self._writing:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            status = {**self._status, "step": self.step, "time": now}
            try:
                write_json(self.run_dir / "status.json", status)
            except OSError as failure:  # for example a full disk; must not hide why the run ended
                print(f"could not write {self.run_dir}/status.json: {failure}", file=sys.stderr)


def in_words(results: dict[str, float]) -> str:
    """Formats the results of an evaluation as one line, each with its standard error if there is one."""
    errors = {name: f" ± {results[name]:.4f}" for name in results if name.endswith("_stderr")}
    return ", ".join(
        f"{name} {value:.4f}{errors.get(f'{name}_stderr', '')}"
        for name, value in results.items()
        if name not in errors
    )


def read_status(run_dir: Path) -> dict:
    """Reads a run's `status.json`; an empty dict if it is missing or damaged. A `running` state without a heartbeat for
    `SILENCE` becomes `killed`."""
    try:
        status = parse_json((run_dir / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(status, dict):
        return {}
    try:
        silent = datetime.now(UTC) - datetime.fromisoformat(status["time"])
    except (KeyError, TypeError, ValueError):  # written by an older release
        return status
    if status.get("state") == "running" and silent > SILENCE:
        status |= {"state": "killed", "reason": f"no heartbeat since {status['time']}"}
    return status

"""Logs of a run: the terminal, `metrics.jsonl`, `samples.jsonl` and `status.json`."""

import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpt2_accel.device import memory_gb
from gpt2_accel.files import JsonLines, parse_json, read_json_lines, write_json
from gpt2_accel.runtime.processes import lost_another
from gpt2_accel.runtime.progress import Progress, duration
from gpt2_accel.runtime.signals import StopRequest

TIMED_UPDATES = (
    5  # from which the time of a run is estimated; the first, which may compile, is not among them
)
HEARTBEAT = 30.0  # seconds between two writes of `status.json` while a run goes on
SILENCE = timedelta(minutes=3)  # after which a run that says that it goes on was killed


class RunLog:
    """What one run writes to its folder and to the terminal. As a context manager it keeps
    `status.json`: `running`, with the time of the last sign of life, then `finished`, `stopped` or `failed`; the reason;
    and by `requeue` whether the same command, started again, would go on.

    A run that is `running` is to be started again once its process is gone: it was killed. A failed one is if a signal
    had come, or if another process was lost after some progress. `stop` knows of signals. `first_step` is the number of updates done before, `tokens_at` gives the tokens seen in so many updates.
    `flops_per_second` is the peak of all devices together, None if unknown. On other ranks than the first, `enabled` is
    False and nothing happens.

    Each line of `metrics.jsonl` first goes to `publish`, if set: a function of the line.

    `results` holds the newest evaluations, `evaluated` the update of each, `seconds` the time of training, that before a resume included.
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
        ):  # what comes after the end does not undo it
            if issubclass(kind, KeyboardInterrupt):
                self._end("stopped", "SIGINT, twice", requeue=True)
            else:
                lost = lost_another(error) and self.step > self._first_step
                requeue = lost or self.stop.reason is not None
                self._end("failed", f"{kind.__name__}: {error}", requeue=requeue)
        self._ended.set()
        if self.enabled:
            self._metrics.close()
            self._samples.close()

    def advance(self, step: int) -> None:
        """Moves the progress bar: `step` updates are done."""
        self._training_tokens += self.tokens_at(step) - self.tokens_at(self.step)
        self.step = step
        self._progress.advance()
        self._add_training_time()
        self._estimate()

    def training(self, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Adds the figures of the update just done, and the speed of training since the last call."""
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
        """Adds that the update just done left the weights alone, and which samples it had read."""
        self._entry |= {"skipped": problem, "samples": samples}
        shown = f"{samples[:8]}" + (" and more, see metrics.jsonl" if len(samples) > 8 else "")
        self.say(f"skipped, since {problem}; samples {shown}")

    def finished(self) -> None:
        """Notes that the run is complete, its final model included."""
        self._end("finished")

    def stopped(self, reason: str) -> None:
        """Notes that the run ends here though it is not finished."""
        self._end("stopped", reason, requeue=True)
        self.say(f"stopped ({reason}); continue with --resume_from latest")

    def at_this_step(self, name: str) -> float | None:
        """A figure of the update just done, None if it has none."""
        return self._entry.get(name)

    def evaluation(self, results: dict[str, float]) -> None:
        """Adds the results of an evaluation and prints them."""
        if not results:  # it was interrupted
            return
        self._entry |= results
        self.results |= results
        self.evaluated |= dict.fromkeys(results, self.step)
        self.say(in_words(results))

    def sample(self, prompt: str, text: str) -> None:
        """Writes a sample to `samples.jsonl` and prints it."""
        if self.enabled:
            self._samples.write({"step": self.step, "prompt": prompt, "text": text})
        self.say(f"sample\n{text}\n")

    def say(self, text: str) -> None:
        """Prints above the progress bar."""
        self._progress.say(f"step {self.step}: {text}")

    def end_step(self) -> None:
        """Writes what was added since the last update as one line of `metrics.jsonl`."""
        if self.enabled and self._entry:
            line = {"step": self.step, "tokens": self.tokens_at(self.step), **self._entry}
            if self.publish is not None:
                self.publish(line)
            self._metrics.write(line)
        self._entry = {}
        self._clock = time.perf_counter()

    def _recall(self, entries: list[dict]) -> None:
        """Takes over what the lines before a resume say."""
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
        """Prints, once, how long the rest of the training will take at the measured speed."""
        done, seconds = self.step - self._first_step, self.seconds + self._training_seconds
        if done == 1:
            self._timed_from = self.tokens_at(self.step), seconds
        elif done == 1 + TIMED_UPDATES:
            tokens, before = self._timed_from
            speed = (self.tokens_at(self.step) - tokens) / (seconds - before)
            left = (self.tokens_at(self.max_steps) - self.tokens_at(self.step)) / speed
            self.say(f"expected: about {duration(left)} of training, at {speed:,.0f} tokens/s")

    def _add_training_time(self) -> None:
        now = time.perf_counter()
        self._training_seconds += now - self._clock
        self._clock = now

    def _end(self, state: str, reason: str = "", *, requeue: bool = False) -> None:
        """Writes how the run ended, at once: there may be little time left."""
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
            except OSError as failure:  # such as a full disk, which must not hide why a run ended
                print(f"could not write {self.run_dir}/status.json: {failure}", file=sys.stderr)


def in_words(results: dict[str, float]) -> str:
    """The results of an evaluation in a line, each with its standard error."""
    errors = {name: f" ± {results[name]:.4f}" for name in results if name.endswith("_stderr")}
    return ", ".join(
        f"{name} {value:.4f}{errors.get(f'{name}_stderr', '')}"
        for name, value in results.items()
        if name not in errors
    )


def read_status(run_dir: Path) -> dict:
    """A run's `status.json`, empty if it is missing or damaged. The state of a run that says that it goes on, but has
    written nothing for `SILENCE`, is `killed`."""
    try:
        status = parse_json((run_dir / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(status, dict):
        return {}
    try:
        silent = datetime.now(UTC) - datetime.fromisoformat(status["time"])
    except (KeyError, TypeError, ValueError):  # of an older release
        return status
    if status.get("state") == "running" and silent > SILENCE:
        status |= {"state": "killed", "reason": f"no sign of life since {status['time']}"}
    return status

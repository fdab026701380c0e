"""The log of a run: measures the training, and hands the metrics of each update to sinks: files, terminal, `status.json`.

The trackers are one more sink, in `trackers.py`.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

from gpt2_accel.device import memory_gb
from gpt2_accel.files import JsonLines, write_json
from gpt2_accel.progress import Progress
from gpt2_accel.runtime.processes import peer_failed
from gpt2_accel.runtime.signals import StopRequest

# Seconds between writes of `status.json` during a run, far less than `find.SILENCE`.
HEARTBEAT = 30.0
# The figures that every run logs; the terminal shows any other one by its name.
FIGURES = {
    f"train/{name}"
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "seconds", "memory_gb")
} | {"train/mfu"}


class Sink:
    """A place where the log goes. A subclass overrides the methods that it needs; `RunContext` opens it.

    Only the main process has sinks. An exception in a sink ends the run. A sink that keeps what it gets drops what is
    later than the step from which the run resumes.
    """

    def advance(self, step: int) -> None:
        """Notes that `step` updates are done."""

    def write(self, line: dict) -> None:
        """Takes the metrics of an update, with its `step` and `tokens`; `skipped` and `samples` are no numbers."""

    def sample(self, sample: dict) -> None:
        """Takes a sample: `step`, `prompt` and `text`."""

    def print_line(self, text: str) -> None:
        """Takes a line for the user, also from a thread that writes or uploads a checkpoint."""


class RunLog:
    """Logs a run to `sinks`, and measures the training time, without evaluations, samples and checkpoints.

    `step` updates are done before, and `earlier` are the lines of `metrics.jsonl` before a resume; `tokens_at(step)` is
    the number of tokens in the first `step` updates. `flops_per_second` is the peak of all devices together, None if
    unknown; `device_type` is that whose memory is measured.

    `seconds` is the training time, including that before a resume. `results` has the newest evaluations and `evaluated`
    the update of each.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        step: int,
        tokens_at: Callable[[int], int],
        *,
        flops_per_token: float,
        flops_per_second: float | None,
        device_type: str = "cpu",
        earlier: Iterable[dict] = (),
    ):
        self._sinks, self.step, self._tokens_at = sinks, step, tokens_at
        self.flops_per_token, self.flops_per_second = flops_per_token, flops_per_second
        self.device_type = device_type
        self.seconds = 0.0
        self.results: dict[str, float] = {}
        self.evaluated: dict[str, int] = {}
        for line in earlier:
            self.seconds = max(self.seconds, line.get("train/seconds", 0.0))
            for name, value in line.items():
                if "/" in name and not name.startswith("train/") and value is not None:
                    self.results[name], self.evaluated[name] = value, line["step"]
        self._line: dict[str, object] = {}
        self._measured = (step, self.seconds)  # at the last line of figures
        self.resume()

    @property
    def tokens(self) -> int:
        """The number of tokens trained on."""
        return self._tokens_at(self.step)

    def resume(self) -> None:
        """Starts the clock again. It stands still from the end of an update until this call."""
        self._now = time.perf_counter()

    def advance(self, step: int) -> None:
        """Notes that `step` updates are done."""
        now = time.perf_counter()
        self.seconds += now - self._now
        self.step, self._now = step, now
        for sink in self._sinks:
            sink.advance(step)

    def training(self, figures: dict[str, float]) -> None:
        """Logs figures of the last update as `train/NAME`, with the speed since the last call, the training time in
        seconds, the memory in GB, and the MFU if known."""
        step, seconds = self._measured
        speed = (self.tokens - self._tokens_at(step)) / (self.seconds - seconds)
        self._measured = (self.step, self.seconds)
        figures = figures | {
            "tokens_per_second": speed,
            "seconds": round(self.seconds, 3),
            "memory_gb": round(memory_gb(self.device_type), 3),
        }
        if self.flops_per_second:
            figures["mfu"] = speed * self.flops_per_token / self.flops_per_second
        self._line |= {f"train/{name}": value for name, value in figures.items()}

    def skipped(self, problem: str, samples: list) -> None:
        """Logs that the last update was skipped because of `problem`, and the samples that it read."""
        self._line |= {"skipped": problem, "samples": samples}
        shown = f"{samples[:8]}" + (" and more, see metrics.jsonl" if len(samples) > 8 else "")
        self.print_line(f"skipped because {problem}; samples {shown}")

    def evaluation(self, results: dict[str, float]) -> None:
        """Logs and prints the results of an evaluation, none if it was interrupted."""
        self._line |= results
        self.results |= results
        self.evaluated |= dict.fromkeys(results, self.step)
        if results:
            self.print_line(in_words(results))

    def at_this_step(self, name: str) -> float | None:
        """Returns a result of an evaluation after the last update; None if there was none."""
        return self.results[name] if self.evaluated.get(name) == self.step else None

    def sample(self, prompt: str, text: str) -> None:
        """Logs and prints a sample."""
        for sink in self._sinks:
            sink.sample({"step": self.step, "prompt": prompt, "text": text})

    def print_line(self, text: str) -> None:
        """Prints a line."""
        for sink in self._sinks:
            sink.print_line(f"step {self.step}: {text}")

    def write(self) -> None:
        """Hands the metrics of this update to the sinks, if any were logged."""
        if self._line:
            line = {"step": self.step, "tokens": self.tokens, **self._line}
            for sink in self._sinks:
                sink.write(line)
        self._line = {}


def in_words(results: dict[str, float]) -> str:
    """Formats the results of an evaluation as one line, each with its standard error if there is one."""
    errors = {name: f" ± {results[name]:.4f}" for name in results if name.endswith("_stderr")}
    return ", ".join(
        f"{name} {value:.4f}{errors.get(f'{name}_stderr', '')}"
        for name, value in results.items()
        if name not in errors
    )


class RunFiles(Sink):
    """`metrics.jsonl` and `samples.jsonl` in the run's folder; a context manager around the run's loop.

    Opening them drops the lines after `last_step`, which a resumed run rewrites. An evaluation of `last_step` itself that
    a resumed run makes has a line of its own.
    """

    def __init__(self, run_dir: str | Path, last_step: int):
        self._metrics = JsonLines(Path(run_dir) / "metrics.jsonl", last_step)
        self._samples = JsonLines(Path(run_dir) / "samples.jsonl", last_step)

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, *_) -> None:
        self._metrics.close()
        self._samples.close()

    def write(self, line: dict) -> None:
        self._metrics.write(line)

    def sample(self, sample: dict) -> None:
        self._samples.write(sample)


class Terminal(Sink):
    """The progress of updates, `done` of `total`, and lines for the user; a context manager around the run's loop."""

    def __init__(self, done: int, total: int):
        # An average over all updates: recent ones alone may lie around an evaluation.
        shape = {"unit": "step", "leave": True, "delay": 0, "smoothing": 0}
        self._bar = Progress("training", total, initial=done, **shape)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_) -> None:
        """Ends the bar, which stays on the terminal."""
        self._bar.close()

    def advance(self, step: int) -> None:
        if self._bar.n == self._bar.initial:  # the first update may compile: its time says nothing
            self._bar.unpause()
        self._bar.update(step - self._bar.n)

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
        for name, value in line.items():
            if name.startswith("train/") and name not in FIGURES:
                shown[name.removeprefix("train/")] = f"{value:.4g}"
        self._bar.set_postfix({"at": line["step"], **shown}, refresh=False)

    def sample(self, sample: dict) -> None:
        self.print_line(f"step {sample['step']}: sample\n{sample['text']}\n")

    def print_line(self, text: str) -> None:
        """Prints a line above the bar."""
        tqdm.write(text)
        sys.stdout.flush()  # keeps the order with stderr if both go to one pipe


class Status(Sink):
    """Writes `status.json` of a run; a context manager around its loop. `step` updates are done before.

    It has the `state` (`running`, `finished`, `stopped` or `failed`), the `reason`, the `step`, the `time` of the last
    heartbeat, and `requeue`: whether the same command, started again, would continue the run. It is true for `running`
    (if its process is gone, it was killed) and `stopped`, unless by Ctrl-C, and for `failed` if `stop` has a reason or
    another process was lost after some progress.
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
                self.end("stopped", "SIGINT, twice", requeue=False)
            else:
                progress = self._step > self._first_step
                requeue = progress if peer_failed(error) else self._stop.reason is not None
                self.end("failed", f"{kind.__name__}: {error}", requeue=requeue)
        self._ended.set()

    def advance(self, step: int) -> None:
        self._step = step

    def end(self, state: str, reason: str = "", *, requeue: bool = False) -> None:
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

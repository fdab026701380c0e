"""The log of a run: metrics and samples in files, terminal and trackers; `status.json`."""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError
from tqdm import tqdm

from gpt2_accel.evals.formulas import INTERVALS, formatted
from gpt2_accel.runtime.cores import usable_cpus
from gpt2_accel.runtime.device import memory_gb
from gpt2_accel.runtime.files import JsonLines, lock_id, sentence, write_json
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.runtime.signals import StopRequest

# Seconds between writes of `status.json` during a run, far less than `find.SILENCE`.
HEARTBEAT = 30.0
LOOK = 5.0  # seconds at least over which the use of the cores is measured
# In 80 columns the bar has ten or more.
BAR = "{percentage:.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"


@dataclass
class RunLog(AbstractContextManager):
    """Logs a run, and measures the training time without evaluations, samples and checkpoints.

    A context manager around the run's loop. Writes `metrics.jsonl` and `samples.jsonl` into
    `run_dir`, and shows the progress. If `run_dir` is None, on all processes but the main one, it
    only measures. Opening the files drops the lines after `step`, the number of updates done
    before, which a resumed run rewrites, and those of a start at step 0. What a resumed run
    evaluates at `step` itself is added to that line.

    `updates` is the length of the run, `tokens_at(step)` the number of tokens in the first `step`
    updates. `full_speed` is the speed at an MFU of 1, in tokens per second, None if unknown.
    `threads` are those in which torch computes on a CPU, 0 on a GPU.

    `seconds` is the training time, including the time before a resume. `results` has the newest
    evaluations.
    """

    run_dir: Path | None
    step: int
    updates: int
    tokens_at: Callable[[int], int]
    full_speed: float | None
    threads: int = 0
    seconds: float = 0.0
    results: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> "RunLog":
        # An average over all updates: recent ones alone may lie around an evaluation.
        self.bar = Progress(
            "training",
            self.updates,
            disable=self.run_dir is None,
            initial=self.step,
            unit="step",
            leave=True,
            delay=0,
            smoothing=0,
            bar_format=BAR,
        )
        self._line: dict[str, object] = {}
        self._files: list[JsonLines] = []
        if self.run_dir is not None:
            for name in ("metrics.jsonl", "samples.jsonl"):
                self._files.append(JsonLines(self.run_dir / name, self.step or -1))
            for line in self._files[0].entries:  # written before a resume
                self.seconds = line.get("train/seconds", self.seconds)
                for name, value in line.items():
                    if "/" in name and not name.startswith("train/") and value is not None:
                        self.results[name] = value
        self._measured = (self.tokens, self.seconds)  # values in the last line of figures
        self._best = 0.0  # tokens per second
        self._said = False  # whether there was a line about the speed
        self._process = psutil.Process()
        self._looked = time.perf_counter()  # when the use of the cores was measured
        psutil.cpu_percent()
        self._process.cpu_percent()
        self.resume()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()  # it stays on the terminal
        for file in self._files:
            file.close()

    @property
    def tokens(self) -> int:
        """The number of tokens trained on."""
        return self.tokens_at(self.step)

    def resume(self) -> None:
        """Starts the clock again. It is paused from the end of an update until this call."""
        self._now = time.perf_counter()

    def advance(self, step: int) -> None:
        """Notes that `step` updates are done."""
        self.seconds += time.perf_counter() - self._now
        self.step = step
        self.resume()
        self.bar.update(step - self.bar.n)

    def training(self, figures: dict[str, float]) -> None:
        """Logs figures of the last update as `train/NAME`, and shows some of them beside the bar.

        Adds the speed since the last call (tokens/s), the training time (seconds), the memory (GB)
        and the MFU if known.
        """
        tokens, seconds = self._measured
        speed = (self.tokens - tokens) / (self.seconds - seconds)
        self._measured = (self.tokens, self.seconds)
        figures = figures | {
            "tokens_per_second": speed,
            "seconds": round(self.seconds, 3),
            "memory_gb": round(memory_gb(), 3),
        }
        self.explain(speed)
        if self.full_speed:
            figures["mfu"] = speed / self.full_speed
        self.add({f"train/{name}": value for name, value in figures.items()})
        name = "reward" if "reward" in figures else "loss"
        shown = {name: f"{figures[name]:.4g}", "lr": f"{figures['learning_rate']:.3g}"}
        self.bar.set_postfix(shown | {"tok/s": f"{speed:,.0f}"}, refresh=False)

    def explain(self, speed: float) -> None:
        """Prints once why the run is slow, from the use of the cores over `LOOK` seconds or more.

        On a CPU: other processes use a quarter of the machine, hardly any core is free, and this
        run does not get one for each of its threads; or they do not, and its threads are at most
        half of the physical cores that it may use. On any device: the speed has halved, and other
        processes use a fifth of a core. The processes of a run are assumed to use equal shares.
        """
        self._best = max(self._best, speed)
        if self._said or time.perf_counter() - self._looked < LOOK:
            return
        self._looked = time.perf_counter()
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        machine = os.cpu_count() or 1
        threads = self.threads * processes
        used = psutil.cpu_percent() / 100 * machine  # the mean since the last call
        own = self._process.cpu_percent() / 100 * processes
        others = used - own
        crowded = others > machine / 4
        starved = crowded and used > 0.9 * machine and own < 0.9 * threads
        usable = min(usable_cpus(), psutil.cpu_count(logical=False) or 1)
        if starved or (speed < self._best / 2 and others > 0.2):
            cause = f"other processes use {others:.1f} of {machine} CPU cores"
        elif 0 < 2 * threads <= usable and not crowded:
            cause = f"this run uses {threads} of {usable} CPU cores: set OMP_NUM_THREADS"
        else:
            return
        self._said = True
        self.print_line(f"slow: {cause} ({speed:,.0f} tokens/s, at best {self._best:,.0f})")

    def skipped(self, problem: str, samples: list) -> None:
        """Logs that the last update was skipped because of `problem`, and its samples."""
        self._line |= {"skipped": problem, "samples": samples}
        self.print_line(f"skipped because {problem}; metrics.jsonl has its samples")

    def evaluation(self, results: dict[str, float]) -> None:
        """Logs and prints the results of an evaluation."""
        results = numbers(results)
        self._line |= results
        texts = ", ".join(f"{name} {text}" for name, text in formatted(results).items())
        self.print_line(texts if self.results else f"{texts}; {INTERVALS}")
        self.results |= results

    def add(self, metrics: dict[str, float]) -> None:
        """Adds metrics to this update's line."""
        self._line |= numbers(metrics)

    def sample(self, prompt: str, text: str, ahead: int = 0) -> None:
        """Logs and prints a sample, of this step or of the one that is `ahead`.

        Not again at a resume, if a process that was killed has logged it.
        """
        entry = {"step": self.step + ahead, "prompt": prompt, "text": text}
        if self._files and entry not in self._files[1].entries:
            self._files[1].write(entry)
        self.print_line(f"sample\n{text}\n")

    def print_line(self, text: str) -> None:
        """Prints a line above the bar, also from a thread that writes or uploads a checkpoint."""
        if self._files:
            tqdm.write(f"step {self.step}: {text}")
            sys.stdout.flush()  # keeps the order with stderr if both go to one pipe

    def write(self) -> dict[str, object]:
        """Writes the metrics of this update, if there are any; returns the line.

        The line has `step` and `tokens`. At a resume it extends that of the checkpoint. Its entries
        `skipped` and `samples` are not numbers.
        """
        if not self._line:
            return {}
        line: dict[str, object] = {"step": self.step, "tokens": self.tokens} | self._line
        self._line = {}
        if self._files:
            self._files[0].write(line, extend=True)
        return line


def numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns figures with Python numbers in place of tensors and numpy scalars.

    Raises `ValueError` for a text, or anything else that is neither a number nor None, and for a
    name that each line has.
    """
    values = {name: x.item() if hasattr(x, "item") else x for name, x in figures.items()}
    for name, value in values.items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"the metric {name} is {value!r}: give a number")
        if name in ("step", "tokens"):
            raise ValueError(f"a metric is named {name}, as a part of each line: rename it")
    return values


@dataclass
class Status:
    """Writes `status.json` of a run; a context manager around its loop.

    `step()` is the number of updates done. The file has the `state` (`running`, `finished`,
    `stopped` or `failed`), the `reason`, the `step`, the `time` of the last heartbeat, and
    `requeue`: whether the same command, started again, would continue the run. `requeue` is true
    for `running` (if its process is gone, it was killed) and `stopped`, unless by Ctrl-C. For
    `failed` it is true if `stop` has a reason or another process was lost after some progress.

    `lost` is true if the folder was removed or moved. Then nothing is written.
    """

    run_dir: Path
    step: Callable[[], int]
    stop: StopRequest
    lost: bool = False

    def __post_init__(self) -> None:
        self._first = self.step()
        self._lock = lock_id(self.run_dir)
        self._state = {"state": "running", "reason": "", "requeue": True}
        self._writing = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> "Status":
        self.write()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if kind is not None and not self._ended.is_set():  # an error after the end does not count
            if issubclass(kind, KeyboardInterrupt):
                self.end("stopped", "SIGINT, twice")
            else:
                requeue = self.stop.reason is not None
                # Another process is gone: NCCL raises a `DistError`, gloo names its transport.
                if isinstance(error, DistError) or "gloo/transport" in str(error):
                    requeue = self.step() > self._first  # some progress
                self.end("failed", f"{kind.__name__}: {error}", requeue=requeue)
        self._ended.set()

    def end(self, state: str, reason: str = "", *, requeue: bool = False) -> None:
        """Writes the final status immediately: the process may have little time left."""
        self._ended.set()
        self._state = {"state": state, "reason": reason, "requeue": requeue}
        self.write()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            self.write()

    def write(self) -> None:
        """Writes the status now, and checks whether the folder still belongs to this run."""
        with self._writing:
            self.lost |= lock_id(self.run_dir) not in (self._lock, None)
            if self.lost:
                return
            now = datetime.now(UTC).isoformat(timespec="seconds")
            status = self._state | {"step": self.step(), "time": now}
            try:
                write_json(self.run_dir / "status.json", status)
            except OSError as failure:  # such as a full disk; must not hide why the run ended
                print(f"could not write {sentence(failure)}", file=sys.stderr)

"""Trains the runs of a study. Its folder is the queue and the record: each run has a folder there, and a lock.

A driver has a worker for each GPU or CPU core. A worker takes a run whose lock it gets, trains it in a child process, and
records it in the table. The lock ends with the driver, and the run goes on in the next one. Drivers on several machines share
a study if they share its folder.
"""

import math
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path

from filelock import FileLock, Timeout

from gpt2_accel.checkpoint.find import read_status
from gpt2_accel.estimate.flops import duration
from gpt2_accel.evals.results import markdown
from gpt2_accel.hf.loss_plot import short_number
from gpt2_accel.runtime.files import LOCK, read_json_lines, remove, write_file
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.tools.study import children
from gpt2_accel.tools.study.children import LOG
from gpt2_accel.tools.study.trials import (
    CODE,
    Result,
    Trial,
    code_fingerprint,
    read_run,
    read_table,
    recipe_source,
    recorded_code,
    write_table,
)

PAUSE = 0.5  # seconds between looks at a run, or at its lock
HEADS = ("id", "run", "val/loss", "parameters", "tokens", "updates", "FLOPs")
PROBE = 40  # updates that measure the speed of training


def require_scipy() -> None:
    """Raises `ValueError` if SciPy is not installed: before hours of runs."""
    if find_spec("scipy") is None:
        raise ValueError("a study needs scipy: pip install 'scipy>=1.13'")


@dataclass
class Engine:
    """Trains the runs of a study in `folder`, one in each of `slots`, and records them in its `runs.csv`. A run in this table
    is done.

    With `keep_models` the weights and checkpoints of a recorded run stay. `results` has the recorded runs by id, `failed` the
    ids of those that failed.
    """

    folder: Path
    slots: Sequence[str]
    keep_models: bool = False

    def __post_init__(self) -> None:
        self.table = self.folder / "runs.csv"
        self.results = read_table(self.table)
        self.failed: set[str] = set()

    def left(self, trials: Iterable[Trial]) -> list[Trial]:
        """Returns the trials that are neither recorded nor failed."""
        return [t for t in trials if t.id not in self.results and t.id not in self.failed]

    def metric(self, trial: Trial, name: str = "loss", missing: float = math.inf) -> float:
        """Returns the `loss` or `bits_per_byte` of a trial: infinite if it diverged, `missing` if it has no result. Raises
        `ValueError` if the data's bytes are unknown."""
        result = self.results.get(trial.id)
        if result is None:
            return missing
        value = result.loss if math.isinf(result.loss) else getattr(result, name)
        if value is None:
            raise ValueError(f"run {trial.id} has no {name}: compare by loss")
        return value

    def caveats(self, trials: Sequence[Trial]) -> list[str]:
        """Returns a remark on those of the trials that other code recorded, if there are any."""
        codes = [self.results[t.id].code for t in trials if t.id in self.results]
        other = len(codes) - codes.count(code_fingerprint(trials[0].recipe))
        if not other:
            return []
        return [f"{other} of {len(codes)} runs were recorded by other code than this"]

    def run(self, trials: Iterable[Trial]) -> None:
        """Trains the trials that are left, or waits until other drivers have.

        A run that fails is named, and the others go on. A signal stops the runs with their checkpoints and raises
        `KeyboardInterrupt`. Raises `OSError` if the folder cannot be written.
        """
        trials = self.left(trials)
        if not trials:
            return
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        with (
            StopRequest() as stop,
            Progress("runs", len(trials), unit="run") as bar,
            ThreadPoolExecutor(len(self.slots)) as pool,
        ):
            workers = [pool.submit(self._work, trials, slot, stop) for slot in self.slots]
            while wait(workers, PAUSE).not_done:
                bar.update(len(trials) - len(self.left(trials)) - bar.n)
        if stop.reason is not None:
            print(f"stopped ({stop.reason}): the same command continues", flush=True)
            raise KeyboardInterrupt
        for worker in workers:
            worker.result()  # raises what the worker has raised

    def _work(self, trials: Sequence[Trial], slot: str, stop: StopRequest) -> None:
        """Trains trials in a slot, until none is left. Leaves those that another worker has locked to it."""
        while self.left(trials) and stop.reason is None:
            for trial in trials:
                with suppress(Timeout), self._lock(trial.id, timeout=0):
                    if self.left([trial]) and stop.reason is None:
                        self._finish(trial, slot, stop)
            time.sleep(PAUSE)

    def _lock(self, name: str, timeout: float = -1) -> FileLock:
        """Returns a lock among all workers of the study."""
        return FileLock(self.folder / f"runs/.{name}.lock", timeout)

    def _finish(self, trial: Trial, slot: str, stop: StopRequest) -> None:
        """Trains a locked trial, unless its folder has the result of another driver, and records it."""
        folder = self.folder_of(trial)
        try:
            found = read_run(trial, folder) or self._train(trial, folder, slot, stop)
        except ValueError as error:
            self.failed.add(trial.id)
            text = f"run {trial.id} failed: {error} ({folder / LOG})"
            print(text, file=sys.stderr, flush=True)
            return
        if found is None:
            return
        if not self.keep_models:
            for kind in ("checkpoint-*", "best", "latest", "*.safetensors"):
                for path in folder.glob(kind):
                    remove(path)
        with self._lock("table"):
            self.results |= read_table(self.table)
            self.results[trial.id] = found
            write_table(self.table, self.results.values())

    def _train(self, trial: Trial, folder: Path, slot: str, stop: StopRequest) -> Result | None:
        """Trains a trial and returns its result; None if it was stopped, or if another process still trains in its folder.
        Raises `ValueError` with the reason if it failed, and the errors of `set_aside`."""
        set_aside(folder, code_fingerprint(trial.recipe))
        process = self.child(trial, folder, slot)
        while process.is_alive() and stop.reason is None:
            process.join(PAUSE)
        children.stop(process)
        found = read_run(trial, folder)
        reason = failure(folder, process.exitcode)
        if found is None and stop.reason is None and reason:
            raise ValueError(reason)
        return found

    def folder_of(self, trial: Trial) -> Path:
        """Returns the folder of a run: the one that ends with its id, else a new one."""
        runs = self.folder / "runs"
        name = re.sub(r"[^\w.+=-]+", "_", trial.label)
        return next(runs.glob(f"*-{trial.id}"), runs / f"{name}-{trial.id}")

    def child(self, trial: Trial, folder: Path, slot: str) -> BaseProcess:
        """Starts a trial in `folder`, where it resumes."""
        write_file(folder / CODE, code_fingerprint(trial.recipe))
        arguments = (trial, recipe_source(trial.recipe), folder, slot)
        process = children.FORKS.Process(target=children.train_recipe, args=arguments)
        process.start()
        return process

    def runs_table(self, trials: Iterable[Trial]) -> str:
        """Returns the runs as a Markdown table."""
        rows = {}
        for trial in trials:
            result = self.results.get(trial.id)
            rows[trial.id] = [
                trial.label,
                f"{result.loss:.4f}" if result else "missing",
                short_number(trial.shape.parameter_count),
                short_number(trial.tokens),
                f"{trial.config.max_steps:,}",
                f"{trial.flops:.3g}",
            ]
        return markdown(HEADS, rows)

    def forecast(self, trials: Sequence[Trial], sample: Trial) -> str:
        """Returns the table of the trials, and the time of those that are left, by the speed of `sample`, which trains alone:
        over the second half of `PROBE` updates. Raises `ValueError` if it fails."""
        table = self.runs_table(trials)
        left = self.left(trials)
        if not left:
            return f"{table}\n\nall runs are recorded"
        off = {"warmup_steps": 0, "eval_every": 0, "sample_every": 0, "save_every": 0}
        probe = sample.changed("probe", max_steps=PROBE, log_every=PROBE // 2, **off)
        with tempfile.TemporaryDirectory(prefix="probe-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            process = self.child(probe, folder, self.slots[0])
            process.join()
            lines = read_json_lines(folder / "metrics.jsonl")
            if process.exitcode or not lines:
                reason = failure(folder, process.exitcode)
                raise ValueError(f"the speed was not measured: {reason}")
        total = sum(trial.flops for trial in left)
        count = len(self.slots)
        speed = lines[-1]["train/tokens_per_second"] * sample.flops_per_token * count
        return (
            f"{table}\n\n{len(left)} runs are not recorded: {total:.3g} FLOPs, {duration(total / speed)} with {count} at a time, by the "
            "measured speed of a run alone, without evaluations"
        )


def set_aside(folder: Path, code: str) -> None:
    """Renames the folder of a run that other code than `code` has trained in part, so that it
    starts anew. Raises `Timeout` if a process still trains there."""
    if not (folder / "config.yaml").exists() or recorded_code(folder) == code:
        return
    old = folder.with_name(folder.name + time.strftime(".old-%Y%m%d-%H%M%S"))
    with FileLock(folder / LOCK, 0):
        folder.rename(old)
    text = f"the code of {folder} has changed: it starts anew, the old run is in {old.name}"
    print(text, file=sys.stderr, flush=True)


def failure(folder: Path, code: int) -> str:
    """Returns what a run without a result failed of, by the exit code of its process; empty if it was stopped, or if another
    process has its folder."""
    log = folder / LOG
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    lines = re.findall(r".*\w.*", text)
    last = lines[-1] if lines else f"exit code {code}"
    stopped = read_status(folder).get("state") == "stopped" and (code == 0 or code > 128)
    if stopped or "is in use by another process" in last:
        return ""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else last

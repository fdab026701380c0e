"""Trains the runs of a study. Its folder is the queue and the record: each run has a folder there, and a lock.

A driver has a worker for each GPU or CPU core. A worker takes a run whose lock it gets, trains it in a child process, and
records it in the table. The lock ends with the driver, and the run goes on in the next one. Drivers on several machines share
a study if they share its folder.
"""

import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue

from filelock import FileLock, Timeout

from gpt2_accel.checkpoint.find import read_status
from gpt2_accel.estimate.flops import duration
from gpt2_accel.runtime.files import LOCK, read_json_lines, remove, write_file
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.tools.study import children
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
PROBE = 40  # updates that measure the speed of training
LOG = "log.txt"  # in a run's folder: its terminal output


def require_scipy() -> None:
    """Raises `ValueError` if SciPy is not installed: before hours of runs."""
    if find_spec("scipy") is None:
        raise ValueError("a study needs scipy: pip install 'scipy>=1.13'")


@dataclass
class Engine:
    """Trains the runs of a study in `folder`, one in each of `slots` with a number of `processes`, and records them in the
    CSV file `table`. A run in the table is done.

    `precision` is that of the runs. With `keep_models` the weights and checkpoints of a recorded run stay. `results` has the
    recorded runs by id, `failed` the ids of those that failed.
    """

    folder: Path
    table: Path
    slots: Sequence[str]
    processes: int = 1
    precision: Mapping[str, str] = field(default_factory=dict)
    keep_models: bool = False

    def __post_init__(self) -> None:
        self.results = read_table(self.table)
        self.failed: set[str] = set()

    def knows(self, trial: Trial) -> bool:
        """Whether a trial is recorded or has failed."""
        return trial.id in self.results or trial.id in self.failed

    def run(self, trials: Sequence[Trial]) -> None:
        """Trains trials, as far as they are not known, or waits until other drivers have.

        A run that fails is named, and the others go on. A signal stops the runs with their checkpoints and raises
        `KeyboardInterrupt`. Raises `OSError` if the folder cannot be written.
        """
        left, queue = [trial for trial in trials if not self.knows(trial)], SimpleQueue()
        for trial in left:
            (self.folder / "runs").mkdir(parents=True, exist_ok=True)
            code_fingerprint(trial.recipe)  # into its cache: threads cannot parse at the same time
            queue.put(trial)
        with (
            StopRequest() as stop,
            Progress("runs", len(left), unit="run") as bar,
            ThreadPoolExecutor(len(self.slots)) as pool,
        ):
            workers = [pool.submit(self._work, queue, slot, stop) for slot in self.slots]
            while wait(workers, PAUSE).not_done:
                bar.update(sum(map(self.knows, left)) - bar.n)
        if stop.reason is not None:
            print(f"stopped ({stop.reason}): the same command continues", flush=True)
            raise KeyboardInterrupt
        for worker in workers:
            worker.result()  # raises what the worker has raised

    def _work(self, queue: SimpleQueue, slot: str, stop: StopRequest) -> None:
        """Trains the trials of a queue in a slot. One that another driver has goes back into the queue."""
        with suppress(Empty):
            while stop.reason is None:
                trial = queue.get_nowait()
                with suppress(Timeout), self._lock(trial.id, timeout=0):
                    if not self.knows(trial):  # now by the table
                        self._finish(trial, slot, stop)
                if not self.knows(trial):
                    queue.put(trial)
                    time.sleep(PAUSE)

    def _lock(self, name: str, timeout: float = -1) -> FileLock:
        """Returns a lock among all drivers of the study."""
        return FileLock(self.folder / f"runs/.{name}.lock", timeout)

    def _finish(self, trial: Trial, slot: str, stop: StopRequest) -> None:
        """Trains a locked trial, unless its folder has the result of another driver, and records it."""
        folder = self.folder_of(trial)
        try:
            found = read_run(trial, folder) or self._train(trial, folder, slot, stop)
        except ValueError as error:
            self.failed.add(trial.id)
            say(f"run {trial.id} failed: {error} ({folder / LOG})")
            return
        if found is None:
            return
        if not self.keep_models:
            for kind in ("checkpoint-*", "best", "latest", "*.safetensors"):
                for path in folder.glob(kind):
                    remove(path)
        with self._lock("table"):
            self.results |= {**read_table(self.table), trial.id: found}
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
        if found is None and stop.reason is None and (reason := failure(folder, process.exitcode)):
            raise ValueError(reason)
        return found

    def folder_of(self, trial: Trial) -> Path:
        """Returns the folder of a run: the one that ends with its id, else a new one."""
        runs, name = self.folder / "runs", re.sub(r"[^\w.+=-]+", "_", trial.label)
        return next(runs.glob(f"*-{trial.id}"), runs / f"{name}-{trial.id}")

    def child(self, trial: Trial, folder: Path, slot: str) -> BaseProcess:
        """Starts a trial in `folder`, where it resumes."""
        recipe = trial.recipe, recipe_source(trial.recipe), trial.arguments(folder), trial.files
        write_file(folder / CODE, code_fingerprint(trial.recipe))
        arguments = (*recipe, slot, self.processes, folder / LOG)
        process = children.FORKS.Process(target=children.train_recipe, args=arguments)
        process.start()
        return process

    def forecast(self, left: Sequence[Trial], sample: Trial) -> str:
        """Returns the time that the trials that are `left` take, by the speed of `sample`, which trains alone: over the second
        half of `PROBE` updates. Raises `ValueError` if it fails."""
        if not left:
            return "all runs are recorded"
        off = {"eval_every": 0, "sample_every": 0, "save_every": 0, "log_every": PROBE // 2}
        probe = sample.lasting(PROBE).changed(**off)
        with tempfile.TemporaryDirectory(prefix="probe-", ignore_cleanup_errors=True) as name:
            process, folder = self.child(probe, Path(name), self.slots[0]), Path(name)
            process.join()
            lines = read_json_lines(folder / "metrics.jsonl")
            if process.exitcode or not lines:
                reason = failure(folder, process.exitcode)
                raise ValueError(f"the speed was not measured: {reason}")
        total, count = sum(trial.flops for trial in left), len(self.slots)
        speed = lines[-1]["train/tokens_per_second"] * sample.flops_per_token * count
        return (
            f"{len(left)} runs are not recorded: {total:.3g} FLOPs, {duration(total / speed)} with {count} at a time, by the "
            "measured speed of a run alone, without evaluations"
        )


def say(text: str) -> None:
    """Prints a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def set_aside(folder: Path, code: str) -> None:
    """Renames the folder of a run that other code than `code` has trained in part, so that it
    starts anew. Raises `Timeout` if a process still trains there."""
    if not (folder / "config.yaml").exists() or recorded_code(folder) == code:
        return
    old = folder.with_name(folder.name + time.strftime(".old-%Y%m%d-%H%M%S"))
    with FileLock(folder / LOCK, 0):
        folder.rename(old)
    say(f"the code of {folder} has changed: it starts anew, the old run is in {old.name}")


def failure(folder: Path, code: int) -> str:
    """Returns what a run without a result failed of, by the exit code of its process; empty if it was stopped, or if another
    process has its folder."""
    last, state = last_line(folder / LOG), read_status(folder).get("state")
    if (state == "stopped" and (code == 0 or code > 128)) or "is in use by another process" in last:
        return ""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else last or f"exit code {code}"


def last_line(path: Path) -> str:
    """Returns the last line of a file that has words; empty if there is none."""
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    return ["", *re.findall(r".*\w.*", text)][-1]

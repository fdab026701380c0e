"""The queue that trains the runs of a study, several at a time, and the table `runs.csv` that
records them.

A study has a folder. Each run is a subprocess, `python RECIPE --SETTING VALUE …`, with a folder
below `runs/` and a lock. Several drivers, also on several machines, may share the folder of a
study: a driver trains the runs whose lock it gets.
"""

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gpt2_accel.checkpoint.find import read_status
from gpt2_accel.config import INERT, check_ranges, setting
from gpt2_accel.evals.results import markdown
from gpt2_accel.hf.loss_plot import short_number
from gpt2_accel.runtime.cores import usable_cpus
from gpt2_accel.runtime.device import accelerator_count
from gpt2_accel.runtime.files import LOCK, read_json_lines, remove, write_file
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.runtime.signals import DRIVER, StopRequest
from gpt2_accel.tools.study.trials import Trial, arguments, code_of

PAUSE = 0.5  # seconds between looks at a run, or at its lock
GRACE = 30.0  # seconds in which a run that has to stop may save a checkpoint
COLUMNS = [
    "id",
    "settings",
    "parameters",
    "updates",
    "tokens",
    "flops",
    "loss",
    "bits_per_byte",
    "code",
]
Row = Mapping[str, Any]  # of the table, by `COLUMNS`


def read_run(trial: Trial, folder: Path) -> Row | None:
    """Returns the row of the run in `folder`; None if it neither finished nor diverged.

    `loss` is the val/loss after the last update in nats per token, infinite if the run diverged.
    There is no time in a row: a run that was killed and continued has the same one.
    """
    status = read_status(folder)
    lines = read_json_lines(folder / "metrics.jsonl")
    line = lines[-1] if lines else {}
    if status.get("state") == "failed" and status["reason"].startswith(Diverged.__name__):
        line |= {"val/loss": math.inf, "val/bits_per_byte": None}
    elif status.get("state") != "finished" or "val/loss" not in line:
        return None
    settings = {n: v for n, v in trial.changes.items() if n not in INERT or n == "data_dir"}
    tokens = line.get("tokens", 0)
    values = (
        trial.id,
        json.dumps(settings, sort_keys=True),
        trial.shape.parameter_count,
        status["step"],
        tokens,
        float(tokens * trial.flops_per_token),
        line["val/loss"],
        line.get("val/bits_per_byte"),
        trial.code,
    )
    return dict(zip(COLUMNS, values, strict=True))


def read_table(path: Path) -> dict[str, Row]:
    """Returns the rows of a CSV file by id; empty if there is no such file. Raises `ValueError` for
    a damaged row."""
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    rows: dict[str, Row] = {}
    for number, row in enumerate(csv.DictReader(text.splitlines()), 1):
        try:
            if None in row or None in row.values() or math.isnan(float(row["loss"])):
                raise ValueError
            rows[row["id"]] = row
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: row {number} is damaged: restore the file from a copy, or remove the row"
            ) from error
    return rows


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Writes the CSV file atomically, in the order of the settings, so that the same runs give the
    same file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: (row["settings"], row["id"])))
    write_file(path, text.getvalue())


# The queue


@dataclass
class StudyOptions:
    """Options that a study's recipe has beside its own. Raises `ValueError` for a value out of its
    range."""

    output_dir: str | None = setting(None, "folder of the study; default runs/<its name>")
    processes: int | None = setting(None, "runs at a time; default one per GPU, or per CPU core")
    dry_run: bool = setting(False, "print the runs and their FLOPs, then exit")

    def __post_init__(self) -> None:
        check_ranges(self, positive="processes")
        count = int(os.environ.get("WORLD_SIZE", 1))
        if count > 1:
            raise ValueError(
                f"the launch has {count} processes: a study has one, and starts a run on each GPU "
                "itself"
            )
        if find_spec("scipy") is None:
            raise ValueError("a study needs scipy: pip install 'scipy>=1.13'")

    def queue(self, folder: str) -> "Queue":
        """Returns the queue of a study in `output_dir`, by default `folder`."""
        return Queue(Path(self.output_dir or folder), slots()[: self.processes])


def slots() -> list[str]:
    """Returns where one run at a time trains: the number or UUID of each visible GPU, or an empty
    text for each CPU core if there is no GPU or the launch is for the CPU."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    count = 0 if on_cpu else accelerator_count()
    if not count:
        return [""] * usable_cpus()
    visible = re.findall(r"[^\s,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return visible or list(map(str, range(count)))


@dataclass
class Queue:
    """Trains runs in `folder`, one in each of `slots`, and records them in its `runs.csv`. A run in
    this table is done.

    The weights and checkpoints of a recorded run are removed. `rows` has the recorded runs by id,
    `failed` the ids of those that failed.
    """

    folder: Path
    slots: Sequence[str]

    def __post_init__(self) -> None:
        self.table = self.folder / "runs.csv"
        self.rows = read_table(self.table)
        self.failed: set[str] = set()

    def left(self, trials: Iterable[Trial]) -> list[Trial]:
        """Returns the trials that are neither recorded nor failed."""
        return [t for t in trials if t.id not in self.rows and t.id not in self.failed]

    def metric(self, trial: Trial, name: str = "loss", missing: float = math.inf) -> float:
        """Returns the `loss` or `bits_per_byte` of a trial: infinite if it diverged, `missing` if
        it has no row. Raises `ValueError` if the data's bytes are unknown."""
        row = self.rows.get(trial.id)
        if row is None:
            return missing
        loss = float(row["loss"])
        value = loss if math.isinf(loss) else row[name]
        if value in ("", None):
            raise ValueError(f"run {trial.id} has no {name}: compare by loss")
        return float(value)

    def caveats(self, trials: Sequence[Trial]) -> list[str]:
        """Returns a remark on those of the trials that other code recorded, if there are any."""
        codes = [self.rows[t.id].get("code") for t in trials if t.id in self.rows]
        other = len(codes) - codes.count(trials[0].code)
        remark = f"{other} of {len(codes)} runs were recorded by another version of the recipe or gpt2_accel"
        return [remark] if other else []

    def run(self, trials: Iterable[Trial]) -> None:
        """Trains the trials that are left, or waits until other drivers have.

        A run that fails is named, and the others go on. A signal stops the runs with their
        checkpoints and raises `KeyboardInterrupt`. Raises `OSError` if the folder cannot be
        written, and `ValueError` if the code changes.
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
        """Trains trials in a slot, until none is left. Leaves those that another worker has locked
        to it."""
        while self.left(trials) and stop.reason is None:
            for trial in self.left(trials):
                with suppress(Timeout), self._lock(trial.id, 0):
                    self.rows |= read_table(self.table)
                    if self.left([trial]) and stop.reason is None:
                        self._finish(trial, slot, stop)
            time.sleep(PAUSE)

    def _lock(self, name: str, timeout: float = -1) -> FileLock:
        """Returns a lock among all workers of the study."""
        return FileLock(self.folder / f"runs/.{name}.lock", timeout)

    def _finish(self, trial: Trial, slot: str, stop: StopRequest) -> None:
        """Trains a locked trial, unless its folder has the result of another driver, and records
        it. A run that other code has trained in part starts anew, in another folder.

        Raises `Timeout` if the process of a dead driver still trains it, and `ValueError` if the
        code has changed."""
        end = f"{trial.id}-{trial.code}"
        name = re.sub(r"[^\w.+=-]+", "_", trial.label)
        folder = next(self.folder.glob(f"runs/*-{end}"), self.folder / f"runs/{name}-{end}")
        row = read_run(trial, folder)
        if row is None:
            if code_of(trial.recipe) != trial.code:
                raise ValueError("the recipe or gpt2_accel has changed: start the study again")
            folder.mkdir(exist_ok=True)
            FileLock(folder / LOCK, 0).acquire().lock.release()
            process = start(trial, folder, slot)
            while process.poll() is None and stop.reason is None:
                time.sleep(PAUSE)
            end_process(process)
            row = read_run(trial, folder)
        if row is not None:
            with self._lock("table"):
                self.rows |= read_table(self.table) | {trial.id: row}
                write_table(self.table, self.rows.values())
            for kind in ("latest", "best", "checkpoint-*", "*.safetensors"):
                for path in folder.glob(kind):
                    remove(path)
        elif stop.reason is None:
            self.failed.add(trial.id)
            text = f"run {trial.id} failed: {failure(folder, process.returncode)}"
            print(text, file=sys.stderr, flush=True)

    def runs_table(self, trials: Iterable[Trial]) -> str:
        """Returns the runs as a Markdown table."""
        rows = {}
        for trial in trials:
            loss = self.metric(trial, missing=math.nan)
            rows[trial.id] = [
                trial.label,
                "missing" if math.isnan(loss) else f"{loss:.4f}",
                short_number(trial.shape.parameter_count),
                short_number(trial.tokens),
                f"{trial.config.max_steps:,}",
                f"{trial.flops:.3g}",
            ]
        heads = ("id", "run", "val/loss", "parameters", "tokens", "updates", "FLOPs")
        return markdown(heads, rows)

    def forecast(self, trials: Sequence[Trial]) -> str:
        """Returns the table of the trials, and the FLOPs of those that are left."""
        left = self.left(trials)
        total = sum(trial.flops for trial in left)
        return f"{self.runs_table(trials)}\n\n{len(left)} runs are not recorded: {total:.3g} FLOPs"


def start(trial: Trial, folder: Path, gpu: str) -> subprocess.Popen:
    """Starts a trial in `folder`, where it resumes. Its output is appended to `log.txt`. It stops
    when this process ends."""
    command = [sys.executable, str(trial.recipe)]
    command += arguments(trial.changes, folder)
    place = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if gpu:
        place = {"CUDA_VISIBLE_DEVICES": gpu}
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(
            command,
            env=os.environ | place | {DRIVER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process only, which stops its runs
        )


def end_process(process: subprocess.Popen) -> None:
    """Ends a run, with a checkpoint if it saves it within `GRACE` seconds, and waits for its end."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    process.kill()
    process.wait()


def failure(folder: Path, code: int) -> str:
    """Returns why a run has no result, by the exit code of its process: the last line of its
    output, and where that is."""
    log = folder / "log.txt"
    lines = re.findall(r".*\w.*", log.read_text("utf-8", "replace"))
    reason = lines[-1] if lines else f"exit code {code}"
    if code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
    return f"{reason} ({log})"

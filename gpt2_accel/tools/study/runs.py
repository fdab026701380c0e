"""Trains the runs of a study, several at a time, and records them in its table `runs.csv`.

Each run is a subprocess, `python RECIPE --SETTING VALUE …`, with a folder in `runs/` and a lock.
Several drivers, also on several machines, may share the folder of a study: a driver trains the runs
whose lock it gets.
"""

import csv
import io
import json
import math
import os
import re
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

PAUSE = 0.5  # seconds between checks of a run or its lock
STOP_SECONDS = 30.0  # delay of SIGKILL after SIGTERM: a run may save a checkpoint
Row = Mapping[str, Any]  # a row of the table: column -> value


def result_row(trial: Trial, folder: Path) -> Row | None:
    """Returns the row of the run in `folder`; None if it neither finished nor diverged.

    `loss` is the val/loss after the last update in nats per token, infinite if the run diverged. A
    row has no times, so a run that was killed and continued has the same row.
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
    return {
        "id": trial.id,
        "settings": json.dumps(settings, sort_keys=True),
        "parameters": trial.shape.parameter_count,
        "updates": status["step"],
        "tokens": tokens,
        "flops": float(tokens * trial.flops_per_token),
        "loss": line["val/loss"],
        "bits_per_byte": line.get("val/bits_per_byte"),
        "code": trial.code,
    }


def read_table(path: Path) -> dict[str, Row]:
    """Returns the rows of a CSV file by id; empty if the file does not exist.

    Raises `ValueError` for a damaged row.
    """
    text = path.read_text("utf-8") if path.exists() else ""
    rows: dict[str, Row] = {}
    for number, row in enumerate(csv.DictReader(text.splitlines()), 1):
        if not row.get("loss") or None in row.values():
            raise ValueError(f"{path}: row {number} is damaged: remove it")
        rows[row["id"]] = row
    return rows


def write_table(path: Path, rows: Iterable[Row], columns: Iterable[str]) -> None:
    """Writes the CSV file atomically, sorted by settings: the same runs give the same file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: (row["settings"], row["id"])))
    write_file(path, text.getvalue())


# The queue


@dataclass
class StudyOptions:
    """Options of every recipe that runs a study. Raises `ValueError` for a value out of range, a
    launch of several processes, or if scipy is missing."""

    output_dir: str | None = setting(None, "folder of the study; default runs/<its name>")
    processes: int | None = setting(None, "runs at a time; default one per GPU, or per CPU core")
    dry_run: bool = setting(False, "print the runs and their FLOPs, then exit")

    def __post_init__(self) -> None:
        check_ranges(self, positive="processes")
        count = int(os.environ.get("WORLD_SIZE", 1))
        if count > 1:
            raise ValueError(
                f"the launch has {count} processes: start a study with one; it trains a run on "
                "each GPU"
            )
        if find_spec("scipy") is None:
            raise ValueError("a study needs scipy: pip install 'scipy>=1.13'")

    def queue(self, folder: str) -> "Queue":
        """Returns the queue of a study in `output_dir`, by default `folder`."""
        return Queue(Path(self.output_dir or folder), slots()[: self.processes])


def slots() -> list[str]:
    """Returns the places for runs, one run at a time in each: the number or UUID of each visible
    GPU, or "" for each CPU core if there is no GPU or the launch is for the CPU."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    count = 0 if on_cpu else accelerator_count()
    if not count:
        return [""] * usable_cpus()
    visible = re.findall(r"[^\s,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return visible or list(map(str, range(count)))


@dataclass
class Queue:
    """Trains runs in `folder`, one at a time in each of `slots`, and records them in its
    `runs.csv`. A run in this table is done, and its weights and checkpoints are removed.

    `rows` has the recorded runs by id, `failed` the ids of the runs that failed.
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
        it is not recorded. Raises `ValueError` if it has no `bits_per_byte`."""
        row = self.rows.get(trial.id)
        if row is None:
            return missing
        loss = float(row["loss"])
        value = loss if math.isinf(loss) else row[name]
        if value in ("", None):
            raise ValueError(f"run {trial.id} has no {name}: compare by loss")
        return float(value)

    def caveats(self, trials: Sequence[Trial]) -> list[str]:
        """Returns a remark if other code recorded some of the trials."""
        codes = [self.rows[t.id].get("code") for t in trials if t.id in self.rows]
        other = len(codes) - codes.count(trials[0].code)
        if not other:
            return []
        return [
            f"{other} of {len(codes)} runs were recorded by another version of the recipe or of "
            "gpt2_accel"
        ]

    def run(self, trials: Iterable[Trial]) -> None:
        """Trains the trials that are left, or waits until other drivers have trained them.

        Reports a run that fails and continues with the others. After a signal the runs save a
        checkpoint and stop, and it raises `KeyboardInterrupt`. Raises `OSError` if the folder
        cannot be written, `ValueError` if the code has changed.
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
        """Trains trials in a slot until none is left. Skips trials that another worker has
        locked."""
        while self.left(trials) and stop.reason is None:
            for trial in self.left(trials):
                with suppress(Timeout), self._lock(trial.id, 0):
                    self.rows |= read_table(self.table)
                    if self.left([trial]) and stop.reason is None:
                        self._finish(trial, slot, stop)
            time.sleep(PAUSE)

    def _lock(self, name: str, timeout: float = -1) -> FileLock:
        """Returns a lock that all workers of the study share."""
        return FileLock(self.folder / f"runs/.{name}.lock", timeout)

    def _finish(self, trial: Trial, slot: str, stop: StopRequest) -> None:
        """Trains a locked trial, unless its folder already has the result, and records it. A run
        that other code has begun starts from scratch in another folder.

        Raises `Timeout` if the process of a dead driver still trains it, `ValueError` if the code
        has changed.
        """
        end = f"{trial.id}-{trial.code}"
        name = re.sub(r"[^\w.+=-]+", "_", trial.label)
        folder = next(self.folder.glob(f"runs/*-{end}"), self.folder / f"runs/{name}-{end}")
        row = result_row(trial, folder)
        if row is None:
            if code_of(trial.recipe) != trial.code:
                raise ValueError("the recipe or gpt2_accel has changed: restart the study")
            folder.mkdir(exist_ok=True)
            FileLock(folder / LOCK, 0).acquire().lock.release()
            process = start(trial, folder, slot)
            while process.poll() is None and stop.reason is None:
                time.sleep(PAUSE)
            end_process(process)
            row = result_row(trial, folder)
        if row is not None:
            with self._lock("table"):
                self.rows |= read_table(self.table) | {trial.id: row}
                write_table(self.table, self.rows.values(), row)
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
        """Returns the table of the trials, and the FLOPs of the trials that are left."""
        left = self.left(trials)
        total = sum(trial.flops for trial in left)
        return f"{self.runs_table(trials)}\n\n{len(left)} runs are not recorded: {total:.3g} FLOPs"


def start(trial: Trial, folder: Path, gpu: str) -> subprocess.Popen:
    """Starts or resumes a trial in `folder` and appends its output to `log.txt`. It stops when this
    process ends."""
    command = [sys.executable, str(trial.recipe)]
    command += arguments(trial.changes, folder)
    device = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if gpu:
        device = {"CUDA_VISIBLE_DEVICES": gpu}
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(
            command,
            env=os.environ | device | {DRIVER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only this process, which stops its runs
        )


def end_process(process: subprocess.Popen) -> None:
    """Stops a process and waits for its end; it has `STOP_SECONDS` to save a checkpoint."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    process.kill()
    process.wait()


def failure(folder: Path, code: int) -> str:
    """Returns the exit code of a process without a result, the last line of its output, and the
    path of the output."""
    log = folder / "log.txt"
    last = log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
    return f"exit code {code}, {last} ({log})"

"""The runs of a study: what a run is, a queue that trains several at a time, and the table `runs.csv` that records them.

A study has a folder. Each run is a subprocess, `python RECIPE --SETTING VALUE …`, with a folder below `runs/` and a lock.
Several drivers, also on several machines, may share the folder of a study: a driver trains the runs whose lock it gets.
"""

import csv
import hashlib
import io
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import gpt2_accel.train
from gpt2_accel.checkpoint.find import model_directory, read_status
from gpt2_accel.config import INERT, TrainConfig, check_ranges, setting
from gpt2_accel.data.shards import data_fingerprint, read_manifest
from gpt2_accel.estimate.flops import duration, flops_per_token
from gpt2_accel.estimate.memory import model_shape
from gpt2_accel.evals.results import markdown
from gpt2_accel.hf.convert import local_directory
from gpt2_accel.hf.loss_plot import short_number
from gpt2_accel.models import ModelConfig
from gpt2_accel.runtime.cores import usable_cpus
from gpt2_accel.runtime.device import accelerator_count
from gpt2_accel.runtime.files import LOCK, digest, read_json_lines, remove, write_file
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.runtime.signals import DRIVER, StopRequest

PACKAGE = Path(gpt2_accel.__file__).parent
PAUSE = 0.5  # seconds between looks at a run, or at its lock
GRACE = 30.0  # seconds in which a run that has to stop may save a checkpoint
PROBE = 40  # updates that measure the speed of training
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
# Launch options that affect results. Runs have those of this process, which `accelerate launch` sets.
LAUNCH = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "dynamo": "ACCELERATE_DYNAMO_BACKEND"}

Row = Mapping[str, Any]  # of the table, by `COLUMNS`


@dataclass(frozen=True)
class Trial:
    """A run of a study.

    `label` names its folder; `changes` are the settings on the command line; `resolved` are all settings of the run, which
    the recipe passes to `train`. `code` is the `code_of` the recipe, which has resolved them.
    """

    recipe: Path
    label: str
    changes: Mapping[str, Any]
    resolved: Mapping[str, Any]
    code: str = ""

    def changed(self, label: str, **changes: Any) -> "Trial":
        """Returns the trial with another label and other values of settings on which no other setting depends."""
        own = self.changes | changes
        return replace(self, label=label, changes=own, resolved=self.resolved | changes)

    @cached_property
    def config(self) -> TrainConfig:
        """The settings, without those that only the recipe has."""
        names = TrainConfig.__dataclass_fields__
        return TrainConfig(**{name: v for name, v in self.resolved.items() if name in names})

    @cached_property
    def shape(self) -> ModelConfig:
        """The shape of the model. Raises `ValueError` if it is not possible."""
        manifest = read_manifest(self.config.data_dir)
        return model_shape(self.config, manifest["tokenizer"]["vocab_size"])

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of forward and backward per token."""
        return flops_per_token(self.shape, self.config.tokens_per_sequence)

    @property
    def tokens(self) -> int:
        """The tokens of the run."""
        return self.config.max_steps * self.config.total_batch_size

    @property
    def flops(self) -> float:
        """The FLOPs of the run."""
        return float(self.tokens * self.flops_per_token)

    @cached_property
    def id(self) -> str:
        """The identity of the run: 12 hexadecimal digits of the SHA-256 of the recipe's name, the settings that affect
        results and differ from the defaults, the data, the model of `init_from`, and `LAUNCH`."""
        default = TrainConfig().settings().items()
        own: dict[str, Any] = {"recipe": self.recipe.name}
        for name, value in self.resolved.items():
            if (name, value) not in default and name not in {*INERT, "init_from"}:
                own[name] = value
        if self.config.init_from:
            folder = local_directory(model_directory(self.config.init_from))
            files = [*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"]
            own["files"] = sorted((path.name, digest(path)) for path in files)
        launch = {kind: os.environ.get(name, "no").lower() for kind, name in LAUNCH.items()}
        content = [own, data_fingerprint(self.config.data_dir), launch]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def arguments(changes: Mapping[str, Any], output_dir: Path) -> list[str]:
    """Returns the words of a recipe's command line."""
    words = []
    for name, value in changes.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return [*words, "--output_dir", str(output_dir), "--resume_from", "latest"]


def read_trials(recipe: Path, changes: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Trial]:
    """Returns a trial for each label and its changed settings, with all settings that the recipe trains with.

    The recipe runs up to its call of `train`, and prepares its data if it does that. Raises `ValueError`, with the label, for
    settings that the recipe refuses.
    """
    argv, train = sys.argv, gpt2_accel.train.train
    gpt2_accel.train.train = capture
    sys.path.insert(0, str(recipe.parent))
    code, trials = code_of(recipe), []
    try:
        for label, own in changes:
            CAPTURED.clear()
            sys.argv = [str(recipe), *arguments(own, Path("runs/.settings"))]  # a folder of no run
            message: object = None
            try:
                with redirect_stdout(io.StringIO()):
                    runpy.run_path(str(recipe), run_name="__main__")
            except SystemExit as end:
                message = end.code
            if not CAPTURED:
                reason = message or "the recipe does not train: start it alone to see why"
                raise ValueError(f"{label}: {reason}")
            typed = {name: CAPTURED.get(name, value) for name, value in own.items()}
            trials.append(Trial(recipe, label, typed, {**CAPTURED}, code))
    finally:
        sys.argv, gpt2_accel.train.train = argv, train
    return trials


CAPTURED: dict[str, Any] = {}  # settings


def capture(config: TrainConfig, **_: Any) -> None:
    """Stands in for `train`, also in modules that a recipe imports: keeps the settings in `CAPTURED` and ends the recipe. Raises
    `ValueError` for a shape of the model that is not possible."""
    model_shape(config, read_manifest(config.data_dir)["tokenizer"]["vocab_size"])
    CAPTURED.update(config.settings())
    sys.exit()


def code_of(recipe: Path) -> str:
    """Returns 12 hexadecimal digits of the SHA-256 of a recipe and of this package."""
    paths = [recipe, *sorted(PACKAGE.rglob("*.py"))]
    content = "".join(map(digest, paths))
    return hashlib.sha256(content.encode()).hexdigest()[:12]


# The record


def read_run(trial: Trial, folder: Path) -> Row | None:
    """Returns the row of the run in `folder`; None if it neither finished nor diverged.

    `loss` is the val/loss after the last update in nats per token, infinite if the run diverged. There is no time in a row:
    a run that was killed and continued has the same one.
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
    """Returns the rows of a CSV file by id; empty if there is no such file. Raises `ValueError` for a damaged row."""
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    rows = {}
    for number, row in enumerate(csv.DictReader(text.splitlines()), 1):
        try:
            if None in [*row, *row.values()] or math.isnan(float(row["loss"])):
                raise ValueError
            rows[row["id"]] = row
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: row {number} is damaged: restore the file from a copy, or remove the row"
            ) from error
    return rows


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Writes the CSV file atomically, in the order of the settings, so that the same runs give the same file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: (row["settings"], row["id"])))
    write_file(path, text.getvalue())


# The queue


@dataclass
class StudyOptions:
    """Options that a study's recipe has beside its own. Raises `ValueError` for a value out of its range."""

    output_dir: str | None = setting(None, "folder of the study; default runs/<its name>")
    processes: int | None = setting(None, "runs at a time; default one per GPU, or per CPU core")
    keep_models: bool = setting(False, "keep the weights and checkpoints of recorded runs")
    dry_run: bool = setting(False, "print the runs, their FLOPs and hours, then exit")

    def __post_init__(self) -> None:
        check_ranges(self, positive="processes")
        count = int(os.environ.get("WORLD_SIZE", 1))
        if count > 1:
            raise ValueError(
                f"the launch has {count} processes: a study has one, and starts a run on each GPU itself"
            )
        if find_spec("scipy") is None:
            raise ValueError("a study needs scipy: pip install 'scipy>=1.13'")

    def queue(self, folder: str) -> "Queue":
        """Returns the queue of a study in `output_dir`, by default `folder`."""
        return Queue(Path(self.output_dir or folder), slots()[: self.processes], self.keep_models)


def slots() -> list[str]:
    """Returns where one run at a time trains: the number or UUID of each visible GPU, or an empty text for each CPU core if
    there is no GPU or the launch is for the CPU."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    count = 0 if on_cpu else accelerator_count()
    visible = re.findall(r"[^\s,]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return (visible or [*map(str, range(count))]) if count else [""] * usable_cpus()


@dataclass
class Queue:
    """Trains runs in `folder`, one in each of `slots`, and records them in its `runs.csv`. A run in this table is done.

    With `keep_models` the weights and checkpoints of a recorded run stay. `rows` has the recorded runs by id, `failed` the
    ids of those that failed.
    """

    folder: Path
    slots: Sequence[str]
    keep_models: bool = False

    def __post_init__(self) -> None:
        self.table = self.folder / "runs.csv"
        self.rows = read_table(self.table)
        self.failed: set[str] = set()

    def left(self, trials: Iterable[Trial]) -> list[Trial]:
        """Returns the trials that are neither recorded nor failed."""
        return [t for t in trials if t.id not in self.rows and t.id not in self.failed]

    def metric(self, trial: Trial, name: str = "loss", missing: float = math.inf) -> float:
        """Returns the `loss` or `bits_per_byte` of a trial: infinite if it diverged, `missing` if it has no row. Raises
        `ValueError` if the data's bytes are unknown."""
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

        A run that fails is named, and the others go on. A signal stops the runs with their checkpoints and raises
        `KeyboardInterrupt`. Raises `OSError` if the folder cannot be written, and `ValueError` if the code changes.
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
        """Trains a locked trial, unless its folder has the result of another driver, and records it. A run that other code has
        trained in part starts anew, in another folder.

        Raises `Timeout` if the process of a dead driver still trains it, and `ValueError` if the code has changed."""
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
                for path in [] if self.keep_models else folder.glob(kind):
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
        """Returns the table of the trials, and the time of those that are left, by the speed of the largest, which trains alone:
        over the second half of `PROBE` updates. Raises `ValueError` if it fails."""
        table = self.runs_table(trials)
        left = self.left(trials)
        if not left:
            return f"{table}\n\nall runs are recorded"
        off = {"warmup_steps": 0, "eval_every": 0, "sample_every": 0, "save_every": 0}
        probe = max(trials, key=lambda trial: trial.flops).changed(
            "probe", max_steps=PROBE, log_every=PROBE // 2, **off
        )
        with tempfile.TemporaryDirectory(prefix="probe-", ignore_cleanup_errors=True) as name:
            code = start(probe, Path(name), self.slots[0]).wait()
            *_, line = [{}, *read_json_lines(Path(name, "metrics.jsonl"))]
            speed = line.get("train/tokens_per_second")
            if speed is None:
                raise ValueError(f"the speed was not measured: {failure(Path(name), code)}")
        total = sum(trial.flops for trial in left)
        count = len(self.slots)
        speed *= probe.flops_per_token * count
        return (
            f"{table}\n\n{len(left)} runs are not recorded: {total:.3g} FLOPs, {duration(total / speed)} with {count} at "
            "a time, by the measured speed of a run alone, without evaluations"
        )


def start(trial: Trial, folder: Path, gpu: str) -> subprocess.Popen:
    """Starts a trial in `folder`, where it resumes. Its output is appended to `log.txt`. It stops when this process ends."""
    place = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if gpu:
        place = {"CUDA_VISIBLE_DEVICES": gpu}
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(trial.recipe), *arguments(trial.changes, folder)],
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
    """Returns why a run has no result, by the exit code of its process: the last line of its output, and where that is."""
    log = folder / "log.txt"
    lines = re.findall(r".*\w.*", log.read_text("utf-8", "replace"))
    reason = lines[-1] if lines else f"exit code {code}"
    if code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
    return f"{reason} ({log})"

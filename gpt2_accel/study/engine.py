"""Trains the runs of a study in child processes, one driver per machine. Optuna's storage holds the queue and the results.

Each run is a trial of an Optuna study. A driver takes a waiting trial and trains its run in a folder where it resumes. If a
driver dies, its heartbeats in the database end, and another driver takes its trials.
"""

import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_accel.files import (
    first_line,
    lock_folder,
    read_json_lines,
    remove,
)
from gpt2_accel.progress import Progress
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.study import children
from gpt2_accel.study.children import GRACE, Slot
from gpt2_accel.study.trials import Result, Trial, read_run, read_table, write_table

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

INSTALL = "pip install 'optuna>=5.0' 'scipy>=1.13' 'matplotlib>=3.9'"
POSTGRES = "for postgresql:// pip install 'psycopg[binary]>=3.2'"
PAUSE = 0.1  # seconds between looks at the children
LOOK = 2.0  # seconds between looks at the database
HEARTBEAT = 10  # seconds between signs of life
# Seconds without one after which other drivers take the runs: the children have noticed the silence and ended by then.
STALE = 120
PARTS = 10  # of a run, after which the pruner judges it
PROBE = 40  # updates that measure the speed of training
SHARED = "start each with --storage postgresql://USER@HOST/DATABASE, to share it (docs/studies.md)"
LOG = "log.txt"  # in a run's folder: its terminal output


def require_study() -> None:
    """Raises `ValueError` if a library of the extra `study` is not installed."""
    try:
        import matplotlib  # noqa: F401, missing libraries are named before hours of runs
        import optuna
        import scipy  # noqa: F401
    except ImportError as error:
        raise ValueError(f"a study needs {error.name}: {INSTALL}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


def open_storage(url: str) -> "RDBStorage":
    """Opens Optuna's storage, with heartbeats unless it is SQLite, which one driver uses. Raises `ValueError` if it cannot."""
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
    from sqlalchemy.exc import SQLAlchemyError

    beats = {
        "heartbeat_interval": HEARTBEAT,
        "grace_period": STALE,
        "heartbeat_stale_trial_callback": RetryHeartbeatStaleTrialCallback(),
    }
    full = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)
    place, problem = url.rpartition("@")[-1], ""  # without a password
    for _ in range(4):  # drivers that start together create the same tables
        try:
            return RDBStorage(full, **({} if url.startswith("sqlite") else beats))
        except ImportError as error:
            raise ValueError(f"{place} cannot be opened: {POSTGRES}") from error
        except SQLAlchemyError as error:
            problem = first_line(error)
            time.sleep(1)
    raise ValueError(f"{place} cannot be opened: {problem}")


@dataclass
class Running:
    """A run that a child of this process trains: its trial in the Optuna study, its folder and its place. `part` is the tenth
    after which its loss was last reported, `pruned` whether the pruner has ended it."""

    entry: "FrozenTrial"
    trial: Trial
    folder: Path
    slot: Slot
    process: BaseProcess
    part: int = 0
    pruned: bool = False


@dataclass
class Engine:
    """Trains the runs of a study in `folder` and records them in the database `storage`, by default a file of the folder, and
    in the CSV file `table`. A run in the table is done.

    `precision` is that of the runs. With `keep_models` the weights and checkpoints of a recorded run stay. `results` has the
    recorded runs by id, `failed` the reasons of those that failed, `pruned` the last loss of those that the pruner ended.
    """

    folder: Path
    table: Path
    slots: Sequence[Slot]
    storage: str | None = None
    precision: Mapping[str, str] = field(default_factory=dict)
    keep_models: bool = False

    def __post_init__(self) -> None:
        self.results = read_table(self.table)
        self.failed: dict[str, str] = {}
        self.pruned: dict[str, float] = {}
        self._running: list[Running] = []
        self._beaten = 0.0

    def folder_of(self, id: str, label: str = "run") -> Path:
        """Returns the folder of a run: the one that ends with its id, else a new one."""
        runs, name = self.folder / "runs", re.sub(r"[^\w.+=-]+", "_", label)
        return next(runs.glob(f"*-{id}"), runs / f"{name}-{id}")

    def knows(self, trial: Trial) -> bool:
        """Whether a trial is recorded, has failed, or was pruned."""
        return trial.id in {*self.results, *self.failed, *self.pruned}

    def run(
        self,
        wanted: Callable[[], Sequence[Trial]],
        name: str = "runs",
        pruner: "BasePruner | None" = None,
        least: int = 0,
    ) -> None:
        """Trains the trials that `wanted` returns, until it returns none that is not known. It is called again when there are
        new results, and follows from them only: each driver has its own. `name` is that of the Optuna study, whose `pruner`
        ends hopeless runs. `least` is the number of trials that it will return at least.

        A run that fails is named, and the others go on. A signal stops the children with their checkpoints and raises
        `KeyboardInterrupt`. Raises `OSError` if another driver uses the same SQLite file, `ValueError` if the database does
        not answer.
        """
        require_study()
        from optuna.exceptions import StorageInternalError

        wanted()  # raises what it has to before a file is written
        try:
            with ExitStack() as stack:
                if self.storage is None:
                    self._lock(stack)
                stop = stack.enter_context(StopRequest())
                stack.callback(self._stop)
                self._train(wanted, self._open(name, pruner), stop, least)
        except StorageInternalError as error:
            problem = first_line(error.__cause__ or error)
            raise ValueError(
                f"the database does not answer ({problem}): the same command continues"
            ) from error

    def _lock(self, stack: ExitStack) -> None:
        """Locks the folder. The children of a driver that was killed hold its lock until they have ended."""
        try:
            stack.enter_context(lock_folder(self.folder, wait=1.5 * GRACE))
        except OSError as error:
            raise error if error.errno else OSError(f"{error}, or {SHARED}") from error

    def _train(
        self, wanted: Callable[[], Sequence[Trial]], study: "Study", stop: StopRequest, least: int
    ) -> None:
        known, before, shown = -1, None, 0
        with Progress("runs", None, unit="run") as bar:
            while True:
                self._read(study)
                if known != (known := len({*self.results, *self.failed, *self.pruned})):
                    trials = {trial.id: trial for trial in wanted()}
                    if self.results:
                        write_table(self.table, self.results.values())
                left = {id: trial for id, trial in trials.items() if not self.knows(trial)}
                done = len(trials) - len(left)
                before = done if before is None else before  # recorded earlier
                bar.total = max(least, len(trials)) - before
                bar.update(done - before - shown)
                shown = done - before
                if not left:
                    return
                self._fill(study, left)
                self._wait(study, stop)

    def _open(self, name: str, pruner: "BasePruner | None") -> "Study":
        """Returns the Optuna study `name`."""
        import optuna

        self._database = open_storage(self.storage or f"sqlite:///{self.folder / 'study.db'}")
        study = optuna.create_study(
            storage=self._database,
            study_name=f"{self.folder.resolve().name}: {name}",
            load_if_exists=True,
            pruner=pruner or optuna.pruners.NopPruner(),
        )
        for entry in study.trials:
            if self.storage is None and entry.state.name == "RUNNING":  # its driver was killed
                self._set(entry, "WAITING")
        return study

    def _read(self, study: "Study") -> None:
        """Takes what all drivers have recorded."""
        for entry in study.get_trials(deepcopy=False):
            if entry.state.name == "COMPLETE":
                self.results[entry.user_attrs["run"]] = Result(**entry.user_attrs["result"])
            elif entry.state.name == "PRUNED":
                [*_, last] = entry.intermediate_values.values()
                self.pruned[entry.user_attrs["run"]] = last
        for running in self._running:
            self._judge(study, running)

    def _judge(self, study: "Study", running: Running) -> None:
        """Reports the loss of a run after each tenth of it, and stops the run if it is hopeless."""
        import optuna

        trial = optuna.trial.Trial(study, running.entry._trial_id)
        for line in read_json_lines(running.folder / "metrics.jsonl"):
            part, loss = PARTS * line["tokens"] // running.trial.tokens, line.get("val/loss")
            if loss is not None and running.part < part < PARTS:
                running.part = part
                with suppress(optuna.exceptions.UpdateFinishedTrialError):
                    trial.report(loss, part)
                if trial.should_prune():
                    running.pruned = True
                    running.process.terminate()

    def _fill(self, study: "Study", left: Mapping[str, Trial]) -> None:
        """Enqueues the runs that are left, and starts waiting ones in the free slots."""
        states, entries = ("WAITING", "RUNNING"), study.get_trials(deepcopy=False)
        there = {entry.user_attrs["run"] for entry in entries if entry.state.name in states}
        for id, trial in left.items():
            if id not in there:
                study.enqueue_trial({}, user_attrs={"run": id, "label": trial.label})
        for entry in study.get_trials(deepcopy=False):
            id, here = entry.user_attrs["run"], [running.trial.id for running in self._running]
            busy = [running.slot for running in self._running]
            free = next((slot for slot in self.slots if slot not in busy), None)
            if free and entry.state.name == "WAITING" and id in left and id not in here:
                self._start(study, entry, left[id], free)

    def _start(self, study: "Study", entry: "FrozenTrial", trial: Trial, slot: Slot) -> None:
        """Starts a run, unless another driver has it."""
        if self.storage is not None:
            self._database.record_heartbeat(entry._trial_id)  # before it runs, or it is never stale
        if not self._set(entry, "RUNNING"):
            return
        # Drivers that look at the same time enqueue a run twice: the lowest number counts.
        for other in study.get_trials(deepcopy=False):
            same = other.user_attrs["run"] == trial.id and other.number < entry.number
            if same and other.state.name != "FAIL":
                self._set(entry, "FAIL")
                return
        folder = self.folder_of(trial.id, trial.label)
        process = self.child(trial, folder, slot)
        self._running.append(Running(entry, trial, folder, slot, process))

    def child(self, trial: Trial, folder: Path, slot: Slot) -> BaseProcess:
        """Starts a trial in `folder`, where it resumes."""
        words, log = trial.arguments(folder), folder / LOG
        return children.start(children.train_recipe, trial.recipe, words, trial.files, slot, log)

    def _wait(self, study: "Study", stop: StopRequest) -> None:
        """Waits until a run has ended, or for `LOOK` seconds. Shows and looks for signs of life."""
        import optuna

        until = time.monotonic() + LOOK
        while time.monotonic() < until:
            if stop.reason is not None:
                print(f"stopped ({stop.reason}): the same command continues", flush=True)
                raise KeyboardInterrupt
            if time.monotonic() > self._beaten + HEARTBEAT:
                for running in [*self._running] if self.storage is not None else []:
                    self._database.record_heartbeat(running.entry._trial_id)
                    state = self._database.get_trial(running.entry._trial_id).state.name
                    if state != "RUNNING":  # this driver was silent, and another has taken it
                        children.stop([running.process], 0)
                        self._running.remove(running)
                self._beaten = children.alive.value = time.monotonic()
                optuna.storages.fail_stale_trials(study)
            ended = [running for running in self._running if not running.process.is_alive()]
            for running in ended:
                self._end(running)
            if ended:
                return
            time.sleep(PAUSE)

    def _end(self, running: Running, stopped: bool = False) -> None:
        """Records a run whose child has ended. One that was stopped waits again, one that failed is named."""
        self._running.remove(running)
        entry, id, code = running.entry, running.trial.id, running.process.exitcode
        try:
            found, reason = read_run(running.trial, running.folder), ""
        except ValueError as error:
            found, reason = None, str(error)
        last = last_line(running.folder / LOG)
        stopped |= code in (0, -signal.SIGTERM) or "is in use by another process" in last
        if found is not None:
            self.results[id] = found
            self._set(entry, "COMPLETE", found)
            if not self.keep_models:
                remove_weights(running.folder)
        elif running.pruned:
            self._set(entry, "PRUNED")
            remove_weights(running.folder)
        elif stopped and not reason:
            self._set(entry, "WAITING")
        else:
            killed = f"killed by {signal.Signals(-code).name}" if code < 0 else last
            self.failed[id] = reason or killed or f"exit code {code}"
            self._set(entry, "FAIL")
            log = running.folder / LOG
            print(f"run {id} failed: {self.failed[id]} ({log})", file=sys.stderr, flush=True)

    def _set(self, entry: "FrozenTrial", state: str, result: Result | None = None) -> bool:
        """Sets the state of an entry. Returns False if another driver has taken or ended it."""
        import optuna

        id, state = entry._trial_id, optuna.trial.TrialState[state]
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            if result is not None:
                self._database.set_trial_user_attr(id, "result", asdict(result))
            return self._database.set_trial_state_values(id, state, result and [result.loss])
        return False

    def _stop(self) -> None:
        """Stops the children that still train, with their checkpoints, and lets any driver take their runs."""
        children.stop([running.process for running in self._running])
        for running in [*self._running]:
            self._end(running, stopped=True)

    def tokens_per_second(self, trial: Trial) -> float:
        """Returns the tokens per second of a run that trains alone, over the second half of `PROBE` updates. Raises
        `ValueError` if it fails."""
        off = {"eval_every": 0, "sample_every": 0, "save_every": 0, "log_every": PROBE // 2}
        probe = trial.lasting(PROBE).changed(**off)
        with tempfile.TemporaryDirectory(prefix="probe-", ignore_cleanup_errors=True) as place:
            process = self.child(probe, Path(place), self.slots[0])
            while process.is_alive():
                children.alive.value = time.monotonic()
                process.join(1)
            lines = read_json_lines(f"{place}/metrics.jsonl")
            if process.exitcode or not lines:
                raise ValueError(f"the speed was not measured: {last_line(Path(place, LOG))}")
        return lines[-1]["train/tokens_per_second"]


def last_line(path: Path) -> str:
    """Returns the last line of a file that has words; empty if there is none."""
    lines = path.read_text("utf-8", "replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if re.search(r"\w", line)), "")


def remove_weights(folder: Path) -> None:
    """Removes the checkpoints and the model of a run; its metrics stay."""
    for kind in ("checkpoint-*", "best", "latest", "*.safetensors"):
        for path in folder.glob(kind):
            remove(path)

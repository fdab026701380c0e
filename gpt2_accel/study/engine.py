"""Trains the runs of a study, one driver per machine. Optuna's storage holds the queue and the results.

A run is a trial of an Optuna study. A driver enqueues each run that is neither waiting, nor running, nor recorded, and
`optimize` takes one for each GPU or CPU core. A run trains in a folder of its own, which its trainer locks, and where it
resumes: also if it was stopped, or if another driver takes it after its own has died.
"""

import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

from gpt2_accel.checkpoint.find import read_status
from gpt2_accel.estimate.flops import duration
from gpt2_accel.files import first_line, lock_folder, read_json_lines, remove
from gpt2_accel.progress import Progress
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.study import children
from gpt2_accel.study.trials import (
    Result,
    Trial,
    read_run,
    read_table,
    recipe_source,
    write_table,
)

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.storages import RDBStorage
    from optuna.trial import Trial as OptunaTrial

INSTALL = "pip install 'optuna>=5.0' 'scipy>=1.13' 'matplotlib>=3.9'"
POSTGRES = "for postgresql:// pip install 'psycopg[binary]>=3.2'"
PAUSE = 0.5  # seconds between looks at a run
LOOK = 2.0  # seconds between looks at the database while other drivers have all runs
HEARTBEAT = 10  # seconds between Optuna's signs of life of a run in the database
STALE = 120  # seconds without one after which other drivers take a run
PARTS = 10  # of a run, after which the pruner judges it
PROBE = 40  # updates that measure the speed of training
LOG = "log.txt"  # in a run's folder: its terminal output


def require_study() -> None:
    """Raises `ValueError` if a library of the extra `study` is not installed."""
    try:
        import matplotlib  # noqa: F401, missing libraries are named before hours of runs
        import optuna
        import scipy  # noqa: F401
    except ImportError as error:
        raise ValueError(f"a study needs {error.name}: {INSTALL}") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a run that failed is named here
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


def open_storage(url: str) -> "RDBStorage":
    """Opens Optuna's storage, with heartbeats unless it is SQLite, which one driver uses. Raises `ValueError` if it cannot."""
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError

    beats = {"heartbeat_interval": HEARTBEAT, "grace_period": STALE}
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


class Ended(Exception):
    """A run ended without a result: it failed, was stopped, or another driver has it."""


@dataclass
class Engine:
    """Trains the runs of a study in `folder`, one in each of `slots` with a number of `processes`, and records them in the
    database `storage` and in the CSV file `table`. A run in the table is done.

    `precision` is that of the runs. With `keep_models` the weights and checkpoints of a recorded run stay. `results` has the
    recorded runs by id, `failed` the ids of those that failed, `pruned` the last loss of those that the pruner ended.
    """

    folder: Path
    table: Path
    slots: Sequence[str]
    storage: str
    processes: int = 1
    precision: Mapping[str, str] = field(default_factory=dict)
    keep_models: bool = False

    def __post_init__(self) -> None:
        self.shared = not self.storage.startswith("sqlite")  # by several drivers
        self.results = read_table(self.table)
        self.failed: set[str] = set()
        self.pruned: dict[str, float] = {}

    def folder_of(self, trial: Trial) -> Path:
        """Returns the folder of a run: the one that ends with its id, else a new one."""
        runs, name = self.folder / "runs", re.sub(r"[^\w.+=-]+", "_", trial.label)
        return next(runs.glob(f"*-{trial.id}"), runs / f"{name}-{trial.id}")

    def knows(self, trial: Trial) -> bool:
        """Whether a trial is recorded, has failed, or was pruned."""
        return trial.id in {*self.results, *self.failed, *self.pruned}

    def run(
        self, trials: Sequence[Trial], name: str = "runs", pruner: "BasePruner | None" = None
    ) -> None:
        """Trains trials, as far as they are not known, or waits until other drivers have. `name` is that of the Optuna study,
        whose `pruner` ends hopeless runs.

        A run that fails is named, and the others go on. A signal stops the runs with their checkpoints and raises
        `KeyboardInterrupt`. Raises `OSError` if another driver uses the same SQLite file, `ValueError` if the database does
        not answer.
        """
        require_study()
        from optuna.exceptions import StorageInternalError

        try:
            with ExitStack() as stack:
                if not self.shared:
                    stack.enter_context(lock_folder(self.folder))
                stop = stack.enter_context(StopRequest())
                self._train(trials, self._open(name, pruner), stop)
        except StorageInternalError as error:
            problem = first_line(error.__cause__ or error)
            raise ValueError(
                f"the database does not answer ({problem}): the same command continues"
            ) from error

    def _open(self, name: str, pruner: "BasePruner | None") -> "Study":
        """Returns the Optuna study `name`."""
        import optuna

        study = optuna.create_study(
            storage=open_storage(self.storage),
            study_name=f"{self.folder.resolve().name}: {name}",
            load_if_exists=True,
            pruner=pruner or optuna.pruners.NopPruner(),
        )
        if not self.shared:  # the driver of what still runs was killed
            for entry in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
                study.tell(entry.number, state=optuna.trial.TrialState.FAIL)
        return study

    def _train(self, trials: Sequence[Trial], study: "Study", stop: StopRequest) -> None:
        from optuna.exceptions import StorageInternalError
        from optuna.storages import fail_stale_trials

        self._read(study)
        left = {trial.id: trial for trial in trials if not self.knows(trial)}
        free, lock, total = SimpleQueue(), Lock(), len(left)
        for slot in self.slots:
            free.put(slot)
        with Progress("runs", total, unit="run") as bar:

            def record(*_: object) -> None:
                with lock:
                    self._read(study)
                    ended = [id for id, trial in left.items() if self.knows(trial)]
                    bar.update(len([left.pop(id) for id in ended]))

            while left:
                if waiting := self._enqueue(study, left):
                    train = partial(self._train_one, left=left, free=free, stop=stop)
                    both = {"n_trials": waiting, "n_jobs": len(self.slots)}
                    try:
                        study.optimize(train, **both, catch=Ended, callbacks=[record])
                    except (ValueError, AssertionError) as error:  # of Optuna's end of a trial
                        lost = isinstance(error.__context__, StorageInternalError)
                        if not lost and "Cannot tell" not in str(error):  # another took the run
                            raise
                if stop.reason is not None:
                    print(f"stopped ({stop.reason}): the same command continues", flush=True)
                    raise KeyboardInterrupt
                time.sleep(LOOK if not waiting else 0)
                fail_stale_trials(study)
                record()

    def _read(self, study: "Study") -> None:
        """Takes what all drivers have recorded, and writes the table."""
        for entry in study.get_trials(deepcopy=False):
            if entry.state.name == "COMPLETE":
                self.results[entry.user_attrs["run"]] = Result(**entry.user_attrs["result"])
            elif entry.state.name == "PRUNED":
                self.pruned[entry.user_attrs["run"]] = entry.value
        if self.results:
            write_table(self.table, self.results.values())

    def _enqueue(self, study: "Study", left: Mapping[str, Trial]) -> int:
        """Enqueues the runs that are neither waiting nor running; returns the number of trials that wait."""
        states = {"WAITING": [], "RUNNING": []}
        for entry in study.get_trials(deepcopy=False):
            states.get(entry.state.name, []).append(entry.user_attrs.get("run"))
        there = {*states["WAITING"], *states["RUNNING"]}
        missing = [trial for id, trial in left.items() if id not in there]
        for trial in missing:
            study.enqueue_trial({}, user_attrs={"run": trial.id, "label": trial.label})
        return len(states["WAITING"]) + len(missing)

    def _train_one(
        self, entry: "OptunaTrial", left: Mapping[str, Trial], free: SimpleQueue, stop: StopRequest
    ) -> float:
        """Trains the run of a trial that `optimize` has taken, and returns its loss. Raises `Ended` without one, and
        `TrialPruned` if the pruner ends it."""
        from optuna import TrialPruned

        trial = left.get(entry.user_attrs.get("run"))
        if stop.reason is not None or not entry.user_attrs:  # nothing waits any more
            entry.study.stop()
            raise Ended
        if trial is None or is_twin(entry):
            raise Ended
        folder, slot, reported = self.folder_of(trial), free.get(), set()
        process = self.child(trial, folder, slot)
        try:
            while process.is_alive() and stop.reason is None:
                process.join(PAUSE)
                if is_hopeless(entry, trial, folder, reported):
                    children.stop(process)
                    remove_weights(folder)
                    raise TrialPruned
        finally:
            children.stop(process)
            free.put(slot)
        found, reason = ending(trial, folder, process.exitcode)
        if found is None:
            if reason and stop.reason is None:
                self.failed.add(trial.id)
                text = f"run {trial.id} failed: {reason} ({folder / LOG})"
                print(text, file=sys.stderr, flush=True)
            raise Ended
        self.results[trial.id] = found
        if not self.keep_models:
            remove_weights(folder)
        entry.set_user_attr("result", asdict(found))
        return found.loss

    def child(self, trial: Trial, folder: Path, slot: str) -> BaseProcess:
        """Starts a trial in `folder`, where it resumes."""
        recipe = trial.recipe, recipe_source(trial.recipe), trial.arguments(folder), trial.files
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
                raise ValueError(f"the speed was not measured: {last_line(folder / LOG)}")
        total, count = sum(trial.flops for trial in left), len(self.slots)
        speed = lines[-1]["train/tokens_per_second"] * sample.flops_per_token * count
        return (
            f"{len(left)} runs are not recorded: {total:.3g} FLOPs, {duration(total / speed)} with {count} at a time, by the "
            "measured speed of a run alone, without evaluations"
        )


def is_twin(entry: "OptunaTrial") -> bool:
    """Whether an earlier trial has the same run: drivers that look at the same time enqueue it twice."""
    return any(
        other.user_attrs.get("run") == entry.user_attrs["run"] and other.number < entry.number
        for other in entry.study.get_trials(deepcopy=False)
        if other.state.name in ("RUNNING", "COMPLETE")
    )


def is_hopeless(entry: "OptunaTrial", trial: Trial, folder: Path, reported: set[int]) -> bool:
    """Reports the loss after each tenth of a run to Optuna, the parts that are not `reported` yet; returns whether the pruner
    ends the run."""
    for line in read_json_lines(folder / "metrics.jsonl"):
        part, loss = PARTS * line["tokens"] // trial.tokens, line.get("val/loss")
        if loss is not None and part < PARTS and part not in reported:
            entry.report(loss, part)
            reported.add(part)
    return entry.should_prune()


def ending(trial: Trial, folder: Path, code: int) -> tuple[Result | None, str]:
    """Returns the result of a run whose process has ended with an exit code, or None and what it failed of: empty if it was
    stopped, or if another process has its folder."""
    try:
        if found := read_run(trial, folder):
            return found, ""
    except ValueError as error:
        return None, str(error)
    last, state = last_line(folder / LOG), read_status(folder).get("state")
    stopped = code == -signal.SIGTERM or (code == 0 and state == "stopped")
    if stopped or "is in use by another process" in last:
        return None, ""
    if code < 0:
        return None, f"killed by {signal.Signals(-code).name}"
    return None, last or f"exit code {code}"


def last_line(path: Path) -> str:
    """Returns the last line of a file that has words; empty if there is none."""
    lines = path.read_text("utf-8", "replace").split("\n") if path.exists() else []
    return next((line for line in reversed(lines) if re.search(r"\w", line)), "")


def remove_weights(folder: Path) -> None:
    """Removes the checkpoints and the model of a run; its metrics stay."""
    for kind in ("checkpoint-*", "best", "latest", "*.safetensors"):
        for path in folder.glob(kind):
            remove(path)

"""Trains the runs of a study: one child process per GPU or CPU core, in folders that resume, recorded in one table.

A plan is a generator that yields the runs it needs next and receives their results, so that several plans, such as the
tuning of several variants, share the slots.
"""

import glob
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gpt2_accel.checkpoint.find import read_status
from gpt2_accel.config import TrainConfig, load_yaml, plain_text
from gpt2_accel.data.shards import data_fingerprint, read_manifest
from gpt2_accel.estimate.dry_run import model_shape
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.progress import Progress
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.study.children import Child, Slot
from gpt2_accel.study.claims import HEARTBEAT, Claim, claim, holder
from gpt2_accel.study.table import (
    Result,
    code_fingerprint,
    identify,
    read_result,
    read_table,
    record,
    write_table,
)

PAUSE = 0.1  # seconds between looks at the children
LOOK = 5.0  # seconds between looks at what other processes recorded
LOG = "log.txt"  # in a run's folder: its terminal output
WARMUP = "warmup_share"  # of the updates; may stand for warmup_steps until the number of updates is known
# Settings that do not change a run's numbers.
INERT = [
    "data_dir",  # its fingerprint counts
    "output_dir",
    "resume_from",
    "save_every",
    "keep_last",
    "keep_every",
    "keep_best",
    "report_to",
    "sample_every",
    "sample_prompts",
    "sample_tokens",
    "push_to_hub",
    "hub_strategy",
    "max_hours",
    "log_every",
    "ignore_changes",
]


@dataclass(frozen=True)
class Trial:
    """A run of a study: a recipe, its command line, and the settings that follow from it.

    `changes` are the settings on the command line; `resolved` are all settings of the run, as `TrainConfig` has them.
    """

    recipe: Path
    changes: Mapping[str, Any]
    resolved: Mapping[str, Any]

    def changed(self, **changes: Any) -> "Trial":
        """Returns the trial with other values of settings of `TrainConfig`. Raises `ValueError` for one that is out of its
        range."""
        trial = Trial(self.recipe, {**self.changes, **changes}, {**self.resolved, **changes})
        assert trial.config
        return trial

    def lasting(self, updates: int) -> "Trial":
        """Returns the trial with this number of updates, and the warmup steps of its `WARMUP`, if it has one."""
        changes: dict[str, Any] = {"max_steps": updates}
        if (share := self.resolved.get(WARMUP)) is not None:
            changes["warmup_steps"] = round(share * updates)
        kept = [
            {n: v for n, v in own.items() if n != WARMUP} for own in (self.changes, self.resolved)
        ]
        return Trial(self.recipe, {**kept[0], **changes}, {**kept[1], **changes})

    @cached_property
    def config(self) -> TrainConfig:
        """The settings, without those that only the recipe has."""
        names = TrainConfig.__dataclass_fields__
        return TrainConfig(**{name: v for name, v in self.resolved.items() if name in names})

    @cached_property
    def flops_per_token(self) -> int:
        """The FLOPs of forward and backward per token. Raises `ValueError` if the model's shape is not possible."""
        vocab_size = read_manifest(self.config.data_dir)["tokenizer"]["vocab_size"]
        return flops_per_token(
            model_shape(self.config, vocab_size), self.config.tokens_per_sequence
        )

    @cached_property
    def key(self) -> str:
        """What tells trials apart without a look at their data."""
        return repr((self.recipe, sorted(self.resolved.items())))

    @property
    def flops(self) -> float:
        """The FLOPs of the whole run."""
        config = self.config
        return float(config.max_steps * config.total_batch_size * self.flops_per_token)

    def arguments(self, output_dir: Path) -> list[str]:
        """Returns the command line of the recipe."""
        settings = {**self.changes, "output_dir": str(output_dir), "resume_from": "latest"}
        return [word for name, v in settings.items() for word in (f"--{name}", *as_words(name, v))]

    def id(self, precision: Mapping[str, str]) -> str:
        """Returns what identifies the run: its settings that differ from the defaults and change numbers, its data, its
        precision."""
        default = TrainConfig().settings()
        missing = object()
        own = {
            name: value
            for name, value in self.resolved.items()
            if name not in INERT and default.get(name, missing) != value
        }
        data = data_fingerprint(self.config.data_dir)
        return identify(own | {"recipe": self.recipe.name}, data, precision)


def as_words(name: str, value: Any) -> list[str]:
    """Returns the value of a setting as words of a command line. Raises `ValueError` for what is no scalar or list of scalars."""
    values = value if isinstance(value, list) else [value]
    try:
        return [plain_text(item) for item in values]
    except TypeError as error:
        raise ValueError(f"{name} cannot be {value!r}") from error


Answer = TypeVar("Answer")
Plan = Generator[Sequence[Trial], Sequence[Result | None], Answer]
"""Yields the trials that it needs next, receives their results, None for one that failed, and returns an answer."""


def grid(trials: Iterable[Trial]) -> Plan[list[Result | None]]:
    """The plan of trials that do not depend on each other; returns their results."""
    return (yield list(trials))


@dataclass
class Running:
    """A run that a child of this process trains."""

    trial: Trial
    id: str
    child: Child
    claim: Claim
    renewed: float = field(default_factory=time.monotonic)


@dataclass
class Engine:
    """Trains the runs of a study in `folder` and records them in the CSV file `table`.

    `env` holds the environment variables of the launch, `precision` what of them changes numbers. With `keep_models` the
    weights and checkpoints of a recorded run stay. `part` (i, n) trains only every n-th run of a grid from the i-th on.
    """

    folder: Path
    table: Path
    slots: Sequence[Slot]
    env: Mapping[str, str] = field(default_factory=dict)
    precision: Mapping[str, str] = field(default_factory=dict)
    keep_models: bool = False
    part: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        self.results: dict[str, Result] = {}
        parts = self.table.parent.glob(f"{glob.escape(self.table.stem)}-*-of-*.csv")
        for path in (*sorted(parts), self.table):
            self.results |= read_table(path)
        self.failed: dict[str, str] = {}
        self._running: list[Running] = []
        self._ids: dict[str, str] = {}
        self._said: set[str] = set()
        self._others: set[str] = set()

    def identify(self, trial: Trial) -> str:
        """Returns the id of a trial."""
        if trial.key not in self._ids:
            code_fingerprint(trial.recipe)  # now, before a file changes
            self._ids[trial.key] = trial.id(self.precision)
        return self._ids[trial.key]

    def folder_of(self, id: str) -> Path:
        """Returns the folder of a run."""
        return self.folder / "runs" / id

    def child(
        self,
        trial: Trial,
        folder: Path,
        slot: Slot,
        superseded: Callable[[], bool] = lambda: False,
    ) -> Child:
        """Starts a trial in `folder`, whatever is recorded; see `Child`."""
        arguments = trial.arguments(folder)
        return Child(trial.recipe, arguments, slot, self.env, folder / LOG, superseded)

    def run(self, plans: Sequence[Plan[Answer]]) -> list[Answer]:
        """Trains what the plans ask for; returns their answers.

        A run that fails is named, and the others go on. A signal stops the children with their checkpoints and raises
        `KeyboardInterrupt`. The progress bar counts FLOPs, to those that the plans need as far as they know.
        """
        waiting = {plan: next(plan) for plan in plans}
        self._divide(trial for trials in waiting.values() for trial in trials)
        answers: dict[Plan, Answer] = {}
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            stack.callback(self._stop_children)
            bar = stack.enter_context(Progress("FLOPs", None, unit="FLOP", unit_scale=True))
            runs, flops, looked = 0, 0.0, 0.0
            while waiting:
                for plan, trials in list(waiting.items()):
                    if not all(self.knows(trial) for trial in trials):
                        continue
                    try:
                        found = [self.results.get(self.identify(trial)) for trial in trials]
                        waiting[plan] = plan.send(found)
                    except StopIteration as end:
                        answers[plan] = end.value
                        del waiting[plan]
                wanted = [trial for trials in waiting.values() for trial in trials]
                if time.monotonic() - looked > LOOK:
                    looked = time.monotonic()
                    self._read_records(wanted)
                left = {self.identify(t): t.flops for t in wanted if not self.knows(t)}
                bar.expect(flops + sum(left.values()))
                if ended := self._reap():
                    runs, flops = runs + len(ended), flops + sum(trial.flops for trial in ended)
                    bar.advance(
                        sum(trial.flops for trial in ended), f"{runs} run{'s' * (runs > 1)}"
                    )
                started = self._fill(wanted)
                if stop.reason is not None:
                    print(f"stopped ({stop.reason}): the same command continues", flush=True)
                    raise KeyboardInterrupt
                if waiting and not (ended or started):
                    time.sleep(PAUSE)
        self._write()
        return [answers[plan] for plan in plans]

    def knows(self, trial: Trial) -> bool:
        """Whether a trial is recorded, has failed, or is another part's."""
        id = self.identify(trial)
        return id in self.results or id in self.failed or id in self._others

    def _divide(self, trials: Iterable[Trial]) -> None:
        """Leaves the runs of other parts to them. The order of the ids decides, so all parts agree."""
        number, count = self.part
        ids = sorted({self.identify(trial) for trial in trials})
        self._others = {id for place, id in enumerate(ids) if place % count != number}

    def _fill(self, wanted: Sequence[Trial]) -> int:
        """Starts wanted runs in free slots; returns how many."""
        started = 0
        busy = [running.child.slot for running in self._running]
        free = [slot for slot in self.slots if slot not in busy]
        for trial in wanted:
            id = self.identify(trial)
            if not free:
                break
            if self.knows(trial) or any(running.id == id for running in self._running):
                continue
            folder = self.folder_of(id)
            own = claim(folder)
            if own is None:
                self._say_who(id, folder)
                continue
            if self._record(trial, id):  # a kill came between the run's end and its record
                own.release()
                continue
            child = self.child(trial, folder, free.pop(0), own.superseded)
            self._running.append(Running(trial, id, child, own))
            started += 1
        return started

    def _reap(self) -> list[Trial]:
        """Records runs whose children have ended, and returns those that finished or failed. Renews the claims of the
        others."""
        ended = []
        for running in list(self._running):
            child = running.child
            if not child.ended():
                if running.claim.superseded():
                    child.stop()
                elif time.monotonic() - running.renewed > HEARTBEAT:
                    running.renewed = time.monotonic()
                    running.claim.renew()
                continue
            self._running.remove(running)
            if running.claim.superseded():
                print(f"run {running.id} was taken by {holder(self.folder_of(running.id))}")
            else:
                if not self._record(running.trial, running.id):
                    self._fail(running)
                ended.append(running.trial)
            running.claim.release()
        return ended

    def _record(self, trial: Trial, id: str) -> bool:
        """Records a run that has ended, and removes its weights. Returns whether it has ended, with the trial's settings."""
        folder = self.folder_of(id)
        if other_settings(trial, folder):
            return False
        changes = {
            name: v for name, v in trial.changes.items() if name not in INERT or name == "data_dir"
        }
        code = code_fingerprint(trial.recipe)
        found = read_result(folder) or record(folder, id, changes, trial.flops_per_token, code)
        if found is None:
            return False
        self.results[id] = found
        self._write()
        if not self.keep_models:
            remove_weights(folder)
        return True

    def _read_records(self, wanted: Iterable[Trial]) -> None:
        """Takes what other processes have recorded."""
        for id in {self.identify(trial) for trial in wanted} - self.results.keys():
            if (found := read_result(self.folder_of(id))) is not None:
                self.results[id] = found

    def _write(self) -> None:
        """Writes the table, with the rows of other processes. The one that writes last has seen all records."""
        self.results = read_table(self.table) | self.results
        if self.results:
            write_table(self.table, self.results.values())

    def _fail(self, running: Running) -> None:
        """Notes that a run has failed."""
        folder = self.folder_of(running.id)
        status = read_status(folder)
        code = running.child.code or 0
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        other = ", ".join(other_settings(running.trial, folder))
        changed = (
            other and f"it trained with another {other}, since its recipe changed: remove {folder}"
        )
        reason = (
            changed
            or status.get("reason")
            or killed
            or last_line(folder / LOG)
            or f"exit code {code}"
        )
        self.failed[running.id] = reason
        print(f"run {running.id} failed: {reason} ({folder / LOG})", file=sys.stderr, flush=True)

    def _stop_children(self) -> None:
        """Stops the children that still train, with their checkpoints, and releases their claims."""
        for running in self._running:
            running.child.stop()
        while not all(running.child.ended() for running in self._running):
            time.sleep(PAUSE)
        for running in self._running:
            if not running.claim.superseded():
                self._record(running.trial, running.id)
            running.claim.release()

    def _say_who(self, id: str, folder: Path) -> None:
        """Prints, once, who trains a run that this process waits for."""
        if id not in self._said:
            self._said.add(id)
            print(f"run {id} is trained by {holder(folder)}", flush=True)


def other_settings(trial: Trial, folder: Path) -> list[str]:
    """Returns the settings that change numbers and that the run in `folder` has other values of than the trial."""
    path = folder / "config.yaml"
    own = load_yaml(str(path), "config") if path.exists() else {}
    return [n for n, v in trial.resolved.items() if n not in INERT and own.get(n, v) != v]


def remove_weights(folder: Path) -> None:
    """Removes the checkpoints and the model of a run; its metrics stay."""
    for path in (*folder.glob("checkpoint-*"), folder / "best", folder / "latest"):
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("*.safetensors"):
        path.unlink(missing_ok=True)


def last_line(path: Path) -> str:
    """Returns the last line of a file that is not empty."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")

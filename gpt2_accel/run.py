"""A training run: what it is, what a checkpoint keeps of it, what the loop and the callbacks call.

`setup.py` builds it, `lifecycle.py` starts and ends it. All methods are called by all ranks, unless they say otherwise.
"""

import gc
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from gpt2_accel.checkpoint.find import read_state
from gpt2_accel.checkpoint.state_dict import (
    TrainingState,
    full_model,
    full_tensor,
    gather_to_host,
)
from gpt2_accel.checkpoint.writer import CheckpointWriter
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import Batch, EvalLoader, TrainLoader
from gpt2_accel.data.prefetch import PrefetchLoader
from gpt2_accel.data.shards import data_fingerprint
from gpt2_accel.evals import Evaluation
from gpt2_accel.evals.validation import Measure, validation_loss
from gpt2_accel.hf.comparison import ModelFiles
from gpt2_accel.models import LanguageModel
from gpt2_accel.optim import evaluating_optimizer
from gpt2_accel.runtime.device import device_name, peak_flops
from gpt2_accel.runtime.files import sync
from gpt2_accel.runtime.guard import MAX_BAD_STEPS, AnomalyGuard
from gpt2_accel.runtime.log import RunLog, Status
from gpt2_accel.runtime.metadata import changed_settings, describe_run, describe_training
from gpt2_accel.runtime.processes import all_or_none, any_rank, on_main_process
from gpt2_accel.runtime.signals import StopRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Objective = Callable[
    [torch.nn.Module, Batch], torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]
]
"""(prepared model, micro-batch) -> its loss, a mean over what the batch counts, or that and figures to log, means likewise."""


@dataclass
class RunState:
    """What a checkpoint keeps of a run beside its tensors. `val_loss` is that of this step, None if
    it was not evaluated; `best` is the lowest so far, and `waited` the number of evaluations since;
    `changes` are the settings that resumes have changed."""

    step: int = 0  # updates done
    run_id: str = ""  # in the trackers
    val_loss: float | None = None
    best: float | None = None
    waited: int = 0
    changes: list[str] = field(default_factory=list)

    def count(self, loss: float) -> None:
        """Counts an evaluation, by its validation loss."""
        self.val_loss = loss
        self.waited += 1
        if self.best is None or loss < self.best:
            self.best = loss
            self.waited = 0


@dataclass
class Run:
    """A training run, whose folder is locked.

    Given are the settings; `model` and `optimizer`, prepared by Accelerate; the `objective` and
    how the validation loss is measured; the data's tokenizer; `empty`, the model without memory (`models.skeleton`); the loaders of this
    rank's share of the data, `val_loader` None if nothing is evaluated; the callbacks, in the order
    of their calls; and the checkpoint to resume, None for a new run.

    `schedule` has the sequences of each update, `updates` is their number, other than `max_steps`
    with a batch-size ramp and after a resume with another batch size. `resumes_here` says that the checkpoint is in the run's
    own folder. `stopping` says that a rank has to stop, and is equal on all ranks; `unevaluated`,
    that an evaluation was due then. `figures` are those of the last update, `problem` is why the
    last bad one was skipped.

    Raises the errors of `TrainConfig.batch_schedule` and of `resume`.
    """

    config: TrainConfig
    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    measure: Measure
    tokenizer: "PreTrainedTokenizerBase"
    empty: LanguageModel
    train_loader: TrainLoader
    val_loader: EvalLoader | None
    callbacks: Sequence[Any]
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        config, accelerator = self.config, self.accelerator
        self.run_dir = Path(config.output_dir)
        self.state = RunState()
        self.schedule = config.batch_schedule(accelerator.num_processes)
        self.guard = AnomalyGuard(config.spike_z)
        self.training_state = TrainingState(accelerator, self.model, self.optimizer, self.callbacks)
        # What determines the order of the data.
        self._order = {
            "seed": config.seed,
            "sequence_length": config.tokens_per_sequence,
            "data": data_fingerprint(config.data_dir),
        }
        self._saved_step: int | None = None
        self._asks_save = self._save_asked = self._unreported = False
        self.resumes_here = self.stopping = self.unevaluated = False
        self.figures: dict[str, float] = {}
        self._names: list[str] | None = None  # of the objective's figures
        self.problem = ""
        self.changes: dict[str, str] = {}  # of settings, by this resume
        if self.checkpoint is not None:
            self.resume(self.checkpoint)
        self.state.run_id = on_main_process(lambda: self.state.run_id or secrets.token_hex(4))
        self.updates = self.schedule.updates
        self.metadata = describe_run(self)
        self.stop = StopRequest(config.max_hours)
        self.interrupted = any_rank(accelerator, self._must_stop)
        peak = peak_flops(device_name(accelerator.device))
        self.log = RunLog(
            self.run_dir if accelerator.is_main_process else None,
            self.step,
            self.updates,
            lambda step: self.schedule.first(step) * config.tokens_per_sequence,
            peak and peak * accelerator.num_processes / self.metadata["flops_per_token"],
        )
        self.status = Status(self.run_dir, lambda: self.step, self.stop)
        self.files = ModelFiles(self.tokenizer, self.log.print_line)
        self.writer = CheckpointWriter(config, self.files, self.log.print_line)
        steps = range(self.step, self.updates)
        self.loader = PrefetchLoader(self.train_loader, self.schedule, steps, accelerator.device)

    @property
    def step(self) -> int:
        """The number of updates done."""
        return self.state.step

    def resume(self, checkpoint: Path) -> None:
        """Restores the state from a checkpoint, whose weights the model has. The schedule continues from its position.

        Raises `ValueError` if the data or a setting that determines its order has changed, or if the checkpoint has the state
        of a callback that the run does not have, unless `ignore_changes` is set."""
        config, accelerator = self.config, self.accelerator
        with all_or_none():
            saved = read_state(checkpoint)
            before = saved | saved["position"]  # where older releases have the order
            for name, value in self._order.items():
                if before[name] != value and not config.ignore_changes:
                    raise ValueError(
                        f"{checkpoint} was trained with the {name} {before[name]}, not {value}, which changes the "
                        "order of the data: resume with the original value, or with --ignore_changes"
                    )
            seen = before["sequences"] * before["sequence_length"]
            self.changes = changed_settings(config, saved["settings"], saved["step"], seen)
            for name, change in self.changes.items():
                if name.startswith("lora"):
                    raise ValueError(f"{change}: resume an adapter with its original settings")
            older = saved.get("guard", saved)  # where release 0.4 and older have the rest
            self.guard.recent = older.get("recent", self.guard.recent)
            self.state = RunState(
                saved["step"],
                val_loss=saved["val_loss"],
                best=older["best"],
                waited=older["waited"],
                changes=saved.get("changes", []) + list(self.changes.values()),
            )
            self.schedule = config.batch_schedule(
                accelerator.num_processes, self.step, seen // config.tokens_per_sequence
            )
        self.training_state.load_optimizer(checkpoint, saved)
        with all_or_none():
            notes = self.training_state.load_callbacks(checkpoint, saved, config.ignore_changes)
        accelerator.print(f"resumed from {checkpoint}", *notes, sep="\n")
        self.resumes_here = checkpoint.resolve().parent == self.run_dir.resolve()
        if self.resumes_here:
            self._saved_step = self.step
        # A branch of another run is a run of its own.
        if self.resumes_here or not (checkpoint.parent / "run.json").exists():
            self.state.run_id = saved["run_id"]

    def collect(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """Returns what a checkpoint holds beside the model: the tensors of each file, as
        `TrainingState.collect` has them, and `state.json`.

        `position` is the number of sequences read. A resume compares the settings that determine
        their order, and `settings`. Raises `ValueError` for what JSON changes."""
        tensors, values = self.training_state.collect()
        state = {
            **asdict(self.state),
            **self._order,
            "position": {"sequences": self.schedule.first(self.step)},
            "settings": self.config.settings(),
            "recent": self.guard.recent,
            **values,
        }
        # A copy: the owners of lists and dicts go on changing them while the checkpoint is written.
        saved = json.loads(json.dumps(state, default=repr))
        own = values["optimizer_values"] | values["callbacks"] | state
        found = saved["optimizer_values"] | saved["callbacks"] | saved
        for name, value in own.items():
            if repr(value) != repr(found[name]):  # as text: NaN equals NaN, a tuple is not a list
                raise ValueError(
                    f"a checkpoint cannot hold the {name} {value}: tensors belong to the first level of a state, and all "
                    "else is numbers, texts, lists and dicts with texts as keys"
                )
        return tensors, saved

    def call(self, event: str, **what: Any) -> None:
        """Calls the method `event` of the callbacks that have it, in their order."""
        for callback in self.callbacks:
            if method := getattr(callback, event, None):
                method(self, **what)

    # What the loop calls

    def goes_on(self) -> bool:
        """Whether there is another update to do."""
        ended = self.stopping or self.diverged or self.stops_early
        return self.step < self.updates and not ended

    @property
    def stops_early(self) -> bool:
        """Whether early stopping ends the run, or has ended it before a resume."""
        return 0 < self.config.patience <= self.state.waited

    @property
    def diverged(self) -> bool:
        """Whether too many updates in a row were skipped."""
        return self.guard.bad_in_a_row >= MAX_BAD_STEPS

    def figure_names(self, figures: dict[str, torch.Tensor]) -> list[str]:
        """Returns the names of a micro-batch's figures, sorted: in the same order on all ranks. Raises `ValueError` if they are
        not those of the main process's first micro-batch, or one is `loss`: they would be averaged with others."""
        names = sorted(figures)
        if self._names is None:
            self._names = on_main_process(lambda: names)
        if names != self._names or "loss" in names:
            raise ValueError(
                f"the objective returns the figures {names}, first {self._names}: return the same for each batch, none as loss"
            )
        return names

    def reduce(self, figures: dict[str, torch.Tensor], grad_norm: torch.Tensor) -> dict[str, float]:
        """Returns the means of the figures over all ranks, with `grad_norm`, and notes whether a rank has to stop or asks for
        a checkpoint.

        The host waits here until the device has done the update. Raises the errors of
        `check_problems`: tokens that a rank could not read are in no update.
        """
        device = self.accelerator.device
        flags = self._must_stop(), self._asks_save, self.writer.written is not None
        # Filled on the device: a copy from the host would be another wait.
        values = [torch.full((), float(flag), device=device) for flag in flags]
        values += [value.to(device, torch.float32) for value in figures.values()]
        means = self.accelerator.reduce(torch.stack(values), "mean")
        together = torch.cat((means, full_tensor(grad_norm)[None]))
        stop, save, written, *found, norm = together.tolist()
        self.stopping = stop > 0
        self._save_asked = save > 0
        self._unreported = written > 0
        if self.stopping:
            self.check_problems()
        return {**dict(zip(figures, found, strict=True)), "grad_norm": norm}

    def end_update(self, figures: dict[str, float], problem: str | None) -> None:
        """Counts an update and calls the callbacks. `problem` is why it was skipped, None if it was not."""
        self.state.step += 1
        self.state.val_loss = None
        self.figures = figures
        self.problem = problem or self.problem
        self.log.advance(self.step)
        if problem is not None:
            update = self.step - 1
            first, sequences = self.schedule.first(update), self.schedule.sequences(update)
            self.log.skipped(problem, self.train_loader.samples(first, sequences))
        if self._unreported:
            self.report_save()
        self.call("on_step_end", skipped=problem is not None)
        if self.due(self.config.log_every):
            gc.collect(1)  # on all ranks at once, the young objects
        self.log.resume()

    # What callbacks call

    def due(self, every: int) -> bool:
        """Whether an action of every `every` updates, and of the last, is due at this step. 0 means never."""
        return every > 0 and (self.step % every == 0 or self.step == self.updates)

    def request_stop(self, reason: str) -> None:
        """Ends the run with a checkpoint after the next update. One rank is enough."""
        self.stop.request(reason)

    def request_save(self) -> None:
        """Saves a checkpoint after the next update. One rank is enough."""
        self._asks_save = True

    def save_due(self) -> bool:
        """Whether a checkpoint is due at this step.

        A skipped update has none: if the run diverges, the newest one precedes the bad updates.
        """
        due = self._save_asked or self.due(self.config.save_every)
        due = due and self.guard.bad_in_a_row == 0
        return not self.diverged and (due or not self.goes_on())

    def evaluate(self, evaluation: Evaluation) -> dict[str, float]:
        """Runs and logs an evaluation of what the module holds now; returns its results, none if it was interrupted."""
        with evaluating_optimizer(self.optimizer):
            results = evaluation(self.accelerator, self.model, self.interrupted)
        self.stopping = self.stopping or not results
        if results:
            self.log.evaluation(results)
            self.call("on_evaluate", metrics=results)
        return results

    def validate(self, prefix: str = "val/") -> dict[str, float]:
        """Evaluates the validation loss of what the module holds now, as `PREFIX/loss`. It counts neither for `best/` nor for
        early stopping. Raises `ValueError` if the run evaluates nothing."""
        if self.val_loader is None:
            raise ValueError("the run has no validation data: give --eval_every")
        name = prefix.rstrip("/")
        return self.evaluate(
            partial(validation_loss, loader=self.val_loader, measure=self.measure, prefix=name)
        )

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Adds metrics, by their whole names such as `ema/distance`, to this step's line of `metrics.jsonl`."""
        self.log.add(metrics)

    def copied_model(self) -> LanguageModel | None:
        """Returns a copy of the model in host memory; None on all processes but the main one."""
        with evaluating_optimizer(self.optimizer):
            return full_model(self.accelerator, self.model, self.empty)

    def save_model(self, directory: str | Path) -> None:
        """Writes what the module holds now as a model directory."""
        plain = self.copied_model()
        self.writer.join()  # it may be comparing the first model

        def save() -> None:
            assert plain is not None
            self.files.save(plain, Path(directory), describe_training(self))

        on_main_process(save)

    # Checkpoints

    def save(self, *, again: bool = False) -> None:
        """Waits for the previous checkpoint and starts to write the one of this step, unless it is written; with `again`
        in any case. Raises `OSError` if the run's folder is gone."""
        self._asks_save = self._save_asked = False
        failed = on_main_process(self._end_write)
        if self.step == self._saved_step and not (failed or again):
            return
        metrics = self.run_dir / "metrics.jsonl"
        if self.accelerator.is_main_process and metrics.exists():
            sync(metrics)  # a resumed run does not repeat this step
        with evaluating_optimizer(self.optimizer):
            trained = bool(self.config.lora)
            plain = full_model(self.accelerator, self.model, self.empty, trained)
            parts, state = self.collect()
            tensors = {name: gather_to_host(self.accelerator, own) for name, own in parts.items()}
        if plain is not None:
            self.writer.save(plain, tensors, state, describe_training(self))
        self._saved_step = self.step

    def report_save(self) -> None:
        """Calls `on_save` of the callbacks for the checkpoint that is written."""
        self._unreported, self.writer.written = False, None
        self.call("on_save", path=self.run_dir / f"checkpoint-{self._saved_step}")

    def _end_write(self) -> bool:
        """Waits for the previous checkpoint. Returns whether it could not be written.

        Raises `OSError` if the run's folder was removed or moved."""
        self.status.write()
        if self.status.lost:
            raise OSError(
                f"{self.config.output_dir} was removed or moved during the run, or another process trains there now: "
                "put it back and start the same command again, or choose another --output_dir"
            )
        return self.writer.join() is not None

    def _must_stop(self) -> bool:
        """Whether this rank has to stop: after a signal, or because of a problem."""
        problem = self.train_loader.problem or self.writer.bug
        return self.status.lost or any((self.stop.reason, problem))

    def check_problems(self) -> None:
        """Raises on all ranks `UnreadableData` if one could not read its training data, and the
        error of a bug while a checkpoint was written."""
        with all_or_none():
            if problem := self.writer.bug or self.train_loader.problem:
                raise problem

"""A training run: its parts, and the methods that the loop and callbacks call.

`setup.py` builds it, `lifecycle.py` starts and ends it. All ranks call all methods, unless a
docstring says otherwise.
"""

import gc
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from gpt2_accel import __version__
from gpt2_accel.checkpoint.find import read_state
from gpt2_accel.checkpoint.state_dict import (
    RunState,
    TrainingState,
    full_model,
    full_tensor,
    gather_to_host,
    json_copy,
)
from gpt2_accel.checkpoint.writer import CheckpointWriter
from gpt2_accel.config import SHAPE, TrainConfig
from gpt2_accel.data.loader import Batch, EvalLoader, TrainLoader
from gpt2_accel.data.prefetch import PrefetchLoader
from gpt2_accel.data.source import Data
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
from gpt2_accel.tokenizer import PreTrainedTokenizerBase

Loss = torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A scalar, or a pair of a scalar and figures to log, all means over what a micro-batch counts."""

Objective = Callable[[torch.nn.Module, Batch], Loss]
"""(prepared model, micro-batch) -> its loss."""


@dataclass
class Run:
    """A training run, complete when it is built. Its folder is locked by then.

    It also has `run_dir`, the `state` that a checkpoint keeps, and the `figures` of the last
    update. `schedule` has the batch size of each update, and `updates` their number, which differs
    from `max_steps` with a batch-size ramp and after a resume with another batch size. `stopping`
    is True on all ranks once a rank has to stop, and `unevaluated` if an evaluation was due then.

    Raises `ValueError` if the batch does not fit the processes, or a resume changes the data.
    """

    config: TrainConfig
    accelerator: Accelerator
    data: Data
    model: torch.nn.Module  # prepared by Accelerate
    optimizer: torch.optim.Optimizer  # prepared
    objective: Objective
    measure: Measure  # how the validation loss is computed
    empty: LanguageModel  # the model without memory, see `models.skeleton`
    train_loader: TrainLoader  # this rank's batches
    val_loader: EvalLoader | None  # None if nothing is evaluated
    callbacks: Sequence[Any]  # called in this order
    checkpoint: Path | None = None  # the one to resume; None for a new run

    def __post_init__(self) -> None:
        config = self.config
        accelerator = self.accelerator
        self.run_dir = Path(config.output_dir)
        self.state = RunState()
        self.schedule = config.batch_schedule(accelerator.num_processes)
        self.guard = AnomalyGuard(config.spike_z)
        self.training_state = TrainingState(accelerator, self.model, self.optimizer, self.callbacks)
        # The settings that determine the order of the data.
        self._order = {
            "seed": config.seed,
            "sequence_length": config.tokens_per_sequence,
            "data": self.data.fingerprint,
        }
        self._saved_step: int | None = None
        self._wants_save = False  # this rank wants a checkpoint
        self._save_requested = False  # any rank wants one
        self._unreported = False  # a checkpoint is written, and callbacks do not know it
        self.resumes_here = False  # the checkpoint is in the run's own folder
        self.stopping = False
        self.unevaluated = False
        self.figures: dict[str, float] = {}
        self._figure_names: list[str] | None = None  # the objective's figures
        self.problem = ""  # why the last skipped update was skipped
        self.remarks = ""  # text for the model card
        self.changes: dict[str, str] = {}  # settings that this resume changed
        if self.checkpoint is not None:
            self.resume(self.checkpoint)
        self.state.run_id = on_main_process(lambda: self.state.run_id or secrets.token_hex(4))
        self.updates = self.schedule.updates
        self.metadata = describe_run(self)
        self.stop = StopRequest(config.max_hours)
        self.interrupted = any_rank(accelerator, self._must_stop)
        speed = peak_flops(device_name(accelerator.device))
        if speed is not None:
            speed = speed * accelerator.num_processes / self.metadata["flops_per_token"]
        self.peak_speed = speed  # tokens per second at an MFU of 1; None if unknown
        self.log = RunLog(
            self.run_dir if accelerator.is_main_process else None,
            self.step,
            self.updates,
            lambda step: self.schedule.first(step) * config.tokens_per_sequence,
            speed,
        )
        self.status = Status(self.run_dir, lambda: self.step, self.stop)
        self.files = ModelFiles(self.tokenizer, self.log.print_line)
        self.writer = CheckpointWriter(config, self.files, self.log.print_line)
        steps = range(self.step, self.updates)
        self.loader = PrefetchLoader(self.train_loader, self.schedule, steps, accelerator.device)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the data."""
        return self.data.tokenizer

    @property
    def step(self) -> int:
        """The number of updates done."""
        return self.state.step

    def resume(self, checkpoint: Path) -> None:
        """Restores the state of a checkpoint. The model has its weights already.

        Raises `ValueError` if the model's shape, the dtype or a setting of LoRA has changed. Unless
        `ignore_changes` is set, also if the data or a setting that determines its order has
        changed, or if the checkpoint has the state of a callback that the run does not have.
        """
        config = self.config
        with all_or_none():
            saved = read_state(checkpoint)
            for name, value in self._order.items():
                if saved[name] != value and not config.ignore_changes:
                    raise ValueError(
                        f"{checkpoint} was trained with the {name} {saved[name]}, not {value}, "
                        "which changes the order of the data: resume with the original value, or "
                        "with --ignore_changes"
                    )
            tokens = saved["sequences"] * saved["sequence_length"]
            self.changes = changed_settings(config, saved["settings"], saved["step"], tokens)
            for name, change in self.changes.items():
                if name in SHAPE or name.startswith(("lora", "dtype")):
                    raise ValueError(
                        f"{change}: resume with the original value, or choose another --output_dir "
                        "for a new model"
                    )
            self.state = RunState(
                saved["step"],
                val_loss=saved["val_loss"],
                best=saved["best"],
                waited=saved["waited"],
                changes=saved["changes"] + list(self.changes.values()),
            )
            self.guard.recent = saved["recent"]
            seen = tokens // config.tokens_per_sequence
            self.schedule = config.batch_schedule(self.accelerator.num_processes, self.step, seen)
        self.training_state.load_optimizer(checkpoint, saved)
        with all_or_none():
            self.training_state.load_callbacks(checkpoint, saved, config.ignore_changes)
        self.accelerator.print(f"resumed from {checkpoint}")
        if config.dtype != "float32" and "version" not in saved:
            self.accelerator.print(
                f"losses and gradient norms are now in fp32, until here in {config.dtype}: they "
                "differ slightly"
            )
        self.resumes_here = checkpoint.resolve().parent == self.run_dir.resolve()
        if self.resumes_here:
            self._saved_step = self.step
        # A branch of another run is a run of its own.
        if self.resumes_here or not (checkpoint.parent / "run.json").exists():
            self.state.run_id = saved["run_id"]

    def collect(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """Returns the tensors of each file in `training_state/`, and the content of `state.json`.

        `position` is the number of sequences read. Raises `ValueError` for a value that JSON would
        change.
        """
        tensors, values = self.training_state.collect()
        state = asdict(self.state) | self._order
        state["position"] = {"sequences": self.schedule.first(self.step)}
        state["settings"] = self.config.settings()
        state["recent"] = self.guard.recent
        state["bos"] = self.train_loader.bos
        size = self.train_loader.micro_batch_size
        state["micro_batch"] = {"size": size, "processes": self.accelerator.num_processes}
        state["version"] = __version__
        state |= values
        return tensors, json_copy(state)

    def call(self, event: str, **arguments: Any) -> None:
        """Calls the method `event` of the callbacks that have it, in their order."""
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self, **arguments)

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
        """Returns the names of a micro-batch's figures, sorted: in the same order on all ranks.

        Raises `ValueError` if the main process's first micro-batch had other figures, or if one is
        `loss`: they would be averaged with other figures.
        """
        names = sorted(figures)
        if self._figure_names is None:
            self._figure_names = on_main_process(lambda: names)
        if names != self._figure_names or "loss" in names:
            raise ValueError(
                f"the objective returns the figures {names}, first {self._figure_names}: return "
                "the same for each batch, none as loss"
            )
        return names

    def reduce(self, figures: dict[str, torch.Tensor], grad_norm: torch.Tensor) -> dict[str, float]:
        """Returns the means of the figures over all ranks, and `grad_norm`.

        Also finds out whether a rank has to stop or wants a checkpoint. The host waits here until
        the device has done the update. Raises what a rank's read or save has raised: an update must
        not train on tokens that a rank could not read.
        """
        device = self.accelerator.device
        flags = self._must_stop(), self._wants_save, self.writer.written is not None
        # Filled on the device: a copy from the host would be another wait.
        values = [torch.full((), float(flag), device=device) for flag in flags]
        values += [value.to(device, torch.float32) for value in figures.values()]
        means = self.accelerator.reduce(torch.stack(values), "mean")
        together = torch.cat((means, full_tensor(grad_norm)[None]))
        stop, save, written, *reduced, norm = together.tolist()
        self.stopping = stop > 0
        self._save_requested = save > 0
        self._unreported = written > 0
        if self.stopping:
            self.check_problems()
        result = dict(zip(figures, reduced, strict=True))
        result["grad_norm"] = norm
        return result

    def end_update(self, figures: dict[str, float], problem: str | None) -> None:
        """Counts an update and calls the callbacks. `problem` is why it was skipped, or None."""
        self.state.step += 1
        self.state.val_loss = None
        self.figures = figures
        self.log.advance(self.step)
        if problem is not None:
            self.problem = problem
            update = self.step - 1
            first = self.schedule.first(update)
            samples = self.train_loader.samples(first, self.schedule.sequences(update))
            self.log.skipped(problem, samples.tolist())
        if self._unreported:
            self.report_save()
        self.call("on_step_end", skipped=problem is not None)
        if self.due(self.config.log_every):
            gc.collect(1)  # the young objects, on all ranks at once
        self.log.resume()

    # What callbacks call

    def due(self, every: int) -> bool:
        """Whether an action of every `every` updates, and of the last, is due; 0 means never."""
        return every > 0 and (self.step % every == 0 or self.step == self.updates)

    def request_stop(self, reason: str) -> None:
        """Ends the run with a checkpoint after the next update. One rank is enough."""
        self.stop.request(reason)

    def request_save(self) -> None:
        """Saves a checkpoint after the next update. One rank is enough."""
        self._wants_save = True

    def save_due(self) -> bool:
        """Whether a checkpoint is due at this step.

        None is due after a skipped update: if the run diverges, the newest checkpoint precedes the
        bad updates.
        """
        if not self.goes_on():
            return not self.diverged
        due = self._save_requested or self.due(self.config.save_every)
        return due and self.guard.bad_in_a_row == 0

    def evaluate(self, evaluation: Callable[..., dict[str, float]]) -> dict[str, float]:
        """Evaluates the model as it is now. Returns the results, empty if interrupted."""
        with evaluating_optimizer(self.optimizer):
            results = evaluation(self.accelerator, self.model, self.interrupted)
        if results:
            self.log.evaluation(results)
            self.call("on_evaluate", metrics=results)
        else:
            self.stopping = True
        return results

    def validate(self, prefix: str = "val/") -> dict[str, float]:
        """Computes the validation loss of the model as it is now, as `PREFIX/loss`.

        Does not affect `best/` and early stopping. Raises `ValueError` if the run has no
        validation data.
        """
        if self.val_loader is None:
            raise ValueError("the run has no validation data: give --eval_every")
        name = prefix.rstrip("/")
        return self.evaluate(
            partial(validation_loss, loader=self.val_loader, measure=self.measure, prefix=name)
        )

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Adds metrics to this step's line of `metrics.jsonl`, by names such as `ema/distance`."""
        self.log.add(metrics)

    def copied_model(self) -> LanguageModel | None:
        """Returns a copy of the model in host memory on the main process, None on the others."""
        with evaluating_optimizer(self.optimizer):
            return full_model(self.accelerator, self.model, self.empty)

    def save_model(self, directory: str | Path) -> None:
        """Writes the model as it is now as a model directory."""
        model: Any = self.copied_model()
        self.writer.join()  # it may be comparing the first model with transformers'
        on_main_process(lambda: self.files.save(model, Path(directory), describe_training(self)))

    # Checkpoints

    def save(self, *, again: bool = False) -> None:
        """Starts to write the checkpoint of this step, after the previous one is written.

        Does nothing if this step's is written already, unless `again`. Raises `OSError` if the
        run's folder is gone.
        """
        self._wants_save = False
        self._save_requested = False
        failed = on_main_process(self._end_write)
        if self.step == self._saved_step and not (failed or again):
            return
        metrics = self.run_dir / "metrics.jsonl"
        if self.accelerator.is_main_process and metrics.exists():
            sync(metrics)  # a resumed run does not repeat this step
        with evaluating_optimizer(self.optimizer):
            trained = bool(self.config.lora)
            model = full_model(self.accelerator, self.model, self.empty, trained)
            parts, state = self.collect()
            tensors = {name: gather_to_host(self.accelerator, part) for name, part in parts.items()}
        if model is not None:
            self.writer.save(model, tensors, state, describe_training(self))
        self._saved_step = self.step

    def report_save(self) -> None:
        """Calls `on_save` of the callbacks for the checkpoint that is written."""
        self._unreported = False
        self.writer.written = None
        self.call("on_save", path=self.run_dir / f"checkpoint-{self._saved_step}")

    def _end_write(self) -> bool:
        """Waits for the previous checkpoint. Returns whether it could not be written."""
        self.status.write()
        if self.status.lost:
            raise OSError(
                f"{self.config.output_dir} was removed or moved during the run, or another process "
                "trains there now: put it back and start the same command again, or choose another "
                "--output_dir"
            )
        return self.writer.join() is not None

    def _must_stop(self) -> bool:
        """Whether this rank has to stop: after a signal, or because of a problem."""
        reason = self.stop.reason or self.train_loader.problem or self.writer.bug
        return self.status.lost or bool(reason)

    def check_problems(self) -> None:
        """Raises a rank's problem on all ranks: `UnreadableData`, or an error of a save."""
        with all_or_none():
            problem = self.writer.bug or self.train_loader.problem
            if problem is not None:
                raise problem

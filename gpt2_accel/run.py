"""A training run: its parts, its step and state, and what callbacks and gradients may call.

`setup.py` builds it, `saving.py` saves and resumes it, `lifecycle.py` starts and ends it. All ranks
call all methods, unless a docstring says otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from gpt2_accel.checkpoint.state_dict import RunState, TrainingState, full_model, unwrap
from gpt2_accel.checkpoint.writer import CheckpointWriter
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import Batch, EvalLoader, TrainLoader
from gpt2_accel.data.prefetch import PrefetchLoader
from gpt2_accel.data.source import Data
from gpt2_accel.evals.validation import Measure, validation_loss
from gpt2_accel.generation.sampling import Completion, Prompt, Sampling, complete
from gpt2_accel.hf.comparison import ModelFiles
from gpt2_accel.models import LanguageModel
from gpt2_accel.optim import evaluating_optimizer
from gpt2_accel.runtime.accelerator import gradient_norm, reducing
from gpt2_accel.runtime.guard import MAX_BAD_STEPS, AnomalyGuard
from gpt2_accel.runtime.log import RunLog, Status
from gpt2_accel.runtime.metadata import describe_training
from gpt2_accel.runtime.processes import any_rank, on_main_process
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.tokenizer import PreTrainedTokenizerBase

Loss = torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A scalar, or a pair of a scalar and figures to log, all means over what a micro-batch counts."""

Objective = Callable[[torch.nn.Module, Batch], Loss]
"""(prepared model, micro-batch) -> its loss."""

Evaluation = Callable[..., dict[str, float]]
"""(accelerator, prepared model, interrupted) -> results by name, empty if interrupted. All ranks
call it, and `interrupted()`, which agrees on all, equally often."""


class Interrupted(Exception):
    """A rank has to stop: the update is dropped. All ranks raise it."""


@dataclass
class MicroBatches:
    """This rank's micro-batches of one update; a second iteration repeats them.

    Iterating raises `Interrupted` between micro-batches if a rank has to stop: code that changes
    weights restores them in `finally`.
    """

    batches: Iterator[Batch]
    count: int
    interrupted: Callable[[], bool]
    _kept: list[Batch] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.count):
            if self._kept and self.interrupted():
                raise Interrupted
            if number == len(self._kept):
                self._kept.append(next(self.batches))
            yield self._kept[number]


Gradients = Callable[["Run", MicroBatches], dict[str, Any]]
"""(run, micro-batches of an update) -> this rank's `loss` and other figures, scalars; leaves the
gradients in the parameters. `train.accumulate_gradients` is the default."""


@dataclass
class Run:
    """A training run. Its folder, `run_dir`, is locked by then.

    `state` is what a checkpoint keeps, `figures` are those of the last update. `schedule` has the
    batch size of each update, and `updates` their number, which differs from `max_steps` with a
    batch-size ramp and after a resume with another batch size. `interrupted()` says whether a rank
    has to stop; `stopping` is True on all ranks once that is known.

    Raises `ValueError` if the batch does not fit the processes.
    """

    config: TrainConfig
    accelerator: Accelerator
    data: Data
    model: torch.nn.Module  # prepared by Accelerate
    optimizer: torch.optim.Optimizer  # prepared
    objective: Objective
    gradients: Gradients
    measure: Measure  # how the validation loss is computed
    empty: LanguageModel  # the model without memory, see `models.skeleton`
    train_loader: TrainLoader  # this rank's batches
    val_loader: EvalLoader | None  # None if nothing is evaluated
    callbacks: Sequence[Any]  # called in this order
    parts: dict[str, Any]  # names of the parts, for the record
    checkpoint: Path | None  # the one to resume; None for a new run

    state: RunState = field(default_factory=RunState)
    resumes_here: bool = False  # the checkpoint is in the run's own folder
    changes: dict[str, str] = field(default_factory=dict)  # what this resume changed
    saved_step: int | None = None
    wants_save: bool = False  # this rank wants a checkpoint
    save_requested: bool = False  # any rank wants one
    unreported: bool = False  # a checkpoint is written, and callbacks do not know it
    stopping: bool = False
    finish_reason: str = ""  # of this rank
    caller: str = ""  # class of the callback whose `on_step_end` was called last
    reduced: bool = False  # whether the gradients of this update were reduced
    figures: dict[str, float] = field(default_factory=dict)
    figure_names: list[str] | None = None
    problem: str = ""  # why the last skipped update was skipped
    remarks: str = ""  # lines for the model card

    def __post_init__(self) -> None:
        config = self.config
        self.run_dir = Path(config.output_dir)
        self.schedule = config.batch_schedule(self.accelerator.num_processes)
        self.guard = AnomalyGuard(config.spike_z)
        self.training_state = TrainingState(
            self.accelerator, self.model, self.optimizer, self.callbacks
        )
        self.stop = StopRequest(config.max_hours)
        self.interrupted = any_rank(self.accelerator, partial(must_stop, self))
        # Set by `lifecycle.open_logs`, after a resume.
        self.metadata: dict[str, Any]
        self.updates: int
        self.log: RunLog
        self.status: Status
        self.files: ModelFiles
        self.writer: CheckpointWriter
        self.loader: PrefetchLoader

    @property
    def step(self) -> int:
        """The number of updates done."""
        return self.state.step

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the data."""
        return self.data.tokenizer

    def due(self, every: int) -> bool:
        """Whether an action of every `every` updates, and of the last, is due; 0 means never."""
        if every == 0 or self.step == 0:
            return False
        return self.step % every == 0 or self.state.finishing or self.step == self.updates

    def request_stop(self, reason: str = "") -> None:
        """Ends the run with a checkpoint after the next update. One rank is enough."""
        self.stop.request(reason or "a callback")

    def request_finish(self, reason: str = "") -> None:
        """Ends the run as complete after the next update, with its evaluation and the final model.

        One rank is enough. Only a longer run, by `max_steps` or `epochs`, continues it.
        """
        self.finish_reason = str(reason) or "a callback"
        self.state.finish = self.updates

    def postpone(self) -> None:
        """Notes that a callback leaves out something due, since the run stops.

        The next start calls its `on_step_end` again before the first update, as after a skipped
        update. `evaluate`, `validate` and `generate` call this if they are interrupted.
        """
        self.stopping = True
        self.state.postponed.append(self.caller)

    def request_save(self) -> None:
        """Saves a checkpoint after the next update. One rank is enough."""
        self.wants_save = True

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Adds metrics to this step's line of `metrics.jsonl`, by names such as `ema/distance`."""
        self.log.add(metrics)

    def remark(self, text: str) -> None:
        """Prints a text, and adds it to the model card."""
        self.remarks += f"{text}\n"
        self.log.print_line(text)

    # Gradients

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """Adds the gradients of a loss, a scalar, to those of the parameters.

        They are reduced over the ranks in the `last` call of a pass; before it they are those of
        this rank. Raises `ValueError` for a loss that is not a scalar, or does not depend on
        weights that are trained.
        """
        if loss.numel() != 1 or loss.is_meta:
            raise ValueError(f"the loss has the shape {tuple(loss.shape)}: return a scalar mean")
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on the model's weights: compute it from what the model "
                "returns, without detach"
            )
        with reducing(self.accelerator, self.model, last):
            self.accelerator.backward(loss)
        self.reduced = last

    def gradient_norm(self) -> torch.Tensor:
        """Returns the norm of the gradients as they are, with an fp16 scaler's factor, in fp32."""
        return gradient_norm(self.model)

    # Evaluations and models

    def evaluate(self, evaluation: Evaluation) -> dict[str, float]:
        """Evaluates the model as it is now; logs the results and calls `on_evaluate`.

        Returns the results, empty if the run stops: `postpone`.
        """
        with evaluating_optimizer(self.optimizer):
            results = (
                {} if self.stopping else evaluation(self.accelerator, self.model, self.interrupted)
            )
        if results:
            self.log.evaluation(results)
            call(self, "on_evaluate", metrics=results)
        elif self.stopping or self.interrupted():
            self.postpone()
        return results

    def validate(self, prefix: str = "val/") -> dict[str, float]:
        """Computes the validation loss of the model as it is now, as `PREFIX/loss`.

        Does not affect `best/` and early stopping. Raises `ValueError` if the run has no
        validation data.
        """
        if self.val_loader is None:
            raise ValueError("the run has no validation data: give --eval_every")
        return self.evaluate(
            partial(
                validation_loss,
                loader=self.val_loader,
                measure=self.measure,
                prefix=prefix.rstrip("/"),
            )
        )

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
        """Returns completions by the current model, on all ranks; empty if the run stops.

        The main process generates. Raises `ValueError` for a prompt that cannot be encoded.
        """

        def write(model: LanguageModel) -> list[Completion]:
            return complete(model, self.tokenizer, prompts, sampling, lambda: self.stop.reason)

        completions = [] if self.stopping else on_plain_model(self, write)
        if prompts and not completions:
            self.postpone()
        return completions

    def copied_model(self) -> LanguageModel | None:
        """Returns a copy of the model in host memory on the main process, None on the others."""
        with evaluating_optimizer(self.optimizer):
            return full_model(self.accelerator, self.model, self.empty)

    def save_model(self, directory: str | Path) -> None:
        """Writes the model as it is now as a model directory."""
        model: Any = self.copied_model()
        self.writer.join()  # it may be comparing the first model with transformers'
        on_main_process(lambda: self.files.save(model, Path(directory), describe_training(self)))


def call(run: Run, event: str, kinds: Sequence[str] | None = None, **arguments: Any) -> None:
    """Calls the method `event` of the callbacks that have it, in their order.

    If `kinds` is given, only of callbacks of classes with these names.
    """
    for callback in run.callbacks:
        method = getattr(callback, event, None)
        kind = type(callback).__name__
        if method is not None and (kinds is None or kind in kinds):
            if event == "on_step_end":
                run.caller = kind
            method(run, **arguments)


def on_plain_model(run: Run, function: Callable[[LanguageModel], Any]) -> Any:
    """Returns `function(model)` of the main process, to all; the model as it is now, uncompiled.

    All ranks call it. A sharded model is gathered, to the main process only, and to its device:
    generation on the CPU would keep the other processes waiting.
    """
    accelerator = run.accelerator
    with evaluating_optimizer(run.optimizer):
        model: Any = unwrap(accelerator, run.model)
        if accelerator.is_fsdp2:
            model = run.copied_model()
        return on_main_process(lambda: function(model.to(accelerator.device)))


# Whether the run goes on


def must_stop(run: Run) -> bool:
    """Whether this rank has to stop: after a signal, or because of a problem."""
    problem = run.status.lost or run.train_loader.problem or run.writer.bug
    return bool(run.stop.reason or problem)


def diverged(run: Run) -> bool:
    """Whether too many updates in a row were skipped."""
    return run.guard.bad_in_a_row >= MAX_BAD_STEPS


def stops_early(run: Run) -> bool:
    """Whether early stopping ends the run, or has ended it before a resume."""
    return 0 < run.config.patience <= run.state.waited


def goes_on(run: Run) -> bool:
    """Whether there is another update to do."""
    ended = run.stopping or run.state.finishing or diverged(run) or stops_early(run)
    return run.step < run.updates and not ended

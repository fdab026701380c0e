"""A run: its model, data and state, what surrounds its loop, and what the loop calls on it."""

import gc
import math
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from gpt2_accel.checkpoint.find import read_state
from gpt2_accel.checkpoint.state_dict import OptimizerState, full_model, full_tensor, unwrap
from gpt2_accel.checkpoint.writer import CheckpointWriter, load_training_state
from gpt2_accel.config import TrainConfig, load_saved
from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.prefetch import PrefetchLoader
from gpt2_accel.data.shards import UnreadableData, data_fingerprint
from gpt2_accel.device import device_name, peak_flops
from gpt2_accel.evals import Evaluation
from gpt2_accel.files import check_renames, lock_folder, remove, sync, write_json
from gpt2_accel.generation.sampling import Prompt, Sampling, complete, whole_text
from gpt2_accel.hf.hub import Uploads
from gpt2_accel.runtime.accelerator import profiler
from gpt2_accel.runtime.guard import MAX_BAD_STEPS, AnomalyGuard, Diverged, EarlyStopping
from gpt2_accel.runtime.log import RunLog, Status
from gpt2_accel.runtime.metadata import (
    changed_settings,
    describe_run,
    describe_training,
    start_summary,
)
from gpt2_accel.runtime.processes import all_or_none, any_rank, main_process_first, on_main_process
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.runtime.trackers import open_trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GRACE_OF_HOLDER = 60.0  # seconds: batch systems and pods kill a process 30 seconds after the signal


@dataclass
class Run:
    """A training run, whose folder is locked.

    `model` and `optimizer` are prepared by Accelerate. `train_loader` has this rank's share of the data, `prompts` are
    those of the samples, `evaluations` pairs of an interval in updates and an evaluation.

    `step` is the number of updates done, `updates` that of the whole run, other than `max_steps` after a resume with another
    batch size. `schedule` has the sequences of each update, and `run_id` is the run's id in the trackers. `checkpoint` is
    the one that the run resumes from, None for a new run; `resumes_here` says that it is in the run's own folder.
    `stopping` says that a rank has to stop, and is equal on all ranks. `problem` is why the last bad update was skipped.
    `val_loss` is the validation loss at this step, None if it was not evaluated. `changes` are the lines of
    `changed_settings` for this resume, `history` those of all resumes.

    Raises the errors of `TrainConfig.batch_schedule` and of `resume`.
    """

    config: TrainConfig
    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    tokenizer: "PreTrainedTokenizerBase"
    prompts: list[Prompt]
    train_loader: TrainLoader
    evaluations: list[tuple[int, Evaluation]]
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.schedule = config.batch_schedule(self.accelerator.num_processes)
        self.guard = AnomalyGuard()
        self.early_stopping = EarlyStopping(config.patience)
        self.step, self.run_id = 0, secrets.token_hex(4)
        self.val_loss: float | None = None
        self.status: Status | None = None  # of the main process
        self.resumes_here = self.stopping = False
        self.problem = ""
        self.changes: list[str] = []
        self.history: list[str] = []
        # What determines the order of the data.
        self._order = {"seed": config.seed, "sequence_length": config.tokens_per_sequence}
        self._data = data_fingerprint(config.data_dir)
        self._saved_step: int | None = None
        plain = unwrap(self.accelerator, self.model)
        self.optimizer_state = OptimizerState(plain, self.optimizer)
        if self.checkpoint is not None:
            self.resume(self.checkpoint)
        self.run_id = on_main_process(lambda: self.run_id)
        self.updates = self.schedule.updates(config.max_steps)

    def resume(self, checkpoint: Path) -> None:
        """Restores the state from a checkpoint, whose weights the model has. The schedule continues from its position.

        Raises `ValueError` if the data or a setting that determines its order has changed, unless `ignore_changes` is
        set."""
        config, accelerator = self.config, self.accelerator
        with all_or_none():
            saved = read_state(checkpoint)
            position = saved["position"]
            former = position | {"data": saved["data"]}
            for name, value in (self._order | {"data": self._data}).items():
                if former[name] != value and not config.ignore_changes:
                    raise ValueError(
                        f"{checkpoint} was trained with the {name} {former[name]}, not {value}, which changes the "
                        "order of the data: resume with the former, or with --ignore_changes"
                    )
            seen = position["sequences"] * position["sequence_length"]
            self.step = saved["step"]
            waited, best = saved["guard"]["waited"], saved["guard"]["best"]
            self.early_stopping = EarlyStopping(config.patience, waited, best)
            # Checkpoints of release 0.4 have no settings.
            before = saved.get("settings") or load_saved(checkpoint.parent / "config.yaml")
            self.changes = list(changed_settings(config, before, self.step, seen).values())
            self.history = saved.get("changes", []) + self.changes
            self.schedule = config.batch_schedule(
                accelerator.num_processes, self.step, seen // config.tokens_per_sequence
            )
        load_training_state(checkpoint, saved, accelerator, self.optimizer_state)
        accelerator.print(f"resumed from {checkpoint}")
        self.val_loss = saved["val_loss"]
        self.resumes_here = checkpoint.resolve().parent == Path(config.output_dir).resolve()
        branches = not self.resumes_here and (checkpoint.parent / "run.json").exists()
        if not branches:  # a branch of another run is a run of its own
            self.run_id = saved["run_id"] or self.run_id
        if self.resumes_here:
            self._saved_step = self.step

    def state_dict(self) -> dict:
        """Returns the state beside the tensors, for a checkpoint.

        `position` is the number of sequences read and the settings that determine their order, `data` the fingerprint of
        the data. A resume compares its settings with `settings`; `changes` is `history`."""
        scaler = self.accelerator.scaler
        return {
            "step": self.step,
            "position": {"sequences": self.schedule.first(self.step), **self._order},
            "guard": {"best": self.early_stopping.best, "waited": self.early_stopping.waited},
            "run_id": self.run_id,
            "data": self._data,
            "val_loss": self.val_loss,
            "settings": self.config.settings(),
            "changes": self.history,
            "optimizer": self.optimizer_state.name,
            "optimizer_values": self.optimizer_state.values(),
            "scaler": scaler.state_dict() if scaler else None,
        }

    # What surrounds the loop

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Runs the block, the loop, with signals, log, trackers, uploads, checkpoints and profiler.

        Writes `config.yaml` and `run.json` and prints a summary. If the data can no longer be read, saves a checkpoint.
        """
        with ExitStack() as stack:
            with all_or_none():
                self._open(stack)
            if self.checkpoint and self.val_loss is None and self._due(self.config.eval_every):
                self.evaluate()
                self.log.write()
                self._saved_step = None  # the checkpoint gets the result, too
                self.save()
                self.log.resume()
            try:
                yield
            except UnreadableData:  # raised on all ranks
                self.log.write()
                self.save()
                raise

    def _open(self, stack: ExitStack) -> None:
        """Starts the parts."""
        config, accelerator, run_dir = self.config, self.accelerator, Path(self.config.output_dir)
        enter = stack.enter_context
        self.stop = enter(StopRequest(config.max_hours))
        self.interrupted = any_rank(accelerator, self._must_stop)
        self.metadata = describe_run(self)
        main = accelerator.is_main_process
        if main:
            self.status = enter(Status(run_dir, lambda: self.step, self.stop))
            config.save(run_dir / "config.yaml")
            write_json(run_dir / "run.json", self.metadata)
            print(start_summary(self), *self.changes, sep="\n", flush=True)
        peak = peak_flops(device_name(accelerator.device))
        self.log = enter(
            RunLog(
                run_dir if main else None,
                self.step,
                self.updates,
                lambda step: self.schedule.first(step) * config.tokens_per_sequence,
                peak and peak * accelerator.num_processes / self.metadata["flops_per_token"],
            )
        )
        self.uploads = Uploads(config, self.log.print_line, lambda: self.stop.seconds_left)
        writer = CheckpointWriter(config, self.tokenizer, self.uploads.push, self.log.print_line)
        if main:
            trackers = open_trackers(config, self.metadata, self.log)
            self.log.outputs.append(enter(trackers))
            enter(self.uploads)
            writer.link(self.step)  # a kill may have prevented it
        self.profile = enter(profiler(config.profile, run_dir, accelerator))
        self.writer = enter(writer)
        steps = range(self.step, self.updates)
        batches = PrefetchLoader(self.train_loader, self.schedule, steps, accelerator.device)
        self.loader = enter(batches)
        gc.disable()  # a rank that collects within an update keeps the others waiting
        stack.callback(gc.enable)
        self.log.resume()

    # What the loop calls

    def goes_on(self) -> bool:
        """Whether there is another update to do."""
        ended = self.stopping or self.diverged or self.early_stopping.ended
        return self.step < self.updates and not ended

    @property
    def diverged(self) -> bool:
        """Whether too many updates in a row were skipped."""
        return self.guard.bad_in_a_row >= MAX_BAD_STEPS

    def reduce(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> tuple[float, float]:
        """Returns the mean loss over all ranks and the gradient norm, and notes in `stopping` whether a rank has to stop.

        The host waits here until the device has done the update. Raises the errors of
        `check_problems`: tokens that a rank could not read are in no update.
        """
        flag = torch.full_like(loss, float(self._must_stop()))
        means = self.accelerator.reduce(torch.stack((loss, flag)), "mean")
        stats = torch.cat((means, full_tensor(grad_norm)[None]))
        mean_loss, flags, norm = stats.tolist()
        self.stopping = flags > 0
        if self.stopping:
            self.check_problems()
        return mean_loss, norm

    def log_update(self, figures: dict[str, float], problem: str | None) -> None:
        """Logs an update, or that it was skipped because of `problem`."""
        self.log.advance(self.step)
        self.val_loss = None
        if problem is not None:
            self.problem = problem
            first = self.schedule.first(self.step - 1)
            self.log.skipped(problem, self.train_loader.samples(first, self.schedule.sequences))
        elif self.step == 1 or self._due(self.config.log_every):
            self.log.training(figures)
        if self.profile is not None:
            self.profile.step()

    def evaluate(self) -> None:
        """Runs and logs the evaluations that are due at this step, until one is interrupted.

        Raises `Diverged` if the validation loss is NaN or infinite.
        """
        for every, evaluate in self.evaluations:
            if self._due(every) and not self.stopping:
                results = evaluate(self.accelerator, self.model, self.interrupted)
                self.stopping = not results
                self.log.evaluation(results)
                if (loss := results.get("val/loss")) is None:
                    continue
                if not math.isfinite(loss):
                    raise Diverged(
                        f"the run has diverged, val/loss is {loss}: resume from an earlier checkpoint with a lower "
                        "--learning_rate, or start again with it"
                    )
                self.val_loss = loss
                self.early_stopping.count(loss)

    def sample(self) -> None:
        """Generates a sample from each prompt if one is due: on the main process only, uncompiled.

        A sharded model is gathered to the main process's device: generation on the CPU would keep the others waiting.
        """
        config, accelerator, model = self.config, self.accelerator, self.model
        if self.stopping or not self._due(config.sample_every):
            return
        plain = (full_model if accelerator.is_fsdp2 else unwrap)(accelerator, model)
        with main_process_first():  # may exceed the time limit of a collective
            if accelerator.is_main_process:
                plain = plain.to(accelerator.device)
                sampling = Sampling(max_new_tokens=config.sample_tokens, seed=config.seed)
                samples = complete(plain, self.tokenizer, self.prompts, sampling)
                for prompt, sample in zip(config.sample_prompts, samples, strict=True):
                    self.log.sample(prompt, whole_text(self.tokenizer, sample))

    def end_step(self) -> None:
        """Writes the metrics of this step, and then its checkpoint if one is due.

        A skipped update has no checkpoint: if the run diverges, the newest one precedes the bad updates. It has no step
        whose metrics a kill or a full disk could have prevented.
        """
        self.log.write()
        due = self._due(self.config.save_every) and self.guard.bad_in_a_row == 0
        if not self.diverged and (due or not self.goes_on()):
            self.save()
        if self._due(self.config.log_every):
            gc.collect(1)  # on all ranks at once, the young objects
        self.log.resume()

    def _due(self, every: int) -> bool:
        """Whether an action of every `every` updates, and of the last, is due at this step. 0 means never."""
        return every > 0 and (self.step % every == 0 or self.step == self.updates)

    def _must_stop(self) -> bool:
        """Whether this rank has to stop: after a signal, or because of a problem."""
        lost = self.status is not None and self.status.lost
        return any((lost, self.stop.reason, self.train_loader.problem, self.writer.bug))

    def check_problems(self) -> None:
        """Raises on all ranks `UnreadableData` if one could not read its training data, and the
        error of a bug while a checkpoint was written."""
        with all_or_none():
            if problem := self.writer.bug or self.train_loader.problem:
                raise problem

    # Checkpoints

    def save(self) -> None:
        """Waits for the previous checkpoint and starts to write the one of this step, unless it is written. All ranks
        call it. Raises `OSError` if the run's folder is gone."""
        failed = on_main_process(self._end_write)
        if self.step == self._saved_step and not failed:
            return
        metrics = Path(self.config.output_dir) / "metrics.jsonl"
        if self.accelerator.is_main_process and metrics.exists():
            sync(metrics)  # a resumed run does not repeat this step
        training = describe_training(self)
        self.writer.save(
            self.accelerator, self.model, self.optimizer_state, self.state_dict(), training
        )
        self._saved_step = self.step

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


@contextmanager
def lock_run_dir(config: TrainConfig) -> Iterator[None]:
    """Locks the run's folder on the main process, before the run looks at what is there, and removes partial checkpoints
    that a kill left.

    A run that resumes from `latest` waits for `GRACE_OF_HOLDER` seconds first: the process before it may be about to end.
    Raises the errors of `lock_folder` on all ranks.
    """
    with ExitStack() as stack:

        def lock() -> None:
            wait = GRACE_OF_HOLDER if config.resume_from == "latest" else 0.0
            stack.enter_context(lock_folder(config.output_dir, wait=wait))
            check_renames(Path(config.output_dir))
            for partial in Path(config.output_dir).glob(".checkpoint-*"):  # also of other machines
                remove(partial)

        on_main_process(lock)
        yield

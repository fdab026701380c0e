"""The context manager around the training loop: lock, signals, log, trackers, uploads, checkpoints, profiler."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from gpt2_accel.checkpoint.find import clean_up
from gpt2_accel.checkpoint.state_dict import full_model, full_tensor, unwrap
from gpt2_accel.checkpoint.writer import CheckpointWriter
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.prefetch import PrefetchLoader
from gpt2_accel.data.shards import UnreadableData, data_fingerprint
from gpt2_accel.device import device_name, is_sharded, peak_flops
from gpt2_accel.files import lock_folder, lock_id, read_json_lines, sync, write_json
from gpt2_accel.generation.sampling import Sampling, complete, whole_text
from gpt2_accel.hf.model_card import Training
from gpt2_accel.hf.uploads import Uploads
from gpt2_accel.runtime import guard
from gpt2_accel.runtime.accelerator import profiler
from gpt2_accel.runtime.clock import TrainingClock
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.runtime.log import RunFiles, RunLog, Sink
from gpt2_accel.runtime.metadata import describe_run, describe_training, start_summary
from gpt2_accel.runtime.processes import (
    AnyRank,
    all_or_none,
    main_process_first,
    on_main_process,
)
from gpt2_accel.runtime.progress import Terminal
from gpt2_accel.runtime.setup import TrainInputs
from gpt2_accel.runtime.signals import StopRequest
from gpt2_accel.runtime.state import TrainState
from gpt2_accel.runtime.status import Status
from gpt2_accel.runtime.trackers import Trackers

GRACE_OF_HOLDER = 60.0  # seconds: batch systems and pods kill a process 30 seconds after the signal


class RunContext:
    """The context manager around a run's loop.

    The run's folder is locked before. Entering writes `config.yaml` and `run.json`, prints a summary, and starts
    `stop`, `log`, `uploads`, `profile`, `writer` and `loader`, which reads ahead. Leaving ends all of them, also after an
    error; if the data can no longer be read, it saves a checkpoint first.

    `stopping` says that a rank has to stop, and is equal on all ranks. `problem` is why the last bad update was skipped.
    """

    log: RunLog
    interrupted: AnyRank
    stop: StopRequest
    uploads: Uploads
    writer: CheckpointWriter
    profile: Any
    loader: PrefetchLoader

    def __init__(
        self, config: TrainConfig, accelerator: Accelerator, state: TrainState, inputs: TrainInputs
    ):
        self.config, self.accelerator = config, accelerator
        self.state, self.inputs = state, inputs
        plain = unwrap(accelerator, state.model)
        self.metadata = describe_run(
            config, plain, accelerator, inputs.loader, state.schedule, state.run_id
        )
        self._data = data_fingerprint(config.data_dir)
        resumes_here = inputs.checkpoint is not None and (
            inputs.checkpoint.resolve().parent == Path(config.output_dir).resolve()
        )
        self._saved_step = state.step if resumes_here else None
        self._status: Status | None = None  # of the main process
        self._frozen = False
        self._lock = lock_id(config.output_dir)
        self._save_due = False
        self.stopping, self.problem = False, ""
        self._stack = ExitStack()

    def __enter__(self) -> "RunContext":
        with self._stack as stack:
            with all_or_none(self.accelerator):
                unevaluated = self._enter_parts(stack)
            if unevaluated:
                self.evaluate()
                self.log.write()
                if not self.stopping:  # the checkpoint gets the result, too
                    self._saved_step = None
                    self.save()
                self.log.clock.resume()
            self._stack = stack.pop_all()
        return self

    def _enter_parts(self, stack: ExitStack) -> bool:
        """Starts the parts. Returns whether the evaluation of the update from which the run resumes is missing."""
        config, run_dir = self.config, Path(self.config.output_dir)
        self.stop = stack.enter_context(StopRequest(config.max_hours))
        self.interrupted = AnyRank(self.accelerator, self._must_stop)
        is_main = self.accelerator.is_main_process
        earlier = read_json_lines(run_dir / "metrics.jsonl") if is_main else []
        unevaluated = self._lacks_evaluation(earlier)
        sinks = self._open_sinks(stack) if is_main else []
        self.log = self._build_log(sinks, earlier)
        self.uploads = stack.enter_context(
            start_uploads(config, self.accelerator, self.log.print_line, self.stop)
        )
        self.profile = stack.enter_context(
            profiler(config.profile, run_dir, self.accelerator, self.log.print_line)
        )
        self.writer = stack.enter_context(self._start_writer())
        steps = range(self.state.step, self.inputs.updates)
        self.loader = stack.enter_context(
            PrefetchLoader(self.inputs.loader, self.state.schedule, steps)
        )
        if self.inputs.checkpoint is not None and self.accelerator.is_main_process:
            self.writer.link(self.state.step)  # a kill may have prevented it
        self.log.clock.resume()
        return unevaluated

    def __exit__(self, kind: type | None, error: BaseException | None, traceback) -> bool | None:
        with self._stack as stack:
            if isinstance(error, UnreadableData):  # raised on all ranks
                self.log.write()
                self.save()
            self._stack = stack.pop_all()
        return self._stack.__exit__(kind, error, traceback)

    # What the loop calls

    def goes_on(self) -> bool:
        """Whether there is another update to do."""
        ended = self.stopping or self.diverged or self.state.early_stopping.ended
        return self.state.step < self.inputs.updates and not ended

    @property
    def diverged(self) -> bool:
        """Whether too many updates in a row were skipped."""
        return self.state.guard.bad_in_a_row >= guard.MAX_BAD_STEPS

    @contextmanager
    def without_garbage_collection(self) -> Iterator[None]:
        """The context of an update, without cyclic garbage collection: a rank that collects keeps the others waiting.

        What is there after the first update is not collected before the run ends.
        """
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
        if not self._frozen:
            gc.collect()
            if not gc.get_freeze_count():  # else the program that calls has its own frozen objects
                gc.freeze()
                self._stack.callback(gc.unfreeze)
            self._frozen = True

    def reduce(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> tuple[float, float]:
        """Returns the mean loss over all ranks and the gradient norm, and notes in `stopping` whether a rank has to stop.

        The host waits here until the device has done the update. Raises `UnreadableData` on all ranks if one could not
        read its data: such tokens are in no update.
        """
        flag = torch.full_like(loss, float(self._must_stop()))
        means = self.accelerator.reduce(torch.stack((loss, flag)), "mean")
        stats = torch.cat((means, full_tensor(grad_norm)[None]))
        mean_loss, flags, norm = stats.tolist()
        self.stopping = flags > 0
        if self.stopping:
            self.check_data()
        return mean_loss, norm

    def log_update(self, figures: dict[str, float], problem: str | None) -> None:
        """Logs an update, or that it was skipped because of `problem`."""
        step = self.state.step
        self.log.advance(step)
        if problem is not None:
            schedule, self.problem = self.state.schedule, problem
            samples = self.inputs.loader.samples(schedule.first(step - 1), schedule.sequences)
            self.log.skipped(problem, samples)
        elif step == 1 or self._due(self.config.log_every):
            self.log.training(figures)
        self.profile.step()

    def evaluate(self) -> None:
        """Runs and logs the evaluations that are due at this step, until one is interrupted.

        Raises `Diverged` if the validation loss is NaN or infinite.
        """
        for every, evaluate in self.inputs.evaluations:
            if self._due(every) and not self.stopping:
                results = evaluate(self.accelerator, self.state.model, self.interrupted)
                self.stopping = not results
                self.log.evaluation(results)
                check_results(results)
                self.state.early_stopping.count(results.get("val/loss"), self.state.step)

    def sample(self) -> None:
        """Generates a sample from each prompt if one is due: on the main process only, uncompiled, in fp32.

        A sharded model is gathered to the main process's device: generation on the CPU would keep the others waiting.
        """
        config, accelerator, model = self.config, self.accelerator, self.state.model
        if self.stopping or not self._due(config.sample_every):
            return
        tokenizer = self.inputs.tokenizer
        plain = full_model(accelerator, model) if is_sharded(model) else unwrap(accelerator, model)
        with main_process_first():  # may exceed the time limit of a collective
            if accelerator.is_main_process:
                plain = plain.to(accelerator.device)
                sampling = Sampling(max_new_tokens=config.sample_tokens, seed=config.seed)
                samples = complete(plain, tokenizer, self.inputs.prompts, sampling)
                for prompt, sample in zip(config.sample_prompts, samples, strict=True):
                    self.log.sample(prompt, whole_text(tokenizer, sample))

    def end_step(self) -> None:
        """Writes the metrics of this step, and then its checkpoint if one is due.

        A checkpoint waits for a good update: if the run diverges, the newest one precedes the bad updates. It has no
        step whose metrics a kill or a full disk could have prevented.
        """
        self._save_due |= self._due(self.config.save_every)
        is_good = self.state.guard.bad_in_a_row == 0
        self.log.write()
        if not self.diverged and (not self.goes_on() or (self._save_due and is_good)):
            self.save()
            self._save_due = False
        self.log.clock.resume()

    def _due(self, every: int) -> bool:
        """Whether an action of every `every` updates, and of the last, is due at this step. 0 means never."""
        step = self.state.step
        return every > 0 and (step % every == 0 or step == self.inputs.updates)

    def _must_stop(self) -> bool:
        """Whether this rank has to stop: after a signal, or because its data cannot be read."""
        return self.stop.reason is not None or self.inputs.loader.problem is not None

    # Checkpoints and the end

    def save(self) -> None:
        """Waits for the previous checkpoint and starts to write the one of this step, unless it is written. All ranks
        call it.

        Raises `OSError` if the run's folder was removed or moved since the start, after the checkpoint is written."""
        state = self.state
        folder_is_gone, failed = on_main_process(
            self.accelerator, lambda: (self._folder_is_gone(), self.writer.failed)
        )
        if state.step == self._saved_step and not failed:
            return
        metrics = Path(self.config.output_dir) / "metrics.jsonl"
        if self.accelerator.is_main_process and metrics.exists():
            sync(metrics)  # a resumed run does not repeat this step
        found = {"data": self._data, "val_loss": self.log.at_this_step("val/loss")}
        self.writer.save(
            self.accelerator,
            state.model,
            state.optimizer,
            state.state_dict() | found,
            self.describe(),
        )
        self._saved_step = state.step
        if folder_is_gone:
            self.wait_for_checkpoint()
            raise OSError(
                f"{self.config.output_dir} was removed or moved during the run: checkpoint-{state.step} is in a new folder "
                "there, continue with --resume_from latest"
            )

    def wait_for_checkpoint(self) -> None:
        """Waits until the last checkpoint is on disk, without a time limit. All ranks call it.

        Raises `OSError` on all ranks if it could not be written.
        """
        with main_process_first():
            self.writer.wait()

    def describe(self) -> Training:
        """Returns the model card's description of the run so far."""
        return describe_training(self.config, self.metadata, self.log)

    def finished(self) -> None:
        """Marks the run as complete: its final model is written. Removes the checkpoints that are not to be kept."""
        if self._status is not None:
            # Before the status: a complete run that is started again removes nothing.
            self.writer.rotate(self.state.step)
            self._status.finished()

    def stopped(self, reason: str) -> None:
        """Marks the run as ended before it is complete."""
        if self._status is not None:
            self._status.stopped(reason)
        self.log.print_line(f"stopped ({reason}); continue with --resume_from latest")

    def check_data(self) -> None:
        """Raises `UnreadableData` on all ranks if one could not read its training data."""
        with all_or_none(self.accelerator):
            if self.inputs.loader.problem is not None:
                raise self.inputs.loader.problem

    def _folder_is_gone(self) -> bool:
        """Waits for the previous checkpoint. Returns whether the run's folder is no longer the one that it locked.

        Raises `OSError` if another run has locked a new one there."""
        self.writer.join()  # a slow disk may exceed the time limit of a collective
        run_dir = Path(self.config.output_dir)
        lock = lock_id(run_dir)
        if lock not in (0, self._lock):
            raise OSError(
                f"{run_dir} was removed or moved during the run, and another process trains there now: start this run "
                "again with another --output_dir"
            )
        return not lock

    def _open_sinks(self, stack: ExitStack) -> list[Sink]:
        """Writes `config.yaml` and `run.json`, prints the summary of the run, and opens what its log goes to."""
        config, run_dir, step = self.config, Path(self.config.output_dir), self.state.step
        self._status = stack.enter_context(Status(run_dir, step, self.stop))
        config.save(run_dir / "config.yaml")
        write_json(run_dir / "run.json", asdict(self.metadata))
        print(start_summary(config, self.metadata, self.accelerator, step), flush=True)
        files = stack.enter_context(RunFiles(run_dir, step))
        terminal = stack.enter_context(Terminal(step, self.inputs.updates))
        trackers = Trackers(config, self.metadata, self.accelerator, step, terminal.print_line)
        return [self._status, terminal, stack.enter_context(trackers), files]

    def _lacks_evaluation(self, earlier: list[dict]) -> bool:
        """Whether a signal prevented the evaluation of the update from which the run resumes, or its result was lost.
        `earlier` are the lines of `metrics.jsonl`, on the main process."""
        step, resumes_here = self.state.step, self._saved_step is not None
        if step == 0 or not self._due(self.config.eval_every):
            return False
        return self.state.unevaluated or on_main_process(
            self.accelerator,
            lambda: (
                resumes_here
                and not any(line["step"] == step and "val/loss" in line for line in earlier)
            ),
        )

    def _build_log(self, sinks: list[Sink], earlier: list[dict]) -> RunLog:
        device = self.accelerator.device
        peak = peak_flops(device_name(device))
        clock = TrainingClock(
            self.state.step,
            self._tokens_at,
            seconds=max((line.get("train/seconds", 0.0) for line in earlier), default=0.0),
            flops_per_token=self.metadata.flops_per_token,
            flops_per_second=peak and peak * self.accelerator.num_processes,
            device_type=device.type,
        )
        return RunLog(sinks, clock, earlier)

    def _tokens_at(self, step: int) -> int:
        """Returns the number of tokens in the first `step` updates."""
        return self.state.schedule.first(step) * self.config.tokens_per_sequence

    def _start_writer(self) -> CheckpointWriter:
        config = self.config
        return CheckpointWriter(
            config.output_dir,
            self.inputs.tokenizer,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            keep_best=config.keep_best and config.eval_every > 0,
            saved=self.uploads.push_checkpoint,
            print_line=self.log.print_line,
        )


def check_results(results: dict[str, float]) -> None:
    """Raises `Diverged` if the validation loss is NaN or infinite."""
    if not math.isfinite(loss := results.get("val/loss", 0.0)):
        raise Diverged(
            f"the run has diverged, val/loss is {loss}: resume from an earlier checkpoint with a lower --learning_rate, or "
            "start again with it"
        )


def start_uploads(
    config: TrainConfig,
    accelerator: Accelerator,
    print_line: Callable[[str], None],
    stop: StopRequest,
) -> Uploads:
    """Builds the uploads to the Hub, which only the main process makes."""
    return Uploads(
        config.push_to_hub if accelerator.is_main_process else None,
        config.output_dir,
        print_line,
        strategy=config.hub_strategy,
        seconds_left=lambda: stop.seconds_left,
    )


@contextmanager
def lock_run_dir(config: TrainConfig, accelerator: Accelerator) -> Iterator[None]:
    """Locks the run's folder on the main process, before the run looks at what is there, and removes partial checkpoints
    that a kill left.

    A run that resumes from `latest` waits for `GRACE_OF_HOLDER` seconds first: the process before it may be about to end.
    Raises the errors of `lock_folder` on all ranks.
    """
    with ExitStack() as stack:

        def lock() -> None:
            wait = GRACE_OF_HOLDER if config.resume_from == "latest" else 0.0
            stack.enter_context(lock_folder(config.output_dir, wait=wait))
            clean_up(config.output_dir)

        on_main_process(accelerator, lock)
        yield

"""The context manager around the training loop: lock, signals, log, trackers, uploads, checkpoints, profiler."""

import gc
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

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
from gpt2_accel.hf.hub import Uploads
from gpt2_accel.runtime.accelerator import profiler
from gpt2_accel.runtime.guard import MAX_BAD_STEPS, Diverged
from gpt2_accel.runtime.log import RunFiles, RunLog, Sink, Status, Terminal
from gpt2_accel.runtime.metadata import describe_run, describe_training, start_summary
from gpt2_accel.runtime.processes import (
    AnyRank,
    all_or_none,
    main_process_first,
    on_main_process,
)
from gpt2_accel.runtime.setup import TrainInputs, TrainState
from gpt2_accel.runtime.signals import StopRequest
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
    profile: torch.profiler.profile | None
    loader: PrefetchLoader

    def __init__(
        self, config: TrainConfig, accelerator: Accelerator, state: TrainState, inputs: TrainInputs
    ):
        self.config, self.accelerator = config, accelerator
        self.state, self.inputs = state, inputs
        self.metadata = describe_run(config, accelerator, state, inputs)
        self.status: Status | None = None  # of the main process
        self.stopping, self.problem = False, ""
        self._data = data_fingerprint(config.data_dir)
        self._lock = lock_id(config.output_dir)
        self._saved_step = state.step if inputs.resumes_here else None
        self._save_due = False
        self._stack = ExitStack()

    def __enter__(self) -> "RunContext":
        with self._stack as stack:
            with all_or_none(self.accelerator):
                self._enter_parts(stack)
            if self.state.unevaluated and self._due(self.config.eval_every):
                self.evaluate()
                self._saved_step, self._save_due = None, True  # the checkpoint gets the result, too
                self.end_step()
            self._stack = stack.pop_all()
        return self

    def _enter_parts(self, stack: ExitStack) -> None:
        """Starts the parts."""
        config, accelerator, run_dir = self.config, self.accelerator, Path(self.config.output_dir)
        self.stop = stack.enter_context(StopRequest(config.max_hours))
        self.interrupted = AnyRank(accelerator, self._must_stop)
        earlier, sinks = [], []
        if accelerator.is_main_process:
            earlier = read_json_lines(run_dir / "metrics.jsonl")
            sinks = self._open_sinks(stack)
        peak = peak_flops(device_name(accelerator.device))
        self.log = RunLog(
            sinks,
            self.state.step,
            lambda step: self.state.schedule.first(step) * config.tokens_per_sequence,
            flops_per_token=self.metadata.flops_per_token,
            flops_per_second=peak and peak * accelerator.num_processes,
            device_type=accelerator.device.type,
            earlier=earlier,
        )
        self.uploads = stack.enter_context(
            Uploads(
                config.push_to_hub if accelerator.is_main_process else None,
                run_dir,
                self.log.print_line,
                strategy=config.hub_strategy,
                seconds_left=lambda: self.stop.seconds_left,
            )
        )
        self.profile = stack.enter_context(profiler(config.profile, run_dir, accelerator))
        self.writer = stack.enter_context(
            CheckpointWriter(config, self.inputs.tokenizer, self.uploads.push, self.log.print_line)
        )
        steps = range(self.state.step, self.inputs.updates)
        self.loader = stack.enter_context(
            PrefetchLoader(self.inputs.loader, self.state.schedule, steps)
        )
        if self.inputs.checkpoint is not None and accelerator.is_main_process:
            self.writer.link(self.state.step)  # a kill may have prevented it
        if gc.isenabled():  # a rank that collects within an update keeps the others waiting
            gc.disable()
            stack.callback(gc.enable)
        self.log.resume()

    def _open_sinks(self, stack: ExitStack) -> list[Sink]:
        """Writes `config.yaml` and `run.json`, prints the summary of the run, and opens what its log goes to."""
        config, run_dir, step = self.config, Path(self.config.output_dir), self.state.step
        self.status = stack.enter_context(Status(run_dir, step, self.stop))
        config.save(run_dir / "config.yaml")
        metadata = asdict(self.metadata)
        write_json(run_dir / "run.json", metadata)
        print(start_summary(config, self.metadata, self.accelerator, step), flush=True)
        files = stack.enter_context(RunFiles(run_dir, step))
        terminal = stack.enter_context(Terminal(step, self.inputs.updates))
        trackers = Trackers(config, metadata, self.accelerator, step, terminal.print_line)
        return [self.status, terminal, stack.enter_context(trackers), files]

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
        return self.state.guard.bad_in_a_row >= MAX_BAD_STEPS

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
        if self.profile is not None:
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
                if (loss := results.get("val/loss")) is None:
                    continue
                if not math.isfinite(loss):
                    raise Diverged(
                        f"the run has diverged, val/loss is {loss}: resume from an earlier checkpoint with a lower "
                        "--learning_rate, or start again with it"
                    )
                self.state.early_stopping.count(loss)

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
        if self._due(self.config.log_every):
            gc.collect(1)  # on all ranks at once, the young objects
        self.log.resume()

    def _due(self, every: int) -> bool:
        """Whether an action of every `every` updates, and of the last, is due at this step. 0 means never."""
        step = self.state.step
        return every > 0 and (step % every == 0 or step == self.inputs.updates)

    def _must_stop(self) -> bool:
        """Whether this rank has to stop: after a signal, or because its data cannot be read."""
        return self.stop.reason is not None or self.inputs.loader.problem is not None

    def check_data(self) -> None:
        """Raises `UnreadableData` on all ranks if one could not read its training data."""
        with all_or_none(self.accelerator):
            if self.inputs.loader.problem is not None:
                raise self.inputs.loader.problem

    # Checkpoints

    def save(self) -> None:
        """Waits for the previous checkpoint and starts to write the one of this step, unless it is written. All ranks
        call it. Raises `OSError` if another run has taken the folder."""
        state = self.state
        failed = on_main_process(self.accelerator, self._end_write)
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
            describe_training(self.config, self.metadata, self.log),
        )
        self._saved_step = state.step

    def _end_write(self) -> bool:
        """Waits for the previous checkpoint. Returns whether it could not be written.

        Raises `OSError` if the run's folder was removed or moved, and another run has locked a new one."""
        self.writer.join()  # a slow disk may exceed the time limit of a collective
        run_dir = self.config.output_dir
        lock = lock_id(run_dir)
        if lock not in (0, self._lock):
            raise OSError(
                f"{run_dir} was removed or moved during the run, and another process trains there now: start this run "
                "again with another --output_dir"
            )
        if not lock:
            self.log.print_line(
                f"{run_dir} was removed or moved during the run: checkpoints go into a new folder there, without "
                "the earlier metrics"
            )
        return self.writer.failed

    def wait_for_checkpoint(self) -> None:
        """Waits until the last checkpoint is on disk, without a time limit. All ranks call it.

        Raises `OSError` on all ranks if it could not be written.
        """
        with main_process_first():
            self.writer.wait()


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

"""Callbacks: what happens around the updates of a run.

A callback is any object with some of the methods of `Callback`. All ranks call them, in the order
of the run's list. `setup.py` puts the callbacks of this module after the user's callbacks.
"""

import inspect
import math
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import GeneralTracker

from gpt2_accel.data.shards import COUNTS, TOKEN_ID
from gpt2_accel.evals import kept
from gpt2_accel.generation.sampling import Prompt, Sampling, whole_text
from gpt2_accel.run import Evaluation, Run, call, diverged, goes_on, on_plain_model
from gpt2_accel.runtime.files import first_line
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.runtime.processes import on_main_process
from gpt2_accel.runtime.trackers import start_tracker
from gpt2_accel.saving import collect, save, save_due


class Callback:
    """The methods that a callback may have, named as in `TrainerCallback` of `transformers`.

    It may be a subclass, or any object with some of these methods. It may also be a context
    manager, around the loop. An exception ends the run.

    A callback may have state: `state_dict()` returns what a checkpoint keeps, tensors, which may be
    sharded, and JSON values; `load_state_dict(state)` restores it, with unsharded tensors on the
    CPU.
    """

    def on_train_begin(self, run: Run) -> None:
        """Before the first update, after `load_state_dict`."""

    def on_pre_optimizer_step(self, run: Run) -> None:
        """Before the optimizer's step; the gradients are complete, unscaled and clipped."""

    def on_step_end(self, run: Run, skipped: bool) -> None:
        """After update `run.step`; `skipped` if it did not change the weights.

        At the start also after `Run.postpone`, `skipped`.
        """

    def on_evaluate(self, run: Run, metrics: dict[str, float]) -> None:
        """After an evaluation."""

    def on_log(self, run: Run, logs: dict[str, Any]) -> None:
        """After a line of `metrics.jsonl`."""

    def on_save(self, run: Run, path: Path) -> None:
        """After a checkpoint is complete, at the next update; the last before `on_train_end`."""

    def on_train_end(self, run: Run, finished: bool) -> None:
        """After the last checkpoint and, if the run is `finished`, the final model."""


def check_callback(callback: Any) -> None:
    """Raises `ValueError` for an object without a method that a run calls, and for a method that it
    never calls, such as `on_epoch_begin`, or with other arguments."""
    kind = type(callback).__name__
    names = [name for name in dir(callback) if name.startswith("on_")]
    has_state = hasattr(callback, "state_dict")
    if not (names or has_state or isinstance(callback, AbstractContextManager)):
        raise ValueError(f"the callback {callback!r} has none of the methods in docs/change.md")
    for name in names:
        expected = getattr(Callback, name, None)
        if expected is None:
            raise ValueError(
                f"{kind} has {name}, which a run never calls: docs/change.md lists the methods of "
                "a callback; a TrainerCallback of transformers has methods with other arguments"
            )
        _, run, *others = inspect.signature(expected).parameters
        try:
            inspect.signature(getattr(callback, name)).bind(run, **dict.fromkeys(others))
        except TypeError as error:
            raise ValueError(
                f"{kind}.{name} does not take {', '.join((run, *others))} ({error}): a run calls "
                "it with these"
            ) from error


class Figures:
    """Logs the figures of an update every `log_every` updates, and once that the data is slow."""

    slow = False  # whether that was said

    def on_step_end(self, run: Run, skipped: bool) -> None:
        waited, seconds = run.loader.waited, run.log.seconds
        if not self.slow and run.step % 50 == 0 and waited > seconds / 2:
            self.slow = True
            made = run.schedule.first(run.step) / seconds
            run.log.print_line(
                f"the data is slow: it gives {made:,.0f} windows/s, and the run could train on "
                f"{made * seconds / (seconds - waited):,.0f}: prepare it as shards, or make it "
                "faster"
            )
        if skipped:
            return
        first = run.step == 1
        if first or run.due(run.config.log_every):
            run.log.training(run.figures)
        if first and run.config.init_from is None:
            uniform = math.log(run.empty.config.vocab_size)
            run.log.print_line(
                f"first loss {run.figures['loss']:.2f}; equal probabilities give ln V = "
                f"{uniform:.2f}, weights with large logits more"
            )


@dataclass
class Evaluations:
    """Runs the evaluations that are due.

    `evaluations` are pairs of an interval in updates and an evaluation. The validation loss decides
    on early stopping and the best checkpoint. Raises `Diverged` if it is not finite, `ValueError`
    for other pairs.
    """

    evaluations: list[tuple[int, Evaluation]]

    def __post_init__(self) -> None:
        if not all(isinstance(every, int) and callable(own) for every, own in self.evaluations):
            raise ValueError("give pairs of an interval in updates and a function")

    def on_step_end(self, run: Run, skipped: bool) -> None:
        for every, evaluation in self.evaluations:
            loss = run.evaluate(evaluation).get("val/loss") if run.due(every) else None
            if loss is not None:
                if not math.isfinite(loss):
                    raise Diverged(
                        f"the run has diverged, val/loss is {loss}: resume from an earlier "
                        "checkpoint with a lower --learning_rate, or start again with it"
                    )
                if run.state.val_loss is None:  # else counted before the stop
                    run.state.count(loss)


@dataclass
class Samples:
    """Generates a sample from each prompt every `sample_every` updates, on the main process."""

    prompts: list[Prompt]

    def on_step_end(self, run: Run, skipped: bool) -> None:
        config = run.config
        if not run.due(config.sample_every):
            return
        sampling = Sampling(max_new_tokens=config.sample_tokens, seed=config.seed)
        samples = run.generate(self.prompts, sampling)
        for prompt, sample in zip(config.sample_prompts, samples, strict=False):  # or none
            run.log.sample(prompt, whole_text(run.tokenizer, sample))


@dataclass
class Kept:
    """Measures what the run keeps of its base model, as `val/kept`: see `evals/kept.py`.

    The base is sampled before the first update, and checkpoints hold the `base` texts. Of pairs of
    answers it also answers a held-out prompt, shown at the end with the answer then.
    """

    base: dict[str, Any] = field(default_factory=dict)  # empty if nothing is measured

    def state_dict(self) -> dict[str, Any]:
        return self.base

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base = state

    def on_train_begin(self, run: Run) -> None:
        """Samples from the base. A run that is resumed has its samples."""
        if not run.step and not self.base:
            start = str(run.config.init_from)
            run.log.print_line("sampling from the base, to measure later what the run keeps of it")
            shown: list[Prompt] = []
            if run.data.pairs:  # the first half of a window is the prompt and the chosen answer
                source = run.data.split("val")[0][0]
                row = source.read(0, source.sequence_length // 2)
                shown.append((row[: (row & COUNTS).argmax()] & TOKEN_ID).tolist())
            self.base = on_plain_model(
                run,
                lambda m: kept.sample_base(m, run.tokenizer, start, lambda: run.stop.reason, shown),
            )
            # Before an update: a resume samples anew.
            run.stopping |= on_main_process(lambda: run.stop.reason is not None)

    def on_step_end(self, run: Run, skipped: bool) -> None:
        """Makes the estimate after the last update."""
        if not self.base or diverged(run) or goes_on(run):
            return
        if run.stopping:  # what is postponed may end the run
            run.postpone()
            return
        run.log.print_line("measuring what is kept of the base")
        results, answers = on_plain_model(
            run, lambda model: kept.compare(model, run.tokenizer, self.base)
        )
        run.log.evaluation(results)
        call(run, "on_evaluate", metrics=results)
        run.remark(kept.verdict(results, self.base, answers, run.tokenizer))


class Profiler(torch.profiler.profile):
    """Traces `updates` updates after the first five into a file for https://ui.perfetto.dev."""

    def __init__(self, updates: int, path: Path):
        super().__init__(
            schedule=torch.profiler.schedule(wait=4, warmup=1, active=updates, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        )

    def on_step_end(self, run: Run, skipped: bool) -> None:
        self.step()


@dataclass
class Trackers(AbstractContextManager):
    """Sends each line of `metrics.jsonl` to experiment trackers, on the main process.

    Raises `OSError` if a tracker cannot be started. One that fails later is reported and dropped,
    and the run continues.
    """

    names: list[str]
    trackers: list[GeneralTracker] = field(default_factory=list)

    def __exit__(self, *_: Any) -> None:
        for tracker in self.trackers:
            with suppress(Exception):  # a tracker's failure must not fail the run
                tracker.finish()

    def on_train_begin(self, run: Run) -> None:
        def start() -> None:
            for name in self.names:
                self.trackers.append(start_tracker(name, run.config, run.metadata, run.step))

        on_main_process(start)

    def on_log(self, run: Run, logs: dict[str, Any]) -> None:
        values = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        step = values.pop("step")
        for tracker in list(self.trackers):
            # Without `commit` wandb sends a step with the next one, and a kill would lose it.
            options = {"commit": True} if tracker.name == "wandb" else {}
            try:
                tracker.log(values, step=step, **options)
            except Exception as error:  # each library has its own types
                self.trackers.remove(tracker)
                reason = first_line(error)
                run.log.print_line(f"{tracker.name} failed and gets no more steps: {reason}")


class Checkpoints:
    """Writes this step's metrics, then its checkpoint if one is due. It is the last callback."""

    tried = False  # whether what a checkpoint needs was collected after an update

    def on_step_end(self, run: Run, skipped: bool) -> None:
        line = run.log.write()
        if line:
            call(run, "on_log", logs=line)
        if not (self.tried or skipped):
            self.tried = True
            collect(run)  # an optimizer has its state now: what cannot be saved ends the run here
        if save_due(run):
            save(run)

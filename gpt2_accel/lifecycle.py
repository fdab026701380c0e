"""The start and the end of a run: the lock of its folder, the last checkpoint, the final model."""

import gc
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from accelerate.utils import gather_object

from gpt2_accel.charts import fallen, outcome, still_falling
from gpt2_accel.checkpoint.find import changed_files, read_status
from gpt2_accel.checkpoint.writer import CheckpointWriter, write_manifest
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.prefetch import PrefetchLoader
from gpt2_accel.data.shards import UnreadableData
from gpt2_accel.evals.kept import LOSES
from gpt2_accel.first_model import load_model
from gpt2_accel.hf.comparison import ModelFiles
from gpt2_accel.hf.hub import MODEL_MANIFEST
from gpt2_accel.hf.lora import merged, set_dtype
from gpt2_accel.hf.safetensors_files import WEIGHTS
from gpt2_accel.hf.tensors import check_finite
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.pushes import UPLOADS
from gpt2_accel.run import Run, call, diverged, goes_on, stops_early
from gpt2_accel.runtime import signals
from gpt2_accel.runtime.device import device_name, peak_flops
from gpt2_accel.runtime.files import (
    atomic_directory,
    lock_folder,
    read_json_lines,
    remove,
    sentence,
    write_json,
)
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.runtime.log import RunLog, Status
from gpt2_accel.runtime.metadata import describe_run, describe_training, end_summary, start_summary
from gpt2_accel.runtime.processes import all_or_none, on_main_process
from gpt2_accel.runtime.recipe_command import recipe_command
from gpt2_accel.saving import check_problems, collect, end_write, save
from gpt2_accel.tokenizer import load_tokenizer
from gpt2_accel.tuning import is_pretrained

GRACE_OF_HOLDER = 60.0  # seconds: batch systems and pods kill a process 30 seconds after the signal


@contextmanager
def lock_run_dir(config: TrainConfig) -> Iterator[None]:
    """Locks the run's folder on the main process, before the run reads what is there.

    A run that resumes from `latest` waits up to `GRACE_OF_HOLDER` seconds for the lock: the process
    before it may be about to end. Removes partial checkpoints that a kill left. Raises `OSError` on
    all ranks if another process holds the lock or the folder cannot be written.
    """
    with ExitStack() as stack:

        def lock() -> None:
            wait = GRACE_OF_HOLDER if config.resume_from == "latest" else 0.0
            stack.enter_context(lock_folder(config.output_dir, wait=wait))
            # A killed process on any machine may have left one.
            for partial in Path(config.output_dir).glob(".checkpoint-*"):
                remove(partial)

        on_main_process(lock)
        yield


def open_logs(run: Run) -> None:
    """Sets what depends on the step at which a run starts: its metadata, logs, writer and loader.

    Writes nothing.
    """
    config = run.config
    accelerator = run.accelerator
    run.state.run_id = on_main_process(lambda: run.state.run_id or secrets.token_hex(4))
    run.updates = run.schedule.updates
    run.state.finishing &= run.updates <= run.state.finish  # unless the run is longer now
    run.metadata = describe_run(run)
    speed = peak_flops(device_name(accelerator.device))
    if speed is not None:
        speed = speed * accelerator.num_processes / run.metadata["flops_per_token"]
    run.log = RunLog(
        run.run_dir if accelerator.is_main_process else None,
        run.step,
        run.updates,
        lambda step: run.schedule.first(step) * config.tokens_per_sequence,
        speed,
        torch.get_num_threads() if accelerator.device.type == "cpu" else 0,
    )
    run.status = Status(run.run_dir, lambda: run.step, run.stop)
    run.files = ModelFiles(run.tokenizer, run.log.print_line)
    run.writer = CheckpointWriter(config, run.files, run.log.print_line)
    steps = range(run.step, run.updates)
    run.loader = PrefetchLoader(run.train_loader, run.schedule, steps, accelerator.device)


@contextmanager
def started(run: Run) -> Iterator[None]:
    """Runs the block, the loop, with signals, status, log, and callbacks that are context managers.

    Writes `config.yaml` and `run.json` and prints a summary. Saves a checkpoint if the data can no
    longer be read.
    """
    with ExitStack() as stack:
        with all_or_none():
            stack.enter_context(run.stop)
            if run.accelerator.is_main_process:
                stack.enter_context(run.status)
                run.config.save(run.run_dir / "config.yaml")
                write_json(run.run_dir / "run.json", run.metadata)
                print(start_summary(run), *run.changes.values(), sep="\n", flush=True)
                run.writer.link(run.step)  # a kill may have prevented it
            stack.enter_context(run.log)
        for part in (*run.callbacks, run.writer, run.loader):
            if isinstance(part, AbstractContextManager):
                stack.enter_context(part)
        gc.disable()  # a rank that collects within an update keeps the others waiting
        stack.callback(gc.enable)
        call(run, "on_train_begin")
        postponed, run.state.postponed = run.state.postponed, []
        # Also logs what was evaluated before the first update.
        call(run, "on_step_end", [*postponed, "Checkpoints"], skipped=True)
        rehearse_save(run)
        run.log.resume()
        run.log.bar.unpause()  # the time left is that of updates
        try:
            yield
        except UnreadableData:  # raised on all ranks
            run.log.write()
            save(run)
            raise


def rehearse_save(run: Run) -> None:
    """Saves a checkpoint without weights, and removes it.

    What cannot be saved ends the run before its first update, and so does a folder in which
    folders cannot be renamed, as in many mounted buckets.
    """

    def rehearse() -> None:
        path = run.run_dir / "checkpoint-rehearsal"
        with atomic_directory(path, replace=True) as folder:
            run.files.save(run.empty, folder, describe_training(run))
            load_tokenizer(folder)
        remove(path)

    collect(run)  # raises for what JSON does not have
    on_main_process(rehearse)


def finish(run: Run) -> bool:
    """Saves the last checkpoint and, if the run is complete, the final model.

    Returns whether the run is complete. Raises `Diverged` if it has diverged, and what a rank's
    read or save has raised.
    """
    config = run.config
    bad = run.guard.bad_in_a_row
    if diverged(run):
        run.state.step -= bad  # the bad updates did not change the weights
    else:
        check_problems(run)
    save(run)
    problem = end_write(run)
    if problem:
        raise OSError(f"the last checkpoint could not be written: {problem}")
    if diverged(run):
        raise Diverged(
            f"{bad} updates in a row were skipped, the last because {run.problem}: resume from "
            f"checkpoint-{run.step} or an earlier one with a lower --learning_rate, or look at the "
            f"samples listed in {config.output_dir}/metrics.jsonl"
        )
    run.log.bar.close()  # the bar stays above the last lines
    run.log.print_line(end_summary(run))
    finished = not run.state.postponed and (
        stops_early(run) or run.state.finishing or run.step >= run.updates
    )
    reason = max(gather_object([run.finish_reason]))  # maybe only one rank has one
    if stops_early(run) and run.step < run.updates:
        reason = f"no lower validation loss in {config.patience} evaluations"
    if finished:
        if reason:
            run.log.print_line(f"finished: {reason}")
        remark_on_metrics(run)
        export_model(run, reason)
    else:
        stops = gather_object([(run.stop.reason, run.stop.requeue)])  # maybe only one rank stops
        reason, requeue = next(stop for stop in stops if stop[0])
        if run.accelerator.is_main_process:
            run.status.end("stopped", reason, requeue=requeue)
        signals.exit_code = run.stop.exit_code
        run.log.print_line(f"stopped ({reason}); the same command continues (--resume_from latest)")
    call(run, "on_train_end", finished=finished)
    run.log.write()
    return finished


def remark_on_metrics(run: Run) -> None:
    """Remarks on a reward that has fallen, and on a validation loss that was still falling.

    The latter only in fine-tuning on conversations, unless a pretrained model has lost what it
    knew: more epochs would make that worse.
    """
    lines = read_json_lines(run.run_dir / "metrics.jsonl")
    text = fallen(lines)
    base, data = run.config.init_from, run.data
    lost = run.log.results.get("val/kept", 0) > LOSES
    if base and data.chat and not data.pairs and not (lost and is_pretrained(base)):
        text = text or still_falling(lines, run.updates, run.metadata["epochs"])
    if text:
        run.remark(text)


def closing(run: Run) -> str:
    """Returns how a complete run went, where its models are, and commands to use them."""
    folder = run.run_dir
    text = outcome(read_json_lines(folder / "metrics.jsonl"), run.metadata.get("xz_bits_per_byte"))
    text += f"\n\nThe model is in {folder}"
    best = run.writer.about_best
    if best and not run.config.load_best_model_at_end:
        best = f"the last update, {run.step:,}; {folder / 'best'} has that of {best}"
    if best:
        text += f", that of {best}"
    prompt = [] if run.data.chat else ["--prompt", (run.config.sample_prompts or [""])[0]]
    text += (
        ". To try it, to see how training went, and to measure it:\n"
        f"  {recipe_command('sample', '--model', folder, *prompt)}\n"
        f"  {recipe_command('report', folder, '--open')}"
    )
    if run.data.folder and not run.data.pairs:
        return f"{text}\n  {recipe_command('evaluate', '--model', folder)}"
    return f"{text}\n  docs/evaluation.md has the commands for data of this kind"


def export_model(run: Run, reason: str) -> None:
    """Writes the final model into the run's folder, and marks the run as finished, for a `reason`.

    With `load_best_model_at_end` it is the model of the best checkpoint.
    An adapter goes to `adapter/`, and the model has it merged. Raises `OSError` if the model cannot
    be written, `ValueError` if its weights are not finite.
    """
    config = run.config
    plain = run.copied_model()
    if plain is None:  # this is not the main process
        return
    check_finite(plain, f"the model after update {run.step}")
    training = describe_training(run)
    best = run.writer.best
    if config.load_best_model_at_end and best and best.name != f"checkpoint-{run.step}":
        given = None if isinstance(plain, AnyModel) else plain
        plain = load_model(config, run.data, best, given, merge=False)
        set_dtype(plain, config)
        training.weights = run.writer.about_best
    try:
        run.files.compared = False
        if config.lora:
            run.files.save(plain, run.run_dir / "adapter", training)
            assert isinstance(plain, AnyModel)
            plain = merged(plain)
        run.files.save(plain, run.run_dir, training)
        write_manifest(run.run_dir, MODEL_MANIFEST, (WEIGHTS, "config.json", "tokenizer.json"))
    except OSError as error:
        raise OSError(
            f"the final model could not be written to {config.output_dir} ({sentence(error)}): "
            "free space or make it writable, then continue from the last checkpoint with "
            "--resume_from latest"
        ) from error
    # Before the status: a complete run that is started again removes nothing.
    run.writer.rotate(run.step)
    run.status.end("finished", reason)


def is_complete(run: Run) -> bool:
    """Whether nothing is left to train and the final model is written. If so, prints that.

    Raises `ValueError` if settings were given that the complete run does not have, or if its model
    was changed since.
    """
    run_dir = run.run_dir

    def has_finished() -> bool:
        status = read_status(run_dir)
        finished = status.get("state") == "finished" and status.get("step") == run.step
        unsent = run.config.push_to_hub and (run_dir / UPLOADS).exists()
        if unsent or not (finished and any(run_dir.glob("model*.safetensors"))):
            return False
        for file, problem in changed_files(run_dir, MODEL_MANIFEST):
            if file.endswith(".safetensors"):
                raise ValueError(
                    f"{run_dir} is complete, but {problem}: delete {file}, and the same command "
                    "writes it again"
                )
        return True

    if goes_on(run) or not (run.resumes_here and on_main_process(has_finished)):
        return False
    text = (
        f"{run_dir} is complete: nothing left to train after {run.step:,} updates: raise "
        "--max_steps, --epochs or --patience to continue"
    )
    unused = [change for name, change in run.changes.items() if name in run.config.given]
    if unused:
        raise ValueError(
            f"{text}, or choose another --output_dir: {', '.join(unused)} was not used"
        )
    run.accelerator.print(text)
    return True

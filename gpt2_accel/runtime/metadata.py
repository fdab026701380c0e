"""Collects the metadata of a run for `run.json`, the trackers, the model card and the terminal."""

import subprocess
from copy import copy
from typing import TYPE_CHECKING, Any

from gpt2_accel import kernels
from gpt2_accel.config import INERT, SHAPE, TrainConfig
from gpt2_accel.estimate.flops import TYPICAL_MFU, flops_per_token
from gpt2_accel.evals.formulas import formatted
from gpt2_accel.evals.validation import describe_validation
from gpt2_accel.hf.model_card import Training, installed_versions
from gpt2_accel.optim import learning_rate
from gpt2_accel.runtime.device import device_name, memory_gb, precision_name
from gpt2_accel.runtime.files import duration
from gpt2_accel.tokenizer import fingerprint

if TYPE_CHECKING:
    from gpt2_accel.run import Run


def describe_run(run: "Run") -> dict:
    """Returns the metadata of a run that is about to start, for `run.json` and the trackers.

    `parts` names the script and the parts of the run. `tokens` are the training tokens of the
    complete run. `batch` describes how the tokens of a full update are divided. `bos` is the token
    that replaces the first of each window of text, in a list. `chat`: whether the data are
    conversations. `changes` is the history of changed settings. `tokenizer` is the fingerprint
    of the data's tokenizer. `git_commit` is the working directory's commit, with `-dirty` after
    changes, None outside a repository. Only the main process has the commit, the versions and what
    `describe_validation` returns, which take time.
    """
    config = run.config
    accelerator = run.accelerator
    loader = run.train_loader
    shape = run.empty.config
    length = config.tokens_per_sequence
    tokens = run.schedule.first(run.updates) * length
    batch = (
        f"{config.total_batch_size:,} tokens per update = "
        f"{loader.micro_batches(run.schedule.full)} micro-batches x "
        f"{accelerator.num_processes} processes x {loader.micro_batch_size} sequences x "
        f"{length} tokens"
    )
    if config.ramp_tokens:
        batch += f", growing from {config.ramp_start} sequences over {config.ramp_tokens:,} tokens"
    hardware = f"{accelerator.num_processes} x {device_name(accelerator.device)}"
    if accelerator.is_fsdp2:
        hardware += ", sharded by FSDP2"
    about = {
        "run_id": run.state.run_id,
        "parts": run.parts,
        "parameters": shape.parameter_count,
        "tokenizer": fingerprint(run.tokenizer),
        "flops_per_token": flops_per_token(shape, config.tokens_per_row),
        "updates": run.updates,
        "tokens": tokens,
        "batch": batch,
        "micro_batch_size": loader.micro_batch_size,
        "sequence_length": length,
        "bos": loader.bos,
        "epochs": tokens / length / loader.windows,
        "data": run.data.description,
        "chat": run.data.chat,
        "hardware": f"{hardware}, {precision_name(accelerator.mixed_precision)}",
        "changes": run.state.changes,
    }
    if accelerator.is_main_process:
        about |= {"git_commit": git_commit(), "versions": installed_versions()}
        about |= describe_validation(run.data, config.eval_tokens)
    return about


def describe_training(run: "Run") -> Training:
    """Returns the model card's description of the run so far, with the sizes of its model."""
    log = run.log
    shape = run.empty.config
    sizes = {name: getattr(shape, name) for name in SHAPE if hasattr(shape, name)}
    sizes["sequence_length"] = run.config.tokens_per_sequence
    return Training(
        settings=run.config.settings() | sizes | {"parts": run.parts},
        data=run.metadata["data"],
        tokens=log.tokens,
        hours=log.seconds / 3600,
        flops=log.tokens * run.metadata["flops_per_token"],
        hardware=run.metadata["hardware"],
        results=formatted(dict(log.results)),  # a card is written while training goes on
        remarks=run.remarks,
    )


def changed_settings(
    config: TrainConfig, before: dict[str, Any], step: int, tokens: int
) -> dict[str, str]:
    """Returns the changed settings that can affect a run's numbers, and the next learning rate.

    `before` are the settings used until update `step`, after `tokens` tokens. The result maps a
    name to `NAME OLD -> NEW from update STEP`.
    """

    def with_rate(each: TrainConfig) -> dict[str, Any]:
        rate = learning_rate(each, tokens / each.total_batch_size)
        return each.settings() | {"the schedule's learning rate": f"{rate:.3g}"}

    former = copy(config)
    vars(former).update(before)
    new = with_rate(config)
    return {
        name: f"{name} {value} -> {new[name]} from update {step}"
        for name, value in with_rate(former).items()
        if name not in INERT and value != new[name]
    }


def git_commit() -> str | None:
    """Returns the commit of the working directory's repository; None if there is none."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def start_summary(run: "Run") -> str:
    """Returns the summary that the terminal shows before the first update.

    It has the kind of attention, and the speed to expect on a known GPU.
    """
    about = run.metadata
    compiled = run.accelerator.state.dynamo_plugin.backend.value.lower()
    flops = about["flops_per_token"] * about["tokens"]
    choices = f"attention by {(kernels.choices.sdpa_order or ('torch',))[0].lower()}"
    if run.log.full_speed is not None:
        speed = TYPICAL_MFU * run.log.full_speed
        choices += f", about {speed:,.0f} tokens/s at {TYPICAL_MFU:.0%} of the peak"
    return (
        f"{about['parameters']:,} parameters on {about['hardware']}, compile backend {compiled}\n"
        f"{about['batch']}\n"
        f"{choices}\n"
        f"updates {run.step:,} to {run.updates:,}: {about['tokens']:,} tokens, "
        f"{about['epochs']:.3g} epochs, {flops:.2g} FLOPs, into {run.config.output_dir}"
    )


def end_summary(run: "Run") -> str:
    """Returns the summary that the terminal shows after the last update."""
    log = run.log
    flops = log.tokens * run.metadata["flops_per_token"]
    return (
        f"trained on {log.tokens:,} tokens ({flops:.2g} FLOPs) in {duration(log.seconds)}, "
        f"{log.tokens / max(log.seconds, 1e-9):,.0f} tokens/s, {memory_gb():.1f} GB of memory"
    )

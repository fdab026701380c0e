"""Collects the metadata of a run for `run.json`, the trackers, the model card and the terminal."""

import subprocess
from dataclasses import dataclass

from accelerate import Accelerator

from gpt2_accel import kernels
from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.device import device_name, is_sharded, memory_gb, precision_name
from gpt2_accel.estimate.flops import duration, flops_per_token
from gpt2_accel.estimate.law import Prediction, prediction
from gpt2_accel.hf.model_card import Training, installed_versions
from gpt2_accel.runtime.log import RunLog, in_words
from gpt2_accel.runtime.setup import TrainInputs, TrainState


@dataclass
class RunMetadata:
    """The metadata of a run beside its settings, for `run.json` and the trackers.

    `tokens` are those of the run's `updates` updates. `batch` describes how the tokens of a full update are divided;
    `micro_batch_size` and `sequence_length` are those that the settings lead to. `tokenizer` is the fingerprint of the
    data's tokenizer. `git_commit` is the working directory's commit, with `-dirty` after changes, None outside a
    repository. `prediction` is that of `law`, None without one.
    """

    run_id: str
    parameters: int
    tokenizer: str
    flops_per_token: int
    updates: int
    tokens: int
    batch: str
    micro_batch_size: int
    sequence_length: int
    epochs: float
    data: str
    hardware: str
    git_commit: str | None
    versions: dict[str, str]
    prediction: Prediction | None


def describe_run(
    config: TrainConfig, accelerator: Accelerator, state: TrainState, inputs: TrainInputs
) -> RunMetadata:
    """Returns the metadata of a run that is about to start. Only the main process looks up what takes time: the commit
    and the versions."""
    shape = unwrap(accelerator, state.model).config
    manifest, main = read_manifest(config.data_dir), accelerator.is_main_process
    length, loader, schedule = config.tokens_per_sequence, inputs.loader, state.schedule
    tokens = schedule.first(inputs.updates) * length
    size, count = loader.micro_batches(schedule.sequences)
    sharded = ", sharded by FSDP2" if is_sharded(state.model) else ""
    return RunMetadata(
        run_id=state.run_id,
        parameters=shape.parameter_count,
        tokenizer=manifest["tokenizer"]["fingerprint"],
        flops_per_token=flops_per_token(shape, length),
        updates=inputs.updates,
        tokens=tokens,
        batch=f"{config.total_batch_size:,} tokens per update = {count} micro-batches x "
        f"{accelerator.num_processes} processes x {size} sequences x {length} tokens",
        micro_batch_size=loader.micro_batch_size,
        sequence_length=length,
        epochs=tokens / length / loader.windows,
        data=f"{manifest['source']} ({manifest['splits']['train']['tokens']:,} tokens)",
        hardware=f"{accelerator.num_processes} x {device_name(accelerator.device)}{sharded}, "
        f"{precision_name(accelerator.mixed_precision)}",
        git_commit=git_commit() if main else None,
        versions=installed_versions() if main else {},
        prediction=prediction(config, shape) if main else None,
    )


def describe_training(config: TrainConfig, metadata: RunMetadata, log: RunLog) -> Training:
    """Returns the model card's description of the run so far."""
    return Training(
        settings=config.settings(),
        data=metadata.data,
        tokens=log.tokens,
        hours=log.seconds / 3600,
        flops=log.tokens * log.flops_per_token,
        hardware=metadata.hardware,
        results=dict(log.results),  # a card is written while training goes on
        updates=dict(log.evaluated),
    )


def git_commit() -> str | None:
    """Returns the commit of the working directory's repository; None if there is none."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def start_summary(
    config: TrainConfig, metadata: RunMetadata, accelerator: Accelerator, step: int
) -> str:
    """Returns the summary that the terminal shows before the first update; `step` updates are done already."""
    compiled = accelerator.state.dynamo_plugin.backend.value.lower()
    names = (name.removesuffix("_ATTENTION").lower() for name in kernels.choices.sdpa_order)
    attention = ", ".join(names) or "chosen by torch"
    if kernels.choices.block_masks and config.document_mask:
        attention = "flex, with a block mask"
    flops = float(metadata.flops_per_token) * metadata.tokens
    return (
        f"{metadata.parameters:,} parameters on {metadata.hardware}, compile backend {compiled}, attention {attention}\n"
        f"{metadata.batch}\n"
        f"updates {step:,} to {metadata.updates:,}: {metadata.tokens:,} tokens, {metadata.epochs:.3g} epochs, "
        f"{flops:.2g} FLOPs, into {config.output_dir}"
        + (f"\nthe law predicts {metadata.prediction}" if metadata.prediction else "")
    )


def end_summary(log: RunLog, prediction: Prediction | None) -> str:
    """Returns the summary that the terminal shows after the last update."""
    results = "".join(
        f"; at update {step:,} "
        + in_words({name: log.results[name] for name in log.results if log.evaluated[name] == step})
        for step in sorted(set(log.evaluated.values()))
    )
    return (
        f"trained on {log.tokens:,} tokens ({log.tokens * log.flops_per_token:.2g} FLOPs) in "
        f"{duration(log.seconds)}, {log.tokens / max(log.seconds, 1e-9):,.0f} tokens/s, "
        f"{memory_gb(log.device_type):.2g} GB of memory at the end{results}"
        + (f"; the law predicted {prediction}" if prediction else "")
    )

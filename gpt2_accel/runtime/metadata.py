"""Collects the metadata of a run for `run.json`, the trackers, the model card and the terminal."""

import subprocess
from dataclasses import dataclass

from accelerate import Accelerator

from gpt2_accel import kernels
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.device import device_name, is_sharded, memory_gb, precision_name
from gpt2_accel.estimate.flops import duration, flops_per_token
from gpt2_accel.estimate.law import Prediction, prediction
from gpt2_accel.estimate.memory import memory_by_part
from gpt2_accel.files import readable_size
from gpt2_accel.hf.model_card import Training, installed_versions
from gpt2_accel.models import LanguageModel
from gpt2_accel.optim import BatchSchedule
from gpt2_accel.runtime.log import RunLog, in_words


@dataclass
class RunMetadata:
    """The metadata of a run beside its settings, for `run.json` and the trackers.

    `flops` and `tokens` are the totals of the run's `updates` updates. `batch` describes how the tokens of a full
    update are divided; `micro_batch_size` and `sequence_length` are those that the settings lead to. `tokenizer` is the fingerprint of the data's tokenizer. `expected_gb` is the memory per device
    in GB, without torch itself. `git_commit` is the working directory's commit, with `-dirty` after changes, None
    outside a repository. `prediction` is that of `law`, None without one.
    """

    run_id: str
    parameters: int
    vocab_size: int
    tokenizer: str
    flops_per_token: int
    flops: float
    updates: int
    tokens: int
    batch: str
    micro_batch_size: int
    sequence_length: int
    epochs: float
    data: str
    hardware: str
    expected_gb: float
    git_commit: str | None
    versions: dict[str, str]
    prediction: Prediction | None


def describe_run(
    config: TrainConfig,
    model: LanguageModel,
    accelerator: Accelerator,
    loader: TrainLoader,
    schedule: BatchSchedule,
    run_id: str,
) -> RunMetadata:
    """Returns the metadata of a run that is about to start. `model` is the unwrapped model.

    Only the main process looks up what takes time: the expected memory, the commit and the versions.
    """
    shape = model.config
    flops = flops_per_token(shape, config.tokens_per_sequence)
    updates = schedule.updates(config.max_steps)
    tokens = schedule.first(updates) * config.tokens_per_sequence
    main = accelerator.is_main_process
    at_once, size = kernels.choices.logits_at_once, loader.micro_batch_size
    memory = memory_by_part(config, shape, accelerator, size, at_once) if main else {}
    return RunMetadata(
        run_id=run_id,
        parameters=shape.parameter_count,
        vocab_size=shape.vocab_size,
        tokenizer=read_manifest(config.data_dir)["tokenizer"]["fingerprint"],
        flops_per_token=flops,
        flops=float(flops) * tokens,
        updates=updates,
        tokens=tokens,
        batch=describe_batch(config, accelerator, loader, schedule),
        micro_batch_size=loader.micro_batch_size,
        sequence_length=config.tokens_per_sequence,
        epochs=tokens / config.tokens_per_sequence / loader.windows,
        data=describe_data(config),
        hardware=describe_hardware(accelerator, model),
        expected_gb=round(sum(memory.values()) / 1e9, 3),
        git_commit=git_commit() if main else None,
        versions=installed_versions() if main else {},
        prediction=prediction(config, shape) if main else None,
    )


def describe_batch(
    config: TrainConfig, accelerator: Accelerator, loader: TrainLoader, schedule: BatchSchedule
) -> str:
    """Describes how the tokens of a full update are divided into micro-batches."""
    size, count = loader.micro_batches(schedule.sequences)
    return (
        f"{config.total_batch_size:,} tokens per update = {count} micro-batches x "
        f"{accelerator.num_processes} processes x {size} sequences x {config.tokens_per_sequence} tokens"
    )


def describe_data(config: TrainConfig) -> str:
    """Describes the source and the size of the training data."""
    manifest = read_manifest(config.data_dir)
    return f"{manifest['source']} ({manifest['splits']['train']['tokens']:,} tokens)"


def describe_hardware(accelerator: Accelerator, model: LanguageModel) -> str:
    """Describes devices and precision, such as `8 x NVIDIA A100-SXM4-80GB, bf16`."""
    device = device_name(accelerator.device)
    sharded = ", sharded by FSDP2" if is_sharded(model) else ""
    return f"{accelerator.num_processes} x {device}{sharded}, {precision_name(accelerator.mixed_precision)}"


def describe_training(config: TrainConfig, metadata: RunMetadata, log: RunLog) -> Training:
    """Returns the model card's description of the run so far."""
    tokens = log.clock.tokens_at(log.step)
    return Training(
        settings=config.settings(),
        data=metadata.data,
        tokens=tokens,
        hours=log.clock.seconds / 3600,
        flops=tokens * log.clock.flops_per_token,
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
    return (
        f"{metadata.parameters:,} parameters on {metadata.hardware}, compile backend {compiled}, attention {attention}\n"
        f"{metadata.batch}\n"
        f"updates {step:,} to {metadata.updates:,}: {metadata.tokens:,} tokens, {metadata.epochs:.3g} epochs, "
        f"{metadata.flops:.2g} FLOPs, into {config.output_dir}\n"
        f"about {readable_size(metadata.expected_gb * 1e9)} per device, beside torch itself"
        + (f"\nthe law predicts {metadata.prediction}" if metadata.prediction else "")
    )


def end_summary(log: RunLog, prediction: Prediction | None) -> str:
    """Returns the summary that the terminal shows after the last update."""
    clock = log.clock
    tokens = clock.tokens_at(clock.step)
    results = "".join(
        f"; at update {step:,} "
        + in_words({name: log.results[name] for name in log.results if log.evaluated[name] == step})
        for step in sorted(set(log.evaluated.values()))
    )
    return (
        f"trained on {tokens:,} tokens ({tokens * clock.flops_per_token:.2g} FLOPs) in "
        f"{duration(clock.seconds)}, {tokens / max(clock.seconds, 1e-9):,.0f} tokens/s, "
        f"{memory_gb(clock.device_type):.2g} GB of memory at the end{results}"
        + (f"; the law predicted {prediction}" if prediction else "")
    )

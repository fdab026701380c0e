"""What a run says of itself: at its start and end, in `run.json`, to the trackers, in the model card."""

import math
import platform
import subprocess
import time
from dataclasses import asdict, dataclass

import torch
from accelerate import Accelerator

from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.dry_run import memory_by_part
from gpt2_accel.hub import Training, installed_version
from gpt2_accel.launch import is_sharded
from gpt2_accel.metrics import RunLog, memory_gb
from gpt2_accel.model import GPTConfig, flops_per_token, parameter_count
from gpt2_accel.optim import BatchSchedule
from gpt2_accel.progress import duration

PACKAGES = ("gpt2_accel", "torch", "transformers", "accelerate")
# Of the speed of a large matrix product, training reaches about this share (nanoGPT calls 40-60% good).
TYPICAL_SHARE = 0.4


@dataclass
class Facts:
    """What a run is, beside its settings; all of it goes to `run.json` and to the trackers.

    `flops` of the whole run of `updates` updates; `batch`, how the tokens of a full one are spread;
    `expected_gb` of memory on each device,
    beside torch itself; `git_commit` of the working directory, with `-dirty` if files in it were changed,
    None outside a repository.
    """

    run_id: str
    parameters: int
    vocab_size: int
    flops_per_token: int
    flops: float
    updates: int
    tokens: int
    batch: str
    epochs: float
    data: str
    hardware: str
    expected_gb: float
    git_commit: str | None
    versions: dict[str, str]


def describe_run(
    config: TrainConfig,
    gpt_config: GPTConfig,
    accelerator: Accelerator,
    loader: TrainLoader,
    schedule: BatchSchedule,
    run_id: str,
) -> Facts:
    """Gathers the facts of a run that is about to start."""
    flops = flops_per_token(gpt_config, config.sequence_length)
    updates = schedule.updates(config.max_steps)
    tokens = schedule.first(updates) * config.sequence_length
    memory = memory_by_part(config, gpt_config, accelerator)
    return Facts(
        run_id=run_id,
        parameters=parameter_count(gpt_config),
        vocab_size=gpt_config.vocab_size,
        flops_per_token=flops,
        flops=float(flops) * tokens,
        updates=updates,
        tokens=tokens,
        batch=describe_batch(config, accelerator, loader, schedule),
        epochs=tokens / config.sequence_length / loader.windows,
        data=describe_data(config),
        hardware=describe_hardware(accelerator),
        expected_gb=round(sum(memory.values()) / 1e9, 3),
        git_commit=git_commit(),
        versions={
            "python": platform.python_version(),
            **{package: installed_version(package) for package in PACKAGES},
        },
    )


def describe_batch(
    config: TrainConfig, accelerator: Accelerator, loader: TrainLoader, schedule: BatchSchedule
) -> str:
    """How the tokens of a full update are spread."""
    size, count = loader.micro_batches(schedule.full)
    ramp = ""
    if config.ramp_tokens:
        ramp = f", growing from {config.ramp_start} sequences over {config.ramp_tokens:,} tokens"
    return (
        f"{config.total_batch_size:,} tokens per update = {count} micro-batches x "
        f"{accelerator.num_processes} processes x {size} sequences x {config.sequence_length} tokens{ramp}"
    )


def describe_data(config: TrainConfig) -> str:
    """Where the training data came from and how much it is."""
    manifest = read_manifest(config.data_dir)
    return f"{manifest['source']} ({manifest['splits']['train']['tokens']:,} tokens)"


def describe_hardware(accelerator: Accelerator) -> str:
    """Devices and precision, such as `8 x NVIDIA A100-SXM4-80GB, precision bf16`."""
    device = accelerator.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    sharded = ", sharded by FSDP2" if is_sharded(accelerator) else ""
    return (
        f"{accelerator.num_processes} x {device}{sharded}, precision {accelerator.mixed_precision}"
    )


def describe_training(config: TrainConfig, accelerator: Accelerator, log: RunLog) -> Training:
    """What the model card says of the run so far."""
    tokens = log.tokens_at(log.step)
    return Training(
        settings=asdict(config),
        data=describe_data(config),
        tokens=tokens,
        hours=log.seconds / 3600,
        flops=tokens * log.flops_per_token,
        hardware=describe_hardware(accelerator),
        results=log.results,
    )


def git_commit() -> str | None:
    """The commit of the working directory's repository, None if there is none."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def opening(config: TrainConfig, facts: Facts, accelerator: Accelerator, step: int) -> str:
    """What the terminal shows before the first update, `step` of which were made before."""
    if step >= facts.updates:
        return f"{config.output_dir} has all {facts.updates:,} updates: nothing left to train"
    compiled = accelerator.state.dynamo_plugin.backend.value.lower()
    seconds = expected_seconds(facts.flops * (1 - step / facts.updates), accelerator)
    return (
        f"{facts.parameters:,} parameters on {facts.hardware}, compile backend {compiled}\n"
        f"{facts.batch}\n"
        f"updates {step:,} to {facts.updates:,}: {facts.tokens:,} tokens, {facts.epochs:.3g} epochs, "
        f"{facts.flops:.2g} FLOPs, into {config.output_dir}\n"
        f"expected: about {duration(seconds)}, at {TYPICAL_SHARE:.0%} of the speed of a matrix product here; "
        f"about {facts.expected_gb:.2g} GB per device, beside torch itself"
    )


def closing(log: RunLog) -> str:
    """What the terminal shows after the last update."""
    tokens = log.tokens_at(log.step)
    results = ", ".join(f"{name} {value:.4f}" for name, value in log.results.items())
    return (
        f"trained on {tokens:,} tokens ({tokens * log.flops_per_token:.2g} FLOPs) in "
        f"{duration(log.seconds)}, {tokens / max(log.seconds, 1e-9):,.0f} tokens/s, "
        f"{memory_gb(log.device_type):.2g} GB of memory at the end"
        + (f"; {results}" if results else "")
    )


def expected_seconds(flops: float, accelerator: Accelerator) -> float:
    """About how long `flops` of training take: by the speed of a matrix product, measured here."""
    speed = product_speed(accelerator.device, accelerator.mixed_precision)
    return flops / (speed * accelerator.num_processes * TYPICAL_SHARE)


def product_speed(device: torch.device, precision: str) -> float:
    """FLOP/s of a large matrix product in `precision` (no, fp16 or bf16) on one device: the best of 3."""
    size = 1024 if device.type == "cpu" else 4096
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(4):  # the first warms up
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best

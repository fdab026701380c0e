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
from gpt2_accel.hub import Training, installed_version
from gpt2_accel.metrics import RunLog, memory_gb
from gpt2_accel.model import GPTConfig, flops_per_token, parameter_count
from gpt2_accel.progress import duration

PACKAGES = ("gpt2_accel", "torch", "transformers", "accelerate")
# Of the speed of a large matrix product, training reaches about this share (nanoGPT calls 40-60% good).
TYPICAL_SHARE = 0.4


@dataclass
class Facts:
    """What a run is, beside its settings; all of it goes to `run.json` and to the trackers.

    `flops` of the whole run; `tokens_per_update` over all devices; `expected_gb` of memory on each,
    beside torch itself; `git_commit` of the working directory, with `-dirty` if files in it were changed,
    None outside a repository.
    """

    run_id: str
    parameters: int
    vocab_size: int
    flops_per_token: int
    flops: float
    tokens_per_update: int
    micro_batches: int
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
    run_id: str,
) -> Facts:
    """Gathers the facts of a run that is about to start."""
    flops = flops_per_token(gpt_config, config.sequence_length)
    tokens = config.max_steps * config.total_batch_size
    return Facts(
        run_id=run_id,
        parameters=parameter_count(gpt_config),
        vocab_size=gpt_config.vocab_size,
        flops_per_token=flops,
        flops=float(flops) * tokens,
        tokens_per_update=config.total_batch_size,
        micro_batches=loader.micro_batches,
        epochs=tokens / config.sequence_length / loader.windows,
        data=describe_data(config),
        hardware=describe_hardware(accelerator),
        expected_gb=round(expected_gb(config, gpt_config, accelerator.mixed_precision), 3),
        git_commit=git_commit(),
        versions={
            "python": platform.python_version(),
            **{package: installed_version(package) for package in PACKAGES},
        },
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
    return f"{accelerator.num_processes} x {device}, precision {accelerator.mixed_precision}"


def describe_training(config: TrainConfig, accelerator: Accelerator, log: RunLog) -> Training:
    """What the model card says of the run so far."""
    tokens = log.step * config.total_batch_size
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
    if step >= config.max_steps:
        return f"{config.output_dir} has all {config.max_steps:,} updates: nothing left to train"
    compiled = accelerator.state.dynamo_plugin.backend.value.lower()
    left = 1 - step / config.max_steps
    seconds = expected_seconds(facts.flops * left, accelerator)
    return (
        f"{facts.parameters:,} parameters on {facts.hardware}, compile backend {compiled}\n"
        f"{facts.tokens_per_update:,} tokens per update = {facts.micro_batches} micro-batches x "
        f"{accelerator.num_processes} processes x {config.micro_batch_size} sequences x "
        f"{config.sequence_length} tokens\n"
        f"updates {step:,} to {config.max_steps:,}: {config.max_steps * facts.tokens_per_update:,} tokens, "
        f"{facts.epochs:.3g} epochs, {facts.flops:.2g} FLOPs, into {config.output_dir}\n"
        f"expected: about {duration(seconds)}, at {TYPICAL_SHARE:.0%} of the speed of a matrix product here; "
        f"about {facts.expected_gb:.2g} GB per device, beside torch itself"
    )


def closing(log: RunLog) -> str:
    """What the terminal shows after the last update."""
    tokens = log.step * log.tokens_per_update
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


def expected_gb(config: TrainConfig, gpt_config: GPTConfig, precision: str) -> float:
    """About the memory in GB (1e9 bytes) that training takes on one device, uncompiled, beside torch.

    Weights, gradients and the optimizer's moments in fp32 (Muon has one moment, AdamW two); per token,
    channel and block the 17 values that its backward keeps, of which the two inputs of LayerNorm are fp32
    also in mixed precision; the logits, their log-softmax and gradient, and in mixed precision a copy.
    """
    mixed = precision in ("bf16", "fp16")
    tokens = config.micro_batch_size * config.sequence_length
    channels = gpt_config.n_embd * gpt_config.n_layer
    state = 16 * parameter_count(gpt_config)
    if config.optimizer == "muon":
        state -= 4 * 12 * gpt_config.n_embd * channels
    kept = (2 * 4 + 15 * 2 if mixed else 17 * 4) * tokens * channels
    logits = (16 if mixed else 12) * tokens * gpt_config.padded_vocab_size
    return (state + kept + logits) / 1e9

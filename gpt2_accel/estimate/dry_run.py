"""The summary that `--dry_run` prints: parameters, tokens, FLOPs, memory, days."""

from pathlib import Path

from accelerate import Accelerator

from gpt2_accel.config import AUTO, TrainConfig
from gpt2_accel.data.shards import MANIFEST, read_manifest
from gpt2_accel.device import PEAK_FLOPS
from gpt2_accel.estimate.flops import TYPICAL_MFU, flops_per_token
from gpt2_accel.estimate.memory import memory_by_part
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE

DEVICES = ("A100", "H100", "H200")


def dry_run(config: TrainConfig, accelerator: Accelerator) -> str:
    """The memory and FLOPs estimate of a run, in words. Reads nothing but the data's manifest, if there is one."""
    vocab_size, data = GPT2_VOCAB_SIZE, "not there yet, so GPT-2's vocabulary is assumed"
    if (Path(config.data_dir) / MANIFEST).exists():
        manifest = read_manifest(config.data_dir)
        vocab_size = manifest["tokenizer"]["vocab_size"]
        data = f"{manifest['splits']['train']['tokens']:,} tokens"
    shape = GPTConfig.from_settings(config, vocab_size)
    if config.micro_batch_size == AUTO:
        config.micro_batch_size = 1
    devices = accelerator.num_processes
    updates = config.batch_schedule(devices).updates(config.max_steps)
    tokens = config.max_steps * config.total_batch_size
    flops = tokens * flops_per_token(shape, config.sequence_length)
    days = ", ".join(
        f"{flops / (PEAK_FLOPS[name] * TYPICAL_MFU * devices) / 86400:.2f} on {name}"
        for name in DEVICES
    )
    memory = memory_by_part(config, shape, accelerator)
    parts = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in memory.items())
    return (
        f"model         {shape.parameter_count:,} parameters\n"
        f"data          {config.data_dir}: {data}\n"
        f"training      {updates:,} updates, {tokens:,} tokens, {flops:.3g} FLOPs\n"
        f"processes     {devices}, precision {accelerator.mixed_precision}\n"
        f"memory (GB)   {sum(memory.values()) / 1e9:.2f} per device: {parts}; "
        f"micro-batch {config.micro_batch_size} x {config.sequence_length}, before compilation\n"
        f"days          {days}, {devices} of them, at {TYPICAL_MFU:.0%} of their peak"
    )

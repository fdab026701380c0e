"""What a run would take: parameters, tokens, FLOPs, memory, days; without starting it."""

from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt2_accel.build import build_batch_schedule
from gpt2_accel.config import AUTO, TrainConfig
from gpt2_accel.data.shards import MANIFEST, read_manifest
from gpt2_accel.launch import is_sharded
from gpt2_accel.loss import LOGITS_AT_ONCE
from gpt2_accel.metrics import PEAK_FLOPS
from gpt2_accel.model import GPT, GPTConfig, flops_per_token, parameter_count

MFU = (
    0.4  # a share of the peak that well-tuned GPT-2 training reaches; nanoGPT calls 40 to 60% good
)
DEVICES = ("A100", "H100", "H200")
GPT2_VOCABULARY = 50257


def dry_run(config: TrainConfig, accelerator: Accelerator) -> str:
    """The summary of a run that `--dry_run` prints. Reads nothing but the data's manifest, and does without
    that."""
    vocab_size, data = GPT2_VOCABULARY, "not there yet, so GPT-2's vocabulary is assumed"
    if (Path(config.data_dir) / MANIFEST).exists():
        manifest = read_manifest(config.data_dir)
        vocab_size = manifest["tokenizer"]["vocab_size"]
        data = f"{manifest['splits']['train']['tokens']:,} tokens"
    names = ("n_positions", "n_layer", "n_head", "n_embd", "bias", "dropout")
    model = GPTConfig(vocab_size, **{name: getattr(config, name) for name in names})
    if config.micro_batch_size == AUTO:
        config.micro_batch_size = 1
    updates = build_batch_schedule(config, accelerator).updates(config.max_steps)
    tokens = config.max_steps * config.total_batch_size
    flops = tokens * flops_per_token(model, config.sequence_length)
    devices = accelerator.num_processes
    days = ", ".join(
        f"{flops / (PEAK_FLOPS[name] * MFU * devices) / 86400:.2f} on {name}" for name in DEVICES
    )
    memory = memory_by_part(config, model, accelerator)
    parts = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in memory.items())
    return (
        f"model         {parameter_count(model):,} parameters\n"
        f"data          {config.data_dir}: {data}\n"
        f"training      {updates:,} updates, {tokens:,} tokens, {flops:.3g} FLOPs\n"
        f"processes     {devices}, precision {accelerator.mixed_precision}\n"
        f"memory (GB)   {sum(memory.values()) / 1e9:.2f} per device: {parts}; "
        f"micro-batch {config.micro_batch_size} x {config.sequence_length}, before compilation\n"
        f"days          {days}, {devices} of them, at {MFU:.0%} of their peak"
    )


def memory_by_part(
    config: TrainConfig, model: GPTConfig, accelerator: Accelerator
) -> dict[str, int]:
    """Bytes per device, at the peak: weights and gradients in fp32, two moments of the optimizer (one where
    Muon keeps one), activations. FSDP2 spreads all but the activations over the devices."""
    shards = accelerator.num_processes if is_sharded(accelerator) else 1
    padded = (model.padded_vocab_size - model.vocab_size) * model.n_embd
    weights = 4 * (parameter_count(model) + padded)
    block_matrices = 4 * 12 * model.n_layer * model.n_embd**2
    saved = block_matrices if config.optimizer == "muon" else 0
    size = config.micro_batch_size
    return {
        "weights": weights // shards,
        "gradients": weights // shards,
        "optimizer": (2 * weights - saved) // shards,
        "activations": activation_bytes(
            model,
            size,
            config.sequence_length,
            accelerator.mixed_precision,
            config.checkpoint_activations,
        ),
    }


def activation_bytes(
    config: GPTConfig, batch: int, length: int, precision: str, checkpointed: bool = False
) -> int:
    """Bytes that the forward of (batch, length) tokens keeps for the backward, and those of the logits and their
    gradients, which come on top of it at the peak.

    Counted on tensors without memory, as autograd saves them uncompiled. `checkpointed`, each block keeps its
    input in fp32, and one has all.
    """
    if checkpointed:
        one = activation_bytes(replace(config, n_layer=1), batch, length, precision)
        return one + (config.n_layer - 1) * batch * length * config.n_embd * 4
    seen: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        return tensor

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(config)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(tokens, tokens)  # kept, so that no storage is counted under another's name
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        saved = sum(size for key, size in seen.items() if key not in own)
        del loss
    width = 4 if dtype is None else 2
    logits = batch * length * config.padded_vocab_size
    if logits <= LOGITS_AT_ONCE:
        return saved + logits * (4 if dtype is None else 4 + 2)
    weight = (
        config.padded_vocab_size * config.n_embd
    )  # a copy in that dtype, and one chunk's gradient
    return saved + (LOGITS_AT_ONCE + 2 * weight) * width


def host_memory() -> int:
    """Bytes of memory that this machine has free. Raises `ValueError` where that cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise ValueError(
            "the free memory of this system cannot be told: set --micro_batch_size to a number"
        ) from error
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024

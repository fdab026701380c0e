"""The summary of `--dry_run`: parameters, tokens, FLOPs, memory, time. It needs no accelerator."""

import os
from pathlib import Path

from accelerate.utils import parse_flag_from_env

from gpt2_accel.config import TrainConfig
from gpt2_accel.data.shards import DATA_MANIFEST, read_manifest
from gpt2_accel.estimate.flops import TYPICAL_MFU, duration, flops_per_token
from gpt2_accel.estimate.memory import (
    Launch,
    activation_bytes,
    in_words,
    model_shape,
    planned_model,
    shard_count,
    state_bytes,
)
from gpt2_accel.hf.lora import describe_lora
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.runtime.device import GPUS, launch_device, logits_at_once, precision_name
from gpt2_accel.runtime.files import readable_size
from gpt2_accel.runtime.options import load_yaml
from gpt2_accel.runtime.recipe_command import folder
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE

DEVICES = ("A100", "H100", "H200")  # if no GPU is named


def dry_run(config: TrainConfig) -> str:
    """Returns the memory and FLOPs estimate of a run as text.

    The words of `config.dry_run` are a launch config (a file or a shipped one's name, by default the
    launch of this process) and a key of `GPUS`. Without a GPU's name the memory is that of the
    first of `DEVICES`, or of a CPU if the launch uses one. Only the manifest of the data is read, if
    there is one.

    Raises `ValueError` for another word, for `epochs` of data that is not prepared, or if the batch cannot be divided among
    the processes.
    """
    launch, gpu = planned(config.dry_run)
    vocab_size = GPT2_VOCAB_SIZE
    data = "not prepared yet, GPT-2's vocabulary is assumed"
    if (Path(config.data_dir) / DATA_MANIFEST).exists():
        manifest = read_manifest(config.data_dir)
        vocab_size = manifest["tokenizer"]["vocab_size"]
        train_tokens = manifest["splits"]["train"]["tokens"]
        config.rows = 2 if manifest.get("pairs") else 1
        config.set_length(train_tokens)
        data = f"{train_tokens:,} tokens"
    elif config.epochs is not None:
        raise ValueError(
            f"--epochs needs the size of the data, and {config.data_dir} is not prepared yet: give --max_steps"
        )
    shape = model_shape(config, vocab_size)
    model = planned_model(config, shape)
    config.fit_positions(shape.n_positions)
    length = config.tokens_per_sequence
    devices = launch.num_processes
    precision = launch.mixed_precision
    size, note = config.fit_micro_batch(config.micro_batch_size or 1, devices)
    updates = config.batch_schedule(devices).updates
    tokens = config.max_steps * config.total_batch_size
    flops = tokens * flops_per_token(shape, config.tokens_per_row)
    gpus = [gpu] if gpu else DEVICES
    times = ", ".join(
        f"{duration(flops / (GPUS[name].peak_flops * TYPICAL_MFU * devices))} on {devices} x {name}"
        for name in gpus
    )
    on_gpu = gpu or not launch.use_cpu
    logits = logits_at_once(GPUS[gpus[0]].memory, precision) if on_gpu else None
    state = state_bytes(config, model, launch.shards)
    memory = state | {"activations": activation_bytes(config, shape, precision, size, logits)}
    needed = sum(memory.values())
    used = f"; a token uses {shape.matmul_parameters:,}" if shape.experts_per_token else ""
    lines = [
        f"model         {shape.parameter_count:,} parameters{used}",
        f"data          {config.data_dir}: {data}",
        f"training      {updates:,} updates, {tokens:,} tokens, {flops:.3g} FLOPs",
        f"processes     {devices}, {precision_name(precision)}{', sharded by FSDP2' if launch.shards > 1 else ''}",
        f"memory        {readable_size(needed)} per device{f' of {readable_size(GPUS[gpu].memory)}' if gpu else ''}: {in_words(memory)}; "
        f"micro-batch {size} x {length}, before compilation",
        f"time          {times}, at {TYPICAL_MFU:.0%} of the peak in half precision",
    ]
    if config.lora:
        assert isinstance(model, AnyModel)
        lines.append(describe_lora(model))
    if note:
        lines.append(note)
    if gpu and needed > GPUS[gpu].memory:
        lines.append(
            "it does not fit into memory: lower --micro_batch_size, set --checkpoint_activations true, "
            f"fine-tune by --lora 16, or shard the model; {in_words(state)}"
        )
    return "\n".join(lines)


def planned(words: list[str]) -> tuple[Launch, str | None]:
    """Returns the launch and the GPU that the words of `--dry_run` name."""
    launch = this_launch()
    gpu = None
    for word in words:
        shipped = folder("accelerate_configs") / f"{word.replace('-', '_')}.yaml"
        if word in GPUS:
            gpu = word
        elif shipped.is_file():
            launch = read_launch(str(shipped))
        elif word.endswith((".yaml", ".yml")):
            launch = read_launch(word)
        elif word not in ("here", "true"):
            raise ValueError(
                f"--dry_run takes a launch config and one of {', '.join(GPUS)}, got {word!r}"
            )
    return launch, gpu


def this_launch() -> Launch:
    """Returns the launch of this process, from the environment variables of Accelerate's launcher."""
    get = os.environ.get
    processes = get("WORLD_SIZE", "1")
    precision = get("ACCELERATE_MIXED_PRECISION", "no")
    launched = "WORLD_SIZE" in os.environ
    on_cpu = not launched and launch_device().type == "cpu"
    use_cpu = parse_flag_from_env("ACCELERATE_USE_CPU", on_cpu)
    shards = shard_count(int(processes), get("FSDP_VERSION") == "2")
    return Launch(int(processes), precision, shards, use_cpu)


def read_launch(path: str) -> Launch:
    """Returns the launch of an Accelerate config file. Raises `ValueError` or `FileNotFoundError` for any other."""
    values = load_yaml(path, "--dry_run")
    processes = values.get("num_processes")
    sharding = values.get("fsdp_config") or {}
    if type(processes) is not int or processes < 1:
        raise ValueError(
            f"{path} has no num_processes: give a config that `accelerate config` wrote"
        )
    precision = values.get("mixed_precision") or "no"  # YAML reads no as False
    replicas = (values.get("parallelism_config") or {}).get(
        "parallelism_config_dp_replicate_size", 1
    )
    shards = processes // replicas if sharding.get("fsdp_version") == 2 else 1
    return Launch(processes, precision, shards, values.get("use_cpu", False))

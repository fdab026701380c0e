"""The summary of `--dry_run`: parameters, tokens, FLOPs, memory, time. No Accelerator is built."""

import os
from pathlib import Path

from accelerate.utils import parse_flag_from_env

from gpt2_accel.config import TrainConfig
from gpt2_accel.data.shards import DATA_MANIFEST
from gpt2_accel.data.source import Data, open_data
from gpt2_accel.estimate.flops import TYPICAL_MFU, flops_per_token
from gpt2_accel.estimate.memory import (
    LIBRARIES,
    Launch,
    activation_bytes,
    fitting_sizes,
    in_words,
    model_shape,
    planned_model,
    state_bytes,
)
from gpt2_accel.hf.lora import describe_lora
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.runtime.device import (
    GPUS,
    free_memory,
    launch_device,
    logits_at_once,
    precision_name,
)
from gpt2_accel.runtime.files import duration, readable_size
from gpt2_accel.runtime.options import load_yaml
from gpt2_accel.runtime.recipe_command import folder
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE

DEVICES = ("A100", "H100", "H200")  # default GPUs


def estimate_run(config: TrainConfig, data: Data | None = None) -> str:
    """Returns the summary of a run as text: parameters, tokens, FLOPs, memory and time.

    `config.dry_run` has a launch config (a file, or the name of a shipped one; default the launch
    of this process) and a key of `GPUS`. Without a GPU's name it plans for the memory of the first
    of `DEVICES`, or of a CPU if the launch uses one. `data` are those of `config.data_dir` if they
    are not given. Sets the length of the run in `config`.

    Raises `ValueError` for another word, for `epochs` of data that is not prepared, or if the batch
    cannot be divided among the processes.
    """
    launch, gpu = read_words(config.dry_run)
    vocab_size, amount = set_length(config, data)
    shape = model_shape(config, vocab_size)
    model = planned_model(config, shape)
    config.fit_positions(shape.n_positions)
    devices = launch.num_processes
    updates = config.batch_schedule(devices).updates
    tokens = config.max_steps * config.total_batch_size
    flops = tokens * flops_per_token(shape, config.tokens_per_row)

    gpus = [gpu] if gpu else DEVICES
    each = flops / TYPICAL_MFU / devices
    times = [f"{duration(each / GPUS[name].peak_flops)} on {devices} x {name}" for name in gpus]

    libraries = 0
    if launch.use_cpu:
        available = free_memory(launch_device()) / devices
        libraries = LIBRARIES
    else:
        available = GPUS[gpus[0]].memory
        launch.logits_at_once = logits_at_once(available, launch.mixed_precision)
    state = state_bytes(config, model, launch)
    size = config.micro_batch_size
    if not size:  # `auto`
        fitting = fitting_sizes(config, shape, launch, available, sum(state.values()))
        size = max(fitting, default=1)
    size, note = config.fit_micro_batch(size, devices)
    activations = activation_bytes(config, shape, launch, size)
    memory = state | {"activations": activations, "libraries": libraries}
    needed = sum(memory.values())

    sharded = ", sharded by FSDP2" if launch.is_fsdp2 else ""
    lines = [
        f"model         {shape.parameter_count:,} parameters",
        f"data          {data.name if data else config.data_dir}: {amount}",
        f"training      {updates:,} updates, {tokens:,} tokens, {flops:.3g} FLOPs",
        f"processes     {devices}, {precision_name(launch.mixed_precision)}{sharded}",
        f"memory        {readable_size(needed)} per device: {in_words(memory)}; "
        f"micro-batch {size} x {config.tokens_per_sequence}, before compilation",
        f"time          {', '.join(times)}, at {TYPICAL_MFU:.0%} of the peak in half precision",
    ]
    if config.lora and isinstance(model, AnyModel):
        lines.append(describe_lora(model))
    if note:
        lines.append(note)
    if gpu and needed > available:
        lines.append(
            "it does not fit into memory: lower --micro_batch_size, set --checkpoint_activations "
            f"true, fine-tune with --lora 16, or shard the model; {in_words(state)}"
        )
    return "\n".join(lines)


def set_length(config: TrainConfig, data: Data | None) -> tuple[int, str]:
    """Sets the length of a run by its data, and returns the vocabulary size and the number of
    tokens as text. Raises `ValueError` for `epochs` of data that is not prepared."""
    if data is None and (Path(config.data_dir) / DATA_MANIFEST).exists():
        data = open_data(config.data_dir)
    if data is not None:
        config.fit_data(data)
        return len(data.tokenizer), f"{data.tokens:,} tokens"
    if config.epochs is not None:
        raise ValueError(
            f"--epochs needs the size of the data, and {config.data_dir} is not prepared yet: give "
            "--max_steps"
        )
    return GPT2_VOCAB_SIZE, "not prepared yet, GPT-2's vocabulary is assumed"


def read_words(words: list[str]) -> tuple[Launch, str | None]:
    """Returns the launch and the GPU, or None, in the words of `--dry_run`.

    Raises `ValueError` for another word or launch config, `FileNotFoundError` for a missing file.
    """
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
                f"--dry_run takes a launch config and one of {', '.join(GPUS)} (in quotes), got "
                f"{word!r}"
            )
    if gpu:
        launch.use_cpu = False
    return launch, gpu


def this_launch() -> Launch:
    """Returns the launch of this process, by the environment variables of Accelerate's launcher."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    on_cpu = "WORLD_SIZE" not in os.environ and launch_device().type == "cpu"
    use_cpu = parse_flag_from_env("ACCELERATE_USE_CPU", on_cpu)
    return Launch(processes, precision, os.environ.get("FSDP_VERSION") == "2", use_cpu)


def read_launch(path: str) -> Launch:
    """Returns the launch of an Accelerate config file. Raises `ValueError` for another file,
    `FileNotFoundError` if it is missing."""
    values = load_yaml(path, "--dry_run")
    processes = values.get("num_processes")
    sharding = values.get("fsdp_config") or {}
    if type(processes) is not int or processes < 1:
        raise ValueError(
            f"{path} has no num_processes: give a config that `accelerate config` wrote"
        )
    precision = values.get("mixed_precision") or "no"  # YAML reads no as False
    is_fsdp2 = sharding.get("fsdp_version") == 2
    return Launch(processes, precision, is_fsdp2, bool(values.get("use_cpu")))

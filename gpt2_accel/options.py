"""What to say about an option that does not exist: the one that is meant, or that the launch config sets it."""

import argparse
import difflib
import os
from collections.abc import Collection, Iterable
from typing import Any

from gpt2_accel.cores import may_have_gpu
from gpt2_accel.recipe_command import folder

# Option -> its names in nanoGPT, Hugging Face's libraries and litgpt that difflib does not find. The first option that a
# command has is meant.
OTHER_NAMES = {
    "learning_rate": "lr max_lr",
    "max_steps": "iters max_iters epochs num_train_epochs",
    "micro_batch_size": "batch_size bs per_device_train_batch_size",
    "total_batch_size": "global_batch_size gradient_accumulation_steps grad_accum",
    "max_grad_norm": "grad_clip",
    "n_layer": "layers num_hidden_layers",
    "n_embd": "d_model hidden_size dim",
    "sequence_length": "block_size seq_len max_seq_length context_length",
    "checkpoint_activations": "gradient_checkpointing",
    "eval_every": "eval_interval eval_steps",
    "save_every": "save_interval save_steps",
    "log_every": "log_interval logging_steps",
    "report_to": "wandb tensorboard",
    "init_from": "model model_name_or_path pretrained",
    "resume_from": "ckpt checkpoint",
    "model": "ckpt checkpoint init_from model_name_or_path out_dir",
    "output_dir": "o out out_dir",
    "data_dir": "dataset o out output_dir",
    "max_new_tokens": "max_tokens length",
    "dtype": "fp16 bf16 half precision",
    "tasks": "lm_eval",
}
# Other programs' names of what the launch config sets, what that is, a shipped config ("" for this machine's), and a flag
# of `accelerate launch` with its value.
LAUNCH = (
    ("fp16 half amp", "the precision", "", "--mixed_precision fp16"),
    ("bf16 precision mixed_precision dtype", "the precision", "", "--mixed_precision bf16"),
    ("cpu use_cpu no_cuda", "the device", "cpu", ""),
    ("cuda gpu use_cuda", "the device", "1xgpu", ""),
    ("mps", "the device", "mps", ""),
    (
        "gpus n_gpu n_gpus num_gpus devices num_processes nproc_per_node world_size ddp",
        "the number of processes",
        "8xa100",
        "--num_processes N",
    ),
    ("nodes nnodes num_nodes num_machines", "the number of machines", "2x8xa100", "--num_machines N"),
    ("compile torch_compile dynamo_backend", "compilation", "", "--dynamo_backend inductor"),
    ("fsdp use_fsdp deepspeed", "sharding", "8xa100_fsdp2", ""),
    ("config_file", "the hardware", "", ""),
)  # fmt: skip


DATATROVE = "datatrove's own pipelines tokenize on a cluster, and their output is a --data_dir (docs/data.md)"
# Options of earlier releases: the default, and what to do instead.
REMOVED: dict[str, tuple[Any, str]] = {
    "eval_only": (
        False,
        "recipes/evaluate.py --model RUN --data_dir DATA gives the validation loss",
    ),
    "verify_data": (False, "recipes/prepare_data.py --verify --data_dir DATA checks the data"),
    "ramp_tokens": (0, "every update has the full batch; warmup_steps has the effect"),
    "ramp_start": (32, "every update has the full batch; warmup_steps has the effect"),
    "gather_fp32": (False, "train with --mixed_precision no to gather in fp32"),
    "max_bad_steps": (5, "it is 5, MAX_BAD_STEPS in gpt2_accel/runtime/guard.py"),
    "hub_private_repo": (True, "a new repository is private; its page on the Hub makes it public"),
    "license": (None, "write it into the card on the Hub"),
    **{name: (None, DATATROVE) for name in ("executor", "slurm_partition", "slurm_time")},
}


def suggestion(word: str, names: Collection[str], dashes: str = "--", value: str = "") -> str:
    """Returns the hint that ends a message about an unknown option.

    `word` is the option as it was typed, and `value` the word after it. `names` are the options that there are, written
    without dashes; `dashes` begin an option in the hint.
    """
    option, _, given = word.partition("=")
    if dashes and option == word and not word.startswith("-"):
        meant = "config" if word.endswith((".yaml", ".yml")) else "model"
        likely = meant in names and (meant == "config" or os.path.exists(word))
        return f": did you mean --{meant} {word}?" if likely else ": an option begins with --"
    name = option.lstrip("-").split(".")[-1].replace("-", "_").lower()
    if name in REMOVED and name not in names:
        return f", which was taken back: {REMOVED[name][1]}"
    meant = [name, *(known for known, others in OTHER_NAMES.items() if name in others.split())]
    found = next((known for known in meant if known in names), None)
    if found is None and (launch := from_launch(name, given or value)):
        if "eval_tokens" in names:  # training and evaluation are launched
            return f": {launch}"
        if "dtype" in names:
            return ": it runs on the GPU if there is one, which CUDA_VISIBLE_DEVICES= hides"
    if found is None:
        like = [known for known in names if known.startswith(name)]
        like = like if len(like) == 1 else difflib.get_close_matches(name, names, n=1)
        found = next(iter(like), None)
    return f": did you mean {dashes}{found}?" if found else ": --help lists the settings"


def from_launch(name: str, value: str = "") -> str | None:
    """Returns how to launch with what other programs call `name`; None if the launch config does not set it.

    `value` is the value that was given, such as `cpu` of `--device`.
    """
    here = "1xgpu" if may_have_gpu() else "cpu"
    if name == "device":
        name = {"": here.removeprefix("1x"), "cpu": "cpu", "mps": "mps"}.get(value, "gpu")
    for names, what, config, flag in LAUNCH:
        if name in names.split():
            path = os.path.relpath(folder("accelerate_configs") / f"{config or here}.yaml")
            switch, _, default = flag.partition(" ")
            if value.lower() in ("false", "0", "no"):
                flag = f"{switch} no"
            elif value in ("fp16", "bf16") or (value.isdigit() and default == "N"):
                flag = f"{switch} {value}"
            words = filter(None, ("accelerate launch --config_file", path, flag, "RECIPE"))
            return f"the launch config sets {what}: {' '.join(words)}"
    return None


def whole_number(text: str) -> int:
    """Parses a whole number. Raises `ArgumentTypeError`, with the number as digits if it is written as `1e3`."""
    try:
        return int(text)
    except ValueError as error:
        try:
            number = float(text.replace(",", ""))
            meant = f": write {int(number)}" if number.is_integer() else ""
        except ValueError:
            meant = ""
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number{meant}") from error


def check_separate(option: str, given: Iterable[str], choices: Collection[str]) -> None:
    """Raises `ValueError` if a value of an option that takes several joins some of `choices` by commas."""
    for value in given:
        parts = value.split(",")
        if len(parts) > 1 and {*parts} & {*choices}:
            raise ValueError(
                f"--{option} takes several with spaces between them: --{option} {' '.join(parts)}"
            )

"""How the words of options are parsed, and what to say about an option that does not exist."""

import argparse
import difflib
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NoReturn, get_args

from gpt2_accel.cores import may_have_gpu
from gpt2_accel.recipe_command import folder

# Names in nanoGPT, Hugging Face's Trainer and litgpt that are not spelled like ours -> our options, of which the first that
# the command has is meant.
OTHER_NAMES = {
    "lr": "learning_rate",
    "max_iters": "max_steps",
    "epochs": "max_steps",
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "total_batch_size",
    "grad_clip": "max_grad_norm",
    "block_size": "sequence_length",
    "gradient_checkpointing": "checkpoint_activations",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "logging_steps": "log_every",
    "wandb": "report_to",
    "model": "init_from",
    "model_name_or_path": "init_from model",
    "checkpoint": "resume_from model",
    "out_dir": "output_dir model",
    "out": "output_dir output data_dir",
    "dataset": "data_dir",
    "max_tokens": "max_new_tokens",
    "fp16": "dtype",
    "lm_eval": "tasks",
}
# What the launch config sets, its names in other programs, a shipped config ("" for this machine's), and a flag of
# `accelerate launch` with its value.
LAUNCH = (
    ("precision", "fp16 bf16 precision mixed_precision dtype", "", "--mixed_precision bf16"),
    ("number of processes", "gpus n_gpus num_gpus devices num_processes", "8xa100", "--num_processes N"),
    ("number of machines", "nodes nnodes num_nodes num_machines", "2x8xa100", "--num_machines N"),
    ("compilation", "compile torch_compile", "", "--dynamo_backend inductor"),
    ("sharding", "fsdp deepspeed", "8xa100_fsdp2", ""),
    ("device", "cpu use_cpu no_cuda", "cpu", ""),
    ("device", "mps", "mps", ""),
    ("device", "device gpu cuda", "1xgpu", ""),
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
    "beta1": (0.9, "it is 0.9, in the call of build_optimizer in gpt2_accel/runtime/setup.py"),
    "accelerate_config": (None, "--dry_run LAUNCH.yaml GPU plans for that hardware"),
    "device": (None, "--dry_run LAUNCH.yaml GPU plans for that hardware"),
    **{name: (None, DATATROVE) for name in ("executor", "slurm_partition", "slurm_time")},
}


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes no abbreviated options, and raises `ValueError` in place of printing its usage."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args=None, namespace=None) -> tuple[argparse.Namespace, list[str]]:
        """Parses the command line of this parser or of a sub-command's; raises `ValueError` for an unknown option."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            named = [action.option_strings[0] for action in self._actions if action.option_strings]
            word, value = [*unknown, ""][:2]
            hint = suggestion(word, [name.removeprefix("--") for name in named], value=value)
            raise ValueError(f"unknown option {word}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser_of(name: str, hint: Any) -> tuple[Callable[[str], Any], str]:
    """Returns how a word becomes a value of a setting of type `hint`, or an item of it, and the word's name in `--help`."""
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    if name == "micro_batch_size":
        return batch_size, "N"
    if kind is bool:
        return true_or_false, "BOOL"
    return {int: (whole_number, "N"), float: (float, "X")}.get(kind, (str, "TEXT"))


def whole_number(text: str) -> int:
    """Parses a whole number, such as 1000 or 1e3. Raises `ArgumentTypeError` for another word."""
    try:
        return int(text)
    except ValueError:
        with suppress(ValueError):
            if (number := float(text)).is_integer():
                return int(number)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number")


def batch_size(text: str) -> int:
    """Parses `--micro_batch_size`: a number, or `auto`, which is 0."""
    return 0 if text == "auto" else whole_number(text)


def true_or_false(text: str) -> bool:
    """Parses the value of a switch. Raises `ArgumentTypeError` for another word."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def suggestion(word: str, names: Collection[str], dashes: str = "--", value: str = "") -> str:
    """Returns the hint that ends a message about an unknown option.

    `word` is the option as it was typed, and `value` the word after it. `names` are the options that there are, written
    without dashes; `dashes` begin an option in the hint.
    """
    option, equals, given = word.partition("=")
    if dashes and not equals and not word.startswith("-"):
        meant = "config" if word.endswith(".yaml") else "model"
        return f": did you mean --{meant} {word}?" if meant in names else ": options begin with --"
    name = option.lstrip("-").split(".")[-1].replace("-", "_").lower()
    meant = [name, *OTHER_NAMES.get(name, "").split()]
    found = next((option for option in meant if option in names), None)
    if found is None:
        launched = "eval_tokens" in names  # training and evaluation are
        if launched and (how := from_launch(name, given or value)):
            return f": {how}"
        if "dtype" in names and name in ("device", "cpu", "gpu"):
            return ": it runs on the GPU if there is one, which CUDA_VISIBLE_DEVICES= hides"
        if name in REMOVED:
            return f", which was taken back: {REMOVED[name][1]}"
        begun = [known for known in names if known.startswith(name)]
        found = next(iter(begun or difflib.get_close_matches(name, names, n=1)), None)
    return f": did you mean {dashes}{found}?" if found else ": --help lists the settings"


def from_launch(name: str, value: str = "") -> str | None:
    """Returns how to launch with what other programs call `name`; None if the launch config does not set it.

    `value` is the value that was given, such as `cpu` of `--device`.
    """
    if name == "device" and value in ("cpu", "mps"):
        name = value
    for what, names, config, flag in LAUNCH:
        if name in names.split():
            flag, _, usual = flag.partition(" ")
            if value.lower() in ("false", "0", "no"):
                usual = "no"
            elif name == "fp16" or value in ("fp16", "bf16") or value.isdigit():
                usual = name if name == "fp16" else value
            path = os.path.relpath(
                folder("accelerate_configs") / f"{config or this_machine()}.yaml"
            )
            words = f"accelerate launch --config_file {path} {flag} {usual}".split()
            return f"the launch config sets the {what}: {' '.join(words)} RECIPE"
    return None


def this_machine() -> str:
    """Returns the name of a launch config for this machine."""
    return "1xgpu" if may_have_gpu() else "cpu"

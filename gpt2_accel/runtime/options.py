"""Parses and checks options and the values of YAML files; hints for unknown options."""

import argparse
import difflib
import math
import reprlib
from collections.abc import Callable, Collection
from contextlib import suppress
from os.path import expanduser
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import yaml

from gpt2_accel.runtime.files import sentence

# Our names: those in nanoGPT, nanochat, Hugging Face's Trainer, TRL and litgpt.
HABITS = """
learning_rate: lr matrix_lr embedding_lr
min_lr_ratio: min_lr final_lr_frac
lr_schedule: lr_scheduler_type decay_lr
warmup_steps: warmup_iters warmup_ratio lr_warmup_steps
decay_share: warmdown_ratio
optimizer: optim
beta1: adam_beta1
beta2: adam_beta2
adam_eps: adam_epsilon
max_grad_norm: grad_clip max_norm
micro_batch_size: batch_size device_batch_size per_device_train_batch_size
total_batch_size: gradient_accumulation_steps global_batch_size
sequence_length: block_size max_seq_len max_seq_length max_length
max_steps: max_iters num_iterations lr_decay_iters max_tokens
epochs: num_train_epochs num_epochs
eval_every: eval_interval eval_steps eval_strategy
eval_tokens: eval_iters per_device_eval_batch_size
core_every: core_metric_every
log_every: log_interval logging_steps
save_every: save_interval save_steps
keep_last: save_total_limit
patience: early_stopping_patience
resume_from: resume_from_checkpoint
output_dir: out_dir run_name model_tag
data_dir: dataset dataset_name
init_from: model model_name_or_path checkpoint_dir
report_to: wandb_log
push_to_hub: hub_model_id
checkpoint_activations: gradient_checkpointing
lora: lora_r
dtype: torch_dtype fp16
"""
OTHER_NAMES = {
    theirs: ours for ours, names in yaml.safe_load(HABITS).items() for theirs in names.split()
}
# Options of other programs; here the launch config sets these things.
LAUNCH_OPTIONS = """
    precision fp16 bf16 mixed_precision dtype device device_type cpu cuda mps gpus num_gpus
    devices num_processes nodes num_nodes compile torch_compile fsdp deepspeed
""".split()  # noqa: SIM905
# Name -> the rule in words, and as a condition.
RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "positive": ("be at least 1", lambda x: x >= 1),
    "not_negative": ("not be negative", lambda x: x >= 0),
    "above_zero": ("be above 0", lambda x: x > 0),
    "fraction": ("be between 0 and 1", lambda x: 0 <= x <= 1),
    "below_one": ("be at least 0 and below 1", lambda x: 0 <= x < 1),
}


def check_ranges(settings: object, **names_of: str) -> None:
    """Raises `ValueError` for a setting that is out of range, infinite, NaN, or an integer of 2^62
    or more, which torch and numpy cannot hold.

    None passes. Each keyword is a key of `RANGES`; its value is the names of the settings in that
    range, separated by spaces.
    """
    for range_name, names in names_of.items():
        rule, holds = RANGES[range_name]
        for name in names.split():
            value = getattr(settings, name)
            if value is None:
                continue
            if not abs(value) < (2**62 if isinstance(value, int) else math.inf):
                raise ValueError(
                    f"{name} must be a finite number, an integer below 2^62, got {value}"
                )
            if not holds(value):
                raise ValueError(f"{name} must {rule}, got {value}")


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviated options that raises `ValueError` for a mistake."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)
        for kind in (None, str):
            self.register("type", kind, text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses the words for this parser or the parser of a sub-command.

        Raises `ValueError` for an unknown option.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [name.removeprefix("--") for name in self._option_string_actions]
            raise ValueError(f"unknown option {unknown[0]}{suggestion(unknown[0], names)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser_of(name: str, hint: Any) -> tuple[Callable[[str], Any], str]:
    """Returns the function that parses a word for a setting, and the word's name in `--help`.

    `hint` is the setting's type; for a list and an optional type, an item's type.
    """
    if name == "micro_batch_size":
        return batch_size, "N"
    kinds: dict[Any, tuple[Callable[[str], Any], str]] = {
        bool: (true_or_false, "BOOL"),
        int: (integer, "N"),
        float: (float, "X"),
    }
    return kinds.get((get_args(hint) or (hint,))[0], (text, "TEXT"))  # int of int | None


def text(word: str) -> str:
    """Replaces `~/` at the beginning: YAML, and a shell in `--data_dir=~/mine`, leave it."""
    return expanduser(word) if word.startswith("~/") else word


def integer(text: str) -> int:
    """Parses an integer, such as 1000 or 1e3. Raises `ArgumentTypeError` for another word."""
    try:
        return int(text)
    except ValueError:
        with suppress(ValueError):
            number = float(text)
            if number.is_integer():
                return int(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not an integer")


def batch_size(text: str) -> int:
    """Parses `--micro_batch_size`: a number, or `auto`, which is 0."""
    return 0 if text == "auto" else integer(text)


def true_or_false(text: str) -> bool:
    """Parses the value of a switch. Raises `ArgumentTypeError` for another word."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def suggestion(word: str, names: Collection[str], dashes: str = "--") -> str:
    """Returns the hint that ends a message about an unknown option.

    `word` is the option as it was typed. `names` are the known options, without dashes; `dashes`
    are put before an option in the hint.
    """
    option, equals, _ = word.partition("=")
    if dashes and not equals and not word.startswith("-"):
        return ": options begin with --"
    name = option.lstrip("-").split(".")[-1].replace("-", "_").lower()
    meant = name if name in names else OTHER_NAMES.get(name)
    # Only recipes that train or evaluate are launched.
    if name in LAUNCH_OPTIONS and meant != name and "eval_tokens" in names:
        return (
            ": the launch config sets hardware and precision, as in accelerate launch "
            "--config_file accelerate_configs/8xa100.yaml --num_processes 4 --mixed_precision bf16 "
            "RECIPE"
        )
    if meant not in names:
        begun = [known for known in names if known.startswith(name)]
        meant = next(iter(begun or difflib.get_close_matches(name, names, n=1)), None)
    return f": did you mean {dashes}{meant}?" if meant else ": --help lists the settings"


def convert(path: str, name: str, value: Any, hint: Any) -> Any:
    """Converts a YAML value to the type `hint`.

    It parses the value as a word of the command line, since YAML reads 6e-4 as a string. Raises
    `ValueError` if it cannot be converted.
    """
    several = get_origin(hint) is list
    parse, _ = parser_of(name, hint)
    try:
        if value is None and type(None) in get_args(hint):
            return None
        if value is None or isinstance(value, list) != several:
            raise ValueError
        return [parse(str(item)) for item in value] if several else parse(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        expected = str(getattr(hint, "__name__", hint)).replace("|", "or")
        raise ValueError(f"{path}: {name} is {reprlib.repr(value)}, expected {expected}") from error


def load_yaml(path: str | Path, option: str) -> dict:
    """Reads the YAML file that `option` names.

    Raises `FileNotFoundError`, or `ValueError` if it does not hold a mapping.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{option} {path}: there is no such file")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {sentence(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings as `name: value` lines")
    return values


def run_of(model: str | Path) -> tuple[dict, dict]:
    """Returns `config.yaml` and `run.json` of a model's run: `model` is the folder of the run, or a
    checkpoint in it. Empty for another model."""
    for folder in (Path(model), Path(model).parent):
        if (folder / "run.json").is_file():
            return load_saved(folder / "config.yaml"), load_saved(folder / "run.json")
    return {}, {}


def load_saved(path: Path) -> dict:
    """Returns the content of a YAML or JSON file of a run's folder; empty if there is none.

    Raises `ValueError` if it is damaged.
    """
    return load_yaml(path, "run") if path.exists() else {}

"""The settings of a training run, and how they are parsed: defaults < YAML file < command line.

A recipe subclasses `TrainConfig` to change defaults or to add its own settings, and calls `parse_config`. Hardware,
processes, precision and compilation are not settings here: they come from the Accelerate config.
"""

import argparse
import reprlib
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from gpt2_accel.files import first_line, not_finite, write_file
from gpt2_accel.optim import OPTIMIZERS, SCHEDULES, BatchSchedule, halved, learning_rate
from gpt2_accel.options import REMOVED, from_launch, suggestion, whole_number
from gpt2_accel.recipe_command import recipe_command

ARCHITECTURES = ("gpt2", "llama", "qwen3")  # see `models/architectures.py`
PATHS = (
    "data_dir",
    "output_dir",
    "init_from",
    "hellaswag_data",
    "resume_from",
    "accelerate_config",
    "law",
)
HUB_STRATEGIES = ("end", "every_save", "checkpoint")  # see `hf/uploads.py`


Type = TypeVar("Type")
# The type of a field that says what to do in this call, such as `--dry_run`. It is no setting of the run: a run does not
# save it.
Command = Annotated[Type, "command"]


def setting(default: Any, help: str) -> Any:
    """Returns a dataclass field with a default and a help text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def required(help: str) -> Any:
    """Returns a dataclass field without a default."""
    return field(metadata={"help": help})


# Name -> the rule in words, and as a condition.
RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "positive": ("be at least 1", lambda x: x >= 1),
    "not_negative": ("not be negative", lambda x: x >= 0),
    "above_zero": ("be above 0", lambda x: x > 0),
    "share": ("be between 0 and 1", lambda x: 0 <= x <= 1),
    "below_one": ("be at least 0 and below 1", lambda x: 0 <= x < 1),
}


def check_ranges(settings: object, **names_of: str) -> None:
    """Raises `ValueError` for a setting that is out of range, not finite, or too large for 64 bits. None passes.

    Each keyword is a key of `RANGES`; its value is the names of the settings in that range, separated by spaces.
    """
    for range_name, names in names_of.items():
        rule, holds = RANGES[range_name]
        for name in names.split():
            value = getattr(settings, name)
            if value is None:
                continue
            if not_finite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")
            if isinstance(value, int) and value >= 2**63:
                raise ValueError(f"{name} must be below 2^63, got {value}")
            if not holds(value):
                raise ValueError(f"{name} must {rule}, got {value}")


# The sections of `--help`, by the first setting of each. A recipe's own settings come first, then `MOST_CHANGED`.
MOST_CHANGED = (
    *("data_dir", "output_dir", "init_from", "resume_from", "n_layer"),
    *("micro_batch_size", "total_batch_size", "max_steps", "learning_rate", "eval_every"),
)
SECTIONS = {
    "data_dir": "changed most often",
    "document_mask": "data",
    "architecture": "model",
    "sequence_length": "batch",
    "optimizer": "optimizer and schedule",
    "eval_tokens": "evaluation and samples",
    "save_every": "checkpoints and resume",
    "log_every": "logging",
    "push_to_hub": "Hub",
    "seed": "reproducing and debugging",
}
AUTO = 0


def batch_size(text: str) -> int:
    """Parses `--micro_batch_size`: a number, or `auto`, which is 0."""
    return AUTO if text == "auto" else whole_number(text)


def true_or_false(text: str) -> bool:
    """Parses the value of a switch. Raises `ArgumentTypeError` for another word."""
    values = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


# Type of a setting -> how a word of the command line is parsed, and its name in `--help`.
PARSERS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (whole_number, "N"),
    float: (float, "X"),
    str: (str, "TEXT"),
    bool: (true_or_false, "true|false"),
}


@dataclass
class TrainConfig:
    """All settings of a training run. The defaults train GPT-2 124M on 10B tokens with the GPT-3 paper's settings.

    `given` are the names of the settings that `parse_config` found in the YAML file or on the command line.

    Raises `ValueError`, naming the field, for a value out of its range.
    """

    given = frozenset()

    data_dir: str = setting("data", "folder of token shards that `prepare_data` wrote")
    output_dir: str = setting("runs/train", "folder of the run: checkpoints, logs, the final model")
    init_from: str | None = setting(
        None, "HF model directory or Hub id (USER/NAME@REVISION) whose weights to start from"
    )
    document_mask: bool = setting(
        False, "attention does not cross from one document to the next; GPT-2's does"
    )

    architecture: str | None = setting(
        None, f"{', '.join(ARCHITECTURES)}; default that of init_from, or gpt2 without it"
    )
    depth: int | None = setting(
        None, "this many layers, each 64 x depth wide; replaces n_layer, n_head, n_embd"
    )
    law: str | None = setting(
        None,
        "law.json of scaling_laws.py: tokens, batch, optimizer, rate and decay for the model's size; what you give wins",
    )
    n_layer: int = setting(12, "transformer blocks")
    n_head: int = setting(12, "attention heads")
    n_embd: int = setting(768, "width; a multiple of n_head")
    n_positions: int = setting(1024, "longest sequence the model can read")
    bias: bool = setting(True, "biases in GPT-2's Linear and LayerNorm modules; others have none")
    dropout: float = setting(0.0, "GPT-2's dropout of embeddings, attention and residuals")

    sequence_length: int | None = setting(None, "tokens per training sequence; default n_positions")
    micro_batch_size: int = setting(
        8, "sequences per device and backward pass; 'auto' (or 0) takes as many as fit in memory"
    )
    total_batch_size: int = setting(524288, "tokens per update, over all devices")
    max_steps: int = setting(19073, "updates")
    checkpoint_activations: bool = setting(
        False, "recompute each block in the backward pass: far less memory, a third more work"
    )

    optimizer: str = setting("adamw", "'adamw', or 'muon' for the matrices of the blocks")
    learning_rate: float = setting(6e-4, "peak learning rate")
    lr_schedule: str = setting(
        "cosine", f"after the warmup: {', '.join(SCHEDULES)}; wsd is stable, then decays"
    )
    decay_share: float = setting(0.2, "last share of the updates, in which 'wsd' decays")
    warmup_steps: int = setting(715, "updates of linear warmup")
    min_lr_ratio: float = setting(0.1, "learning rate at the end, as a share of the peak")
    weight_decay: float = setting(0.1, "decay of matrices and embeddings")
    beta1: float = setting(0.9, "AdamW's decay of the mean")
    beta2: float = setting(0.95, "AdamW's decay of the squares")
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm; 0 turns it off")
    spike_z: float = setting(
        0.0,
        "skip an update whose loss or gradient norm is X standard deviations above the mean of the last "
        "100; 0 for never",
    )

    eval_every: int = setting(
        250, "updates between evaluations; 0 for none, which also turns off patience and keep_best"
    )
    eval_tokens: int = setting(10_485_760, "validation tokens of one evaluation, at most")
    hellaswag_every: int = setting(0, "updates between HellaSwag evaluations; 0 for none at all")
    hellaswag_data: str | None = setting(
        None, "JSONL file of HellaSwag items; by default the Hub's validation split"
    )
    patience: int = setting(
        0, "stop after N consecutive evaluations without improvement; 0 for never"
    )
    sample_every: int = setting(250, "updates between samples; 0 for none at all")
    sample_prompts: list[str] = setting(["\n"], "prompts that the samples continue")
    sample_tokens: int = setting(100, "new tokens per sample")

    resume_from: str | None = setting(
        None,
        "checkpoint to continue: 'latest' of output_dir (afresh if there is none), a path, a Hub id",
    )
    save_every: int = setting(1000, "updates between checkpoints; 0 for the last one only")
    keep_last: int = setting(2, "newest checkpoints to keep; one more while the run trains")
    keep_every: int = setting(0, "also keep those whose step is a multiple of this; 0 for none")
    keep_best: bool = setting(False, "also keep the one of lowest validation loss, as best/")
    max_hours: float | None = setting(None, "stop with a checkpoint after X hours")
    ignore_changes: bool = setting(
        False, "resume although the data, the tokenizer or the model's settings changed"
    )

    log_every: int = setting(10, "updates between lines of metrics.jsonl, beside that of the first")
    report_to: list[str] = setting([], "trackers beside metrics.jsonl: wandb, tensorboard, trackio")

    push_to_hub: str | None = setting(None, "Hub repository, USER/NAME, to push to while training")
    hub_strategy: str = setting(
        "every_save",
        "what to push: 'end' the final model, 'every_save' also the model of each checkpoint, "
        "'checkpoint' also what --resume_from needs",
    )

    seed: int = setting(1337, "of the initial weights, the order of the data, dropout and samples")
    deterministic: bool = setting(False, "torch's deterministic algorithms: slower, repeatable")
    dry_run: Command[bool] = setting(False, "print the memory and FLOPs estimate, then exit")
    accelerate_config: Command[str | None] = setting(
        None,
        "Accelerate config whose processes and precision --dry_run plans for; default the launch's",
    )
    device: Command[str | None] = setting(None, "GPU that --dry_run plans for, such as 'A100'")
    profile: Command[int] = setting(
        0, "updates to trace, after the first five, into trace-<rank>.json"
    )

    def __post_init__(self) -> None:
        check_ranges(
            self,
            positive="n_layer n_head n_embd n_positions sequence_length total_batch_size max_steps log_every "
            "eval_tokens sample_tokens keep_last depth",
            not_negative="learning_rate warmup_steps weight_decay max_grad_norm eval_every hellaswag_every "
            "sample_every save_every keep_every spike_z seed micro_batch_size patience profile",
            above_zero="max_hours",
            share="min_lr_ratio decay_share",
            below_one="beta1 beta2 dropout",
        )
        for name in ("data_dir", "output_dir"):
            if not (path := getattr(self, name)) or Path(path).is_file():
                made = (
                    f"make one by {recipe_command('prepare_data')} text {path} --data_dir FOLDER"
                    if path and name == "data_dir"
                    else "give the path of one"
                )
                raise ValueError(f"{name} is {path!r}, which is no folder: {made}")
        if (self.accelerate_config or self.device) and not self.dry_run:
            raise ValueError(
                f"--accelerate_config and --device are for --dry_run: {from_launch('device', self.device or '')}"
            )
        choice_of = {
            "architecture": (*ARCHITECTURES, None),
            "optimizer": OPTIMIZERS,
            "lr_schedule": SCHEDULES,
            "hub_strategy": HUB_STRATEGIES,
        }
        for name, choices in choice_of.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(filter(None, choices))}, got {getattr(self, name)!r}"
                )

    @property
    def tokens_per_sequence(self) -> int:
        """The length of a training sequence."""
        return self.n_positions if self.sequence_length is None else self.sequence_length

    def learning_rate_at(self, update: float) -> float:
        """Returns the learning rate after `update` updates of `total_batch_size` tokens."""
        return learning_rate(
            update,
            peak=self.learning_rate,
            schedule=self.lr_schedule,
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
            min_ratio=self.min_lr_ratio,
            decay_share=self.decay_share,
        )

    def fit_micro_batch(self, size: int, processes: int) -> tuple[int, str | None]:
        """Halves the micro-batch `size` until the processes divide an update evenly. The order of the data does not
        depend on it.

        Returns the size, and a note for the user, None if nothing changed. Raises what `batch_schedule` raises.
        """
        each = self.batch_schedule(processes).sequences // processes
        fitting = halved(size, each)
        if fitting == size:
            return size, None
        return fitting, (
            f"micro_batch_size {fitting} in place of {size}: each process has {each} sequences of an update of "
            f"{self.total_batch_size:,} tokens"
        )

    def batch_schedule(self, processes: int, step: int = 0, seen: int = 0) -> BatchSchedule:
        """Builds the batch schedule from update `step` on, after `seen` sequences.

        Raises `ValueError` if an update is not a whole number of sequences on each of the `processes`.
        """
        length = self.tokens_per_sequence
        tokens = length * processes
        if self.total_batch_size % tokens:
            nearest = max(1, round(self.total_batch_size / tokens)) * tokens
            raise ValueError(
                f"total_batch_size ({self.total_batch_size} tokens) is not a multiple of sequence_length x "
                f"processes = {length} x {processes} = {tokens}: try {nearest}"
            )
        return BatchSchedule(self.total_batch_size // length, step, seen)

    @staticmethod
    def commands() -> set[str]:
        """Returns the names of the settings that are commands."""
        hints = get_type_hints(TrainConfig, include_extras=True)
        return {name for name, hint in hints.items() if get_origin(hint) is Annotated}

    def settings(self) -> dict[str, Any]:
        """Returns the settings of the run by name, without those that are commands."""
        commands = self.commands()
        return {name: value for name, value in asdict(self).items() if name not in commands}

    def save(self, path: str | Path) -> None:
        """Writes the settings as a YAML file that `--config` reads."""
        write_file(path, yaml.safe_dump(self.settings(), sort_keys=False))


Config = TypeVar("Config")


def parse_config(config_class: type[Config], args: list[str] | None = None) -> Config:
    """Parses the settings of a recipe from the command line (`sys.argv` if `args` is None).

    `--config FILE.yaml` overrides the defaults of `config_class`; flags override both. Raises `ValueError` for an
    unknown setting or a value of the wrong type, `FileNotFoundError` if the YAML file is missing.
    """
    file_option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file_option.add_argument("--config", metavar="FILE.yaml", help="settings to read first")
    header = sys.modules[config_class.__module__].__doc__ or ""
    parser = argparse.ArgumentParser(
        parents=[file_option],
        allow_abbrev=False,
        usage="%(prog)s [--config FILE.yaml] [--SETTING VALUE ...]",
        description=header.partition("\n")[0],
    )
    parser.error = file_option.error = raise_value_error
    hints = get_type_hints(config_class)
    options = add_options(parser, config_class, hints)
    own, words = file_option.parse_known_args(args)
    given = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    if (path := own.config) is not None:
        for name, value in read_yaml(path, hints, options).items():
            given.add(name)
            parser.set_defaults(**{name: value})
            options[name].required = False
    found, unknown = parser.parse_known_args(words)
    if unknown:
        names = [*hints, "config"]
        word, value = [*unknown, ""][:2]
        raise ValueError(f"unknown option {word}{suggestion(word, names, value=value)}")
    config = config_class(**{name: getattr(found, name) for name in hints})
    config.given = frozenset(given)
    return config


def add_options(
    parser: argparse.ArgumentParser, config_class: type, hints: dict[str, Any]
) -> dict[str, argparse.Action]:
    """Adds the option of each setting to the parser, in the sections of `--help`; returns the options by name."""
    trains = issubclass(config_class, TrainConfig)
    inherited = list(dict.fromkeys([*MOST_CHANGED, *get_type_hints(TrainConfig)])) if trains else []
    own = [name for name in hints if name not in inherited]
    own.sort(key=lambda name: name not in config_class.__annotations__)  # then those of its base
    section = parser.add_argument_group("this recipe") if own else None
    settings = {field.name: field for field in fields(config_class)}
    options = {}
    for name in own + inherited:
        if trains and name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[name])
        options[name] = add_option(
            section, settings[name], hints[name], help_text(config_class, name)
        )
    return options


def add_option(
    section: argparse._ArgumentGroup, setting: Field, hint: Any, text: str
) -> argparse.Action:
    """Adds `--NAME`, also spelled with hyphens. A switch takes true or false, or no value, which is true; one that is on by
    default also has `--no_NAME`."""
    name = setting.name
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    parse, metavar = PARSERS[kind]
    several = {"nargs": "+"} if get_origin(hint) is list else {}
    required = setting.default is setting.default_factory is MISSING
    default = None if required else setting.default
    if default is MISSING:
        default = setting.default_factory()
    if default not in (None, [], ""):
        text += " (default: %(default)s)"
    if required:
        text += " (required)"
    if default is True:
        text += f"; --no_{name} turns it off"
    option = section.add_argument(
        *(f"--{name}", f"--{name.replace('_', '-')}"),
        type=batch_size if name == "micro_batch_size" else parse,
        metavar=metavar,
        default=default,
        required=required,
        help=text,
        **({"nargs": "?", "const": True} if kind is bool else several),
    )
    option.option_strings = option.option_strings[:1]  # --help shows one spelling
    if default is True:
        switches = f"--no_{name}", f"--no-{name.replace('_', '-')}"
        section.add_argument(*switches, dest=name, action="store_false", help=argparse.SUPPRESS)
    return option


def help_text(config_class: type, name: str) -> str:
    """Returns the help text of a setting, from `config_class` or its nearest base class that has one."""
    found = (vars(base).get("__dataclass_fields__", {}) for base in config_class.__mro__)
    texts = (of[name].metadata.get("help") for of in found if name in of)
    return next(text for text in texts if text)


def read_yaml(
    path: str, hints: dict[str, Any], options: dict[str, argparse.Action]
) -> dict[str, Any]:
    """Reads the settings in a YAML file. `hints` are their types, `options` their command-line actions."""
    values = load_yaml(path, "--config")
    if "compute_environment" in values:
        raise ValueError(
            f"{path} is a launch config, not settings: accelerate launch --config_file {path} RECIPE"
        )
    for name in [name for name in values if name in REMOVED and name not in hints]:
        default, instead = REMOVED[name]
        if (value := values.pop(name)) != default:
            print(
                f"{path}: {name} {value} was taken back and has no effect: {instead}",
                file=sys.stderr,
            )
    for name in values:
        if name not in hints:
            raise ValueError(
                f"{path} has the unknown setting {name!r}{suggestion(str(name), hints, '')}"
            )
    try:
        return {n: convert(n, value, hints[n], options[n]) for n, value in values.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_yaml(path: str, option: str) -> dict:
    """Reads the YAML file that `option` names. Raises `FileNotFoundError` or `ValueError` if it is no mapping."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{option} {path}: there is no such file")
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), UniqueKeys) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {yaml_problem(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings as `name: value` lines")
    return values


class UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that sets a name twice. YAML itself takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in names:
                problem = f"{name} is set twice, the second time"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def yaml_problem(error: Exception) -> str:
    """Returns what is wrong with a YAML file, and in which line, on one line."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or first_line(error)
    return problem + (f" in line {mark.line + 1}" if mark else "")


def convert(name: str, value: Any, hint: Any, option: argparse.Action) -> Any:
    """Converts a YAML value to the type `hint`, through a string as on the command line: YAML reads 6e-4 as a string.

    Raises `ValueError` if it cannot be converted."""
    if value is None and type(None) in get_args(hint):
        return None
    several = get_origin(hint) is list
    if isinstance(value, list) == several:
        try:
            found = [
                (option.type or str)(plain_text(item)) for item in (value if several else [value])
            ]
            return found if several else found[0]
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            pass
    raise ValueError(f"{name} is {reprlib.repr(value)}, expected {getattr(hint, '__name__', hint)}")


def plain_text(value: Any) -> str:
    """Returns a YAML scalar as command-line text. Raises `TypeError` for other values."""
    if not isinstance(value, (str, bool, int, float)) or "\0" in str(value):
        raise TypeError
    return str(value)


def raise_value_error(message: str) -> None:
    """Replaces `ArgumentParser.error`, which prints the usage and exits."""
    raise ValueError(message)

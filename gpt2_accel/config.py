"""The settings of a training run, and how they are parsed: defaults < YAML file < command line.

A recipe subclasses `TrainConfig` to change defaults or to add its own settings, and calls
`parse_config`. Hardware, processes, precision and compilation come from the Accelerate config.
"""

import sys
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import yaml

from gpt2_accel.batch_size import BatchSchedule, halved
from gpt2_accel.runtime.files import write_file
from gpt2_accel.runtime.options import (
    Parser,
    check_ranges,
    convert,
    load_yaml,
    parser_of,
    suggestion,
    true_or_false,
)

ARCHITECTURES = ("gpt2", "llama", "qwen3", "nanochat")  # see `models.config_class`
PATHS = ("data_dir", "output_dir", "init_from", "hellaswag_data", "core_data", "resume_from")
WEIGHT_DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "wsd", "wsd_linear", "constant")  # see `optim.learning_rate`
TRACKERS = ("wandb", "tensorboard", "trackio")  # see `runtime/trackers.py`
# Command-line flags for one call: a run does not save them as settings.
NOT_SAVED = ("dry_run", "profile")
# Settings that do not affect results. The fingerprint of the data stands for `data_dir`.
INERT_NAMES = """
    data_dir output_dir resume_from ignore_changes save_every keep_last keep_every keep_best
    sample_every sample_prompts sample_tokens push_to_hub hub_strategy hub_revisions max_hours
    log_every report_to
"""
INERT = frozenset(INERT_NAMES.split())
# Settings that determine the shape of a new model.
SHAPE = ("architecture", "depth", "n_layer", "n_head", "n_embd", "n_positions", "bias")


def setting(default: Any, help: str) -> Any:
    """Returns a dataclass field with a default and a help text."""
    kind = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**kind, metadata={"help": help})


def required(help: str) -> Any:
    """Returns a dataclass field without a default."""
    return setting(MISSING, help)


def derived(help: str) -> Any:
    """Returns a field that is None until `TrainConfig.derive`, unless the user sets it."""
    return field(default=None, metadata={"help": help, "derived": True})


@dataclass
class ModelChoice:
    """The settings of a script that opens a model."""

    model: str = setting("runs/quickstart", "run's folder, HF model directory or Hub id")
    model_class: str | None = setting(
        None, "code of a model that transformers does not have, FILE.py:CLASS"
    )
    verify: bool = setting(True, "compare the model's files with their checksums first")
    base: str | None = setting(None, "base of an adapter, in place of the one that it names")


@dataclass
class Sampling:
    """Sampling parameters.

    Sample i of a prompt has its own random generator with the seed `seed` + i. Other prompts and
    the number of samples do not change it, up to rounding, and torch's global random state is not
    used.

    `top_p` is nucleus sampling (Holtzman et al., 2020). A text that reaches `n_positions` loses its
    older half, and the KV cache is computed again. `compile` is for a single sample: it takes half
    a minute, and then a busy CPU slows it less.

    Raises `ValueError` for a value out of its range.
    """

    max_new_tokens: int = setting(200, "longest continuation, in tokens")
    temperature: float = setting(0.8, "lower is more conservative; 0 is greedy")
    top_k: int = setting(50, "keep the k likeliest tokens; 0 keeps all")
    top_p: float = setting(1.0, "keep the likeliest tokens that together reach this probability")
    num_samples: int = setting(1, "continuations of each prompt")
    seed: int = setting(1337, "same seed, same text; the second sample is the first of seed + 1")
    stop: list[str] = setting([], "strings that end a continuation, besides <|endoftext|>")
    compile: bool = setting(False, "compile the model: for a long text, of one sample")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            positive="max_new_tokens num_samples",
            not_negative="temperature top_k seed",
            above_zero="top_p",
            fraction="top_p",
        )
        if self.compile and self.num_samples > 1:
            raise ValueError("compile is for one sample: give --num_samples 1")


# The sections of `--help`, by the first setting of each. A recipe's own settings come before them.
SECTIONS = {
    "data_dir": "changed most often",
    "document_mask": "data and batch",
    "architecture": "model",
    "optimizer": "optimizer",
    "lr_schedule": "schedule",
    "eval_tokens": "evaluation and samples",
    "save_every": "checkpoints",
    "push_to_hub": "Hub",
    "log_every": "logging, reproducing, planning",
}


@dataclass
class TrainConfig:
    """All settings of a training run.

    The defaults train GPT-2 124M on 10B tokens with the GPT-3 paper's settings. Raises
    `ValueError`, naming the field, for a value out of its range.
    """

    given = frozenset[str]()  # names of settings that the user gave; not a setting
    rows = 1  # rows that a sequence has in the model: 2 for a pair of answers; not a setting

    data_dir: str = setting("data", "token shards that `prepare_data` wrote")
    output_dir: str = setting("runs/train", "run's folder: logs, checkpoints, final model")
    init_from: str | None = setting(None, "HF directory or USER/NAME@REVISION to start from")
    resume_from: str | None = setting(
        None, "'latest' (a new run if there is none), checkpoint or Hub id to continue"
    )
    n_layer: int = setting(12, "transformer blocks")
    micro_batch_size: int = setting(8, "sequences per device and pass, or 'auto' (0)")
    total_batch_size: int = setting(524288, "tokens per update, over all devices")
    max_steps: int = setting(19073, "updates of total_batch_size tokens")
    epochs: float | None = setting(None, "passes over the data, in place of max_steps")
    learning_rate: float = setting(6e-4, "peak learning rate")
    eval_every: int = setting(250, "evaluation interval, in updates; 0 for none")

    document_mask: bool = setting(False, "keep attention inside documents; GPT-2 does not")
    sequence_length: int | None = setting(None, "tokens per sequence; default n_positions")
    ramp_tokens: int = setting(0, "tokens over which the batch grows; 0 for none")
    ramp_start: int = setting(32, "sequences of the first update of the ramp")
    checkpoint_activations: bool = setting(False, "far less memory, a third more compute")

    architecture: str | None = setting(
        None,
        f"{', '.join(ARCHITECTURES)}, or HF directory or Hub id of a config.json; default gpt2",
    )
    attn_implementation: str | None = setting(None, "use transformers' class, with this attention")
    router_aux_loss: float | None = setting(
        None, "weight of the experts' load balancing loss; default the model's"
    )
    lora: int = setting(0, "train only a LoRA adapter of this rank; 0 for none")
    lora_alpha: int = setting(8, "scale of the adapter, times its rank")
    lora_dropout: float = setting(0.0, "dropout of the adapter's input")
    dtype: str = setting("float32", "of the weights: float32, or bfloat16 to save memory")
    residual_dtype: str = setting("float32", "of the residual stream, in bf16 runs")
    depth: int | None = setting(None, "N layers of width 64 x N, heads of 64 (nanochat 128)")
    n_head: int = setting(12, "attention heads")
    n_embd: int = setting(768, "width, a multiple of n_head")
    n_positions: int = setting(1024, "longest sequence that the model can read")
    bias: bool = setting(True, "biases in GPT-2's Linear and LayerNorm modules")
    dropout: float = setting(0.0, "of GPT-2's embeddings, attention, residuals")

    optimizer: str = setting("adamw", "'adamw', or 'muon' for the blocks' matrices")
    weight_decay: float = setting(0.1, "decay of matrices and embeddings")
    beta1: float = setting(0.9, "AdamW's decay of the mean")
    beta2: float = setting(0.95, "AdamW's decay of the squares")
    adam_eps: float = setting(1e-8, "AdamW's epsilon")
    max_grad_norm: float = setting(1.0, "clip gradients to this norm; 0 for never")
    spike_z: float = setting(0.0, "skip spikes of X standard deviations; 0 for none")
    lr_schedule: str = setting("cosine", f"{', '.join(SCHEDULES)}, after the warmup")
    warmup_steps: int = setting(715, "updates of linear warmup")
    min_lr_ratio: float = setting(0.1, "last learning rate / peak")
    decay_share: float = setting(0.2, "share of the updates, at the end, in which wsd decays")

    eval_tokens: int = setting(10_485_760, "validation tokens per evaluation, at most")
    hellaswag_every: int = setting(0, "HellaSwag interval, in updates; 0 for none")
    hellaswag_data: str | None = setting(None, "JSONL file of its items; default from the Hub")
    core_every: int = setting(0, "CORE interval, in updates (500 items per task); 0 for none")
    core_data: str | None = setting(None, "DCLM's bundle: folder, ZIP or URL; default nanochat's")
    patience: int = setting(0, "stop after N evaluations without progress; 0 for never")
    sample_every: int = setting(250, "sampling interval, in updates; 0 for none")
    sample_prompts: list[str] = setting(["\n"], "prompts that the samples continue")
    sample_tokens: int = setting(100, "new tokens per sample")

    save_every: int = setting(1000, "checkpoint interval, in updates; 0 for the last only")
    keep_last: int = setting(2, "newest checkpoints to keep; one more in training")
    keep_every: int = setting(0, "also keep the checkpoint of every N-th update; 0 for none")
    keep_best: bool = setting(False, "also keep the one with the lowest validation loss, as best/")
    load_best_model_at_end: bool = setting(False, "the final model is that of best/")
    max_hours: float | None = setting(None, "stop with a checkpoint after X hours")
    ignore_changes: bool = setting(False, "resume although the data or its order changed")

    push_to_hub: str | None = setting(None, "Hub repository to push to while training, USER/NAME")
    hub_strategy: str = setting(
        "every_save",
        "'end' pushes the final model, 'every_save' each checkpoint's, 'checkpoint' also its state",
    )
    hub_revisions: bool = setting(False, "keep each pushed checkpoint as a revision, step1000")

    log_every: int = setting(10, "interval of lines in metrics.jsonl, in updates")
    report_to: list[str] = setting([], "trackers: wandb, tensorboard, trackio")
    seed: int = setting(1337, "seed of weights, data order, dropout and samples")
    deterministic: bool = setting(False, "use torch's deterministic algorithms, which are slower")
    dry_run: list[str] = setting([], "print memory and time of this or another launch")
    profile: int = setting(0, "updates to trace into trace-<rank>.json")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            positive="n_layer n_head n_embd n_positions sequence_length total_batch_size max_steps "
            "log_every eval_tokens sample_tokens keep_last depth ramp_start",
            not_negative="lora router_aux_loss learning_rate warmup_steps weight_decay "
            "max_grad_norm eval_every hellaswag_every core_every sample_every save_every "
            "keep_every seed micro_batch_size patience profile ramp_tokens adam_eps spike_z",
            above_zero="max_hours epochs lora_alpha",
            fraction="min_lr_ratio decay_share",
            below_one="beta1 beta2 dropout lora_dropout",
        )
        if "" in (self.data_dir, self.output_dir):
            raise ValueError("data_dir or output_dir is empty: give the path of a folder")
        if Path(self.output_dir).is_file():
            raise ValueError(f"output_dir {self.output_dir} is a file: give the path of a folder")
        if self.load_best_model_at_end:
            self.keep_best = True
            if not self.eval_every:
                raise ValueError("load_best_model_at_end needs a validation loss: set eval_every")
        choices_of = {
            "optimizer": OPTIMIZERS,
            "lr_schedule": SCHEDULES,
            "hub_strategy": ("end", "every_save", "checkpoint"),
            "report_to": TRACKERS,
            "dtype": WEIGHT_DTYPES,
            "residual_dtype": WEIGHT_DTYPES,
        }
        for name, choices in choices_of.items():
            value = getattr(self, name)
            for word in value if isinstance(value, list) else [value]:
                if word is not None and word not in choices:
                    raise ValueError(f"{name} must be one of {', '.join(choices)}, got {word!r}")

    @property
    def tokens_per_sequence(self) -> int:
        """The length of a training sequence."""
        return self.n_positions if self.sequence_length is None else self.sequence_length

    @property
    def tokens_per_row(self) -> int:
        """The length of a row of the model: a sequence, or one answer of a pair."""
        return self.tokens_per_sequence // self.rows

    def fit_positions(self, n_positions: int) -> None:
        """Sets `sequence_length` to a model's positions, if they are fewer and it is not given."""
        given = self.sequence_length is not None or "n_positions" in self.given
        if n_positions < self.n_positions and not given:
            self.sequence_length = n_positions

    def fit_data(self, data: Any) -> None:
        """Fits the settings to a `Data`.

        Sets `rows`, and `max_steps` to `epochs` passes over the data, if `epochs` is given.

        Windows of a fixed length set `sequence_length`, if it is not given.
        """
        self.rows = 2 if data.pairs else 1
        fixed = data.sequence_length
        if self.sequence_length is None and fixed not in (None, self.n_positions):
            self.sequence_length = fixed
        if self.epochs is not None:
            self.max_steps = max(1, round(self.epochs * data.tokens / self.total_batch_size))
            check_ranges(self, positive="max_steps")

    def fit_micro_batch(self, size: int, processes: int) -> tuple[int, str | None]:
        """Halves the micro-batch `size` until it divides the sequences of a process in an update.

        The order of the data does not depend on it. Returns the size, and a note for the user, None
        if nothing changed. Raises `ValueError` if `processes` do not divide the sequences of an
        update.
        """
        each = self.batch_schedule(processes).full // processes
        fitting = halved(size, each)
        if fitting == size:
            return size, None
        note = (
            f"micro_batch_size {fitting} in place of {size}: each process has {each} sequences of "
            f"an update of {self.total_batch_size:,} tokens"
        )
        return fitting, note

    def batch_schedule(self, processes: int, step: int = 0, seen: int = 0) -> BatchSchedule:
        """Builds the batch schedule from update `step` on, after `seen` sequences.

        Raises `ValueError` if `processes` do not divide the sequences of an update, or if
        `ramp_start` does not.
        """
        length = self.tokens_per_sequence
        name = "n_positions" if self.sequence_length is None else "sequence_length"
        tokens = length * processes
        if self.total_batch_size % tokens:
            nearest = max(1, round(self.total_batch_size / tokens)) * tokens
            raise ValueError(
                f"total_batch_size ({self.total_batch_size} tokens) is not a multiple of {name} x "
                f"processes = {length} x {processes} = {tokens}: try {nearest}, or another --{name}"
            )
        full = self.total_batch_size // length
        start = self.ramp_start
        if self.ramp_tokens and (full % start or start % processes):
            raise ValueError(
                f"ramp_start ({start} sequences) has to divide the {full} sequences of "
                f"total_batch_size and be a multiple of the {processes} processes: set another one"
            )
        ramp = self.ramp_tokens // length
        total = self.max_steps * full
        return BatchSchedule(full, total, start, ramp, step, seen)

    def derive(self, **values: float | str) -> None:
        """Sets the settings that the user did not give. See `derived`."""
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def keep(self, saved: dict[str, Any]) -> None:
        """Sets the `derived` settings that the user did not give to those of the resumed run.

        `saved` are the run's settings, empty for a new run.
        """
        names = {each.name for each in fields(self) if "derived" in each.metadata}
        if self.epochs is not None:
            names -= {"max_steps"}
        self.derive(**{name: saved[name] for name in names & saved.keys()})

    def settings(self) -> dict[str, Any]:
        """Returns the settings of the run by name, without the `NOT_SAVED`."""
        return {name: value for name, value in asdict(self).items() if name not in NOT_SAVED}

    def save(self, path: str | Path) -> None:
        """Writes the settings as a YAML file that `--config` reads."""
        settings = self.settings()
        if self.epochs is not None:
            del settings["max_steps"]  # it follows from `epochs`
        write_file(path, yaml.safe_dump(settings, sort_keys=False))


Config = TypeVar("Config")


def parse_config(config_class: type[Config], args: list[str] | None = None) -> Config:
    """Parses the settings of a recipe from the command line (`sys.argv` if `args` is None).

    `--config FILE.yaml` overrides the defaults of `config_class`; options override both. Raises
    `ValueError` for an unknown setting or a value of the wrong type, `FileNotFoundError` for FILE.
    """
    words = sys.argv[1:] if args is None else args
    hints = get_type_hints(config_class)
    parser = build_parser(config_class, hints)
    options = parser.parse_args(words)
    given = {word[2:].partition("=")[0] for word in words if word[:2] == "--"}
    values = {} if options.config is None else read_yaml(options.config, hints)
    lengths = {"max_steps", "epochs"}
    in_file = {name for name, value in values.items() if value is not None}
    if lengths <= given or lengths <= in_file:
        raise ValueError("max_steps and epochs both give the length of a run: leave one out")
    if "max_steps" in given:
        values.pop("epochs", None)
    given |= values.keys()
    parser.set_defaults(**values)
    options = parser.parse_args(words)
    missing = [f"--{name}" for name in hints if getattr(options, name) is MISSING]
    if missing:
        raise ValueError(f"the following arguments are required: {', '.join(missing)}")
    if "dry_run" in given and options.dry_run == []:
        options.dry_run = ["here"]  # no value: estimate this launch
    config = config_class(**{name: getattr(options, name) for name in hints})
    vars(config)["given"] = frozenset(given)
    return config


def build_parser(config_class: type, hints: dict[str, Any]) -> Parser:
    """Builds the parser; a setting without a default is `MISSING` if it is not given."""
    header = sys.modules[config_class.__module__].__doc__ or ""
    parser = Parser(
        usage="%(prog)s [--config FILE.yaml] [--SETTING VALUE ...]",
        description=header.partition("\n")[0],
        epilog="[...] is the default. A switch without a value is true.",
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="settings to read first")
    texts: dict[str, str] = {}  # a recipe with another default keeps the help text
    for base in reversed(config_class.__mro__):
        if is_dataclass(base):
            texts |= {f.name: f.metadata["help"] for f in fields(base) if f.metadata}
    trains = issubclass(config_class, TrainConfig)
    inherited = {f.name for f in fields(TrainConfig)} if trains else set()
    section = parser.add_argument_group("this recipe")
    for each in sorted(fields(config_class), key=lambda each: each.name in inherited):
        name, default, text = each.name, each.default, texts[each.name]
        if trains and name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[name])
        if each.default_factory is not MISSING:
            default = each.default_factory()
        if default is MISSING:
            text += " (required)"
        elif default not in (None, [], "") and default is not False:
            text += " [%(default)s]"
        parse, metavar = parser_of(name, hints[name])
        shape: dict[str, Any] = {}
        if get_origin(hints[name]) is list:
            shape = {"nargs": "*" if name == "dry_run" else "+"}
        elif parse is true_or_false:  # no value means true
            shape = {"nargs": "?", "const": True}
        section.add_argument(
            f"--{name}", type=parse, metavar=metavar, default=default, help=text, **shape
        )
    return parser


def read_yaml(path: str, hints: dict[str, Any]) -> dict[str, Any]:
    """Reads the settings, of types `hints`, in a YAML file."""
    values = {}
    for name, value in load_yaml(path, "--config").items():
        if name not in hints:
            raise ValueError(
                f"{path} has the unknown setting {name!r}{suggestion(str(name), hints, '')}"
            )
        elif name not in NOT_SAVED:
            values[name] = convert(path, name, value, hints[name])
        elif value:
            raise ValueError(f"{path} has {name}, which is not a setting: give it as --{name}")
    return values

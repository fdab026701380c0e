"""Reads a run's folder: settings, metadata, curves, samples, the newest weights."""

import math
import reprlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import yaml

from gpt2_accel.checkpoint.find import list_checkpoints, model_directory, read_status
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.evals.results import read_record
from gpt2_accel.files import read_json_lines
from gpt2_accel.hf.convert import read_config
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE

# What OpenAI's GPT-2 124M reaches: (metric, part of the data's source, value, source of the value).
GPT2_LINES = (
    ("val/loss", "fineweb-edu", 3.2924, "build-nanogpt"),
    ("val/loss", "fineweb", 3.4250, "llm.c"),
    ("val/loss", "openwebtext", 3.12, "nanoGPT"),
    ("hellaswag/acc_norm_per_token", "", 0.2945, "build-nanogpt"),
)

# The types of the values that the report calculates with; it shows others as they are.
TYPES = {
    "config.yaml": {"max_steps": int, "sequence_length": int | None, "data_dir": str | None},
    "run.json": {"parameters": int, "vocab_size": int, "tokenizer": str, "flops_per_token": int}
    | {"git_commit": str | None},
    "status.json": {"step": int},
}
LARGEST = 1e30  # numbers from here on cannot be drawn; far above what training reaches


@dataclass
class Run:
    """A run's folder as it was found. `problems` says in a line each what is missing or unreadable.

    `lines` and `samples` are those of `metrics.jsonl` and `samples.jsonl`; `metadata` of `run.json`, as far as
    they are known; `status` of `status.json`; `evaluated` the entries of `evaluation.json`, the run's own and those
    of its checkpoints.
    """

    folder: Path
    name: str
    settings: dict = field(default_factory=dict)
    metadata: dict = field(default_factory=dict)
    status: dict = field(default_factory=dict)
    lines: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    evaluated: dict[str, dict] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The number of updates done, as far as the files say: either of them may be the newer."""
        return max(self.status.get("step", 0), self.lines[-1]["step"] if self.lines else 0)

    @property
    def evaluations(self) -> list[str]:
        """The names of all evaluation results, such as `val/loss`, without standard errors."""
        names = dict.fromkeys(name for line in self.lines for name in line if "/" in name)
        return [n for n in names if not n.startswith("train/") and not n.endswith("_stderr")]

    def curve(self, name: str, axis: str) -> tuple[list[float], list[float]]:
        """(x, y) of a metric over `tokens`, `minutes` or `hours` of training, or `flops`; empty where one is
        unknown."""
        points = [
            (x, line[name])
            for x, line in zip(self._axis(axis), self.lines, strict=True)
            if x is not None and isinstance(line.get(name), (int, float))
        ]
        return [x for x, _ in points], [y for _, y in points]

    def last(self, name: str) -> float | None:
        """Returns the newest value of a metric, or None."""
        return next((line[name] for line in reversed(self.lines) if name in line), None)

    @property
    def tokenizer(self) -> str | int | None:
        """Identifies the run's tokens: the tokenizer's fingerprint, or else the vocabulary's size."""
        return self.metadata.get("tokenizer") or self.metadata.get("vocab_size")

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of one nat per token in the validation data; None if its bytes are unknown."""
        loss, bits = self.last("val/loss"), self.last("val/bits_per_byte")
        return bits / loss if loss and bits else None

    def gpt2_line(self, name: str) -> tuple[float, str] | None:
        """What GPT-2 124M has in the metric `name` and where that is from, None where it does not apply:
        losses compare on the same text in the same tokens only, accuracies on the same items."""
        source = str(self.metadata.get("data", "")).lower()
        local = self.settings.get("hellaswag_data")  # items of the user's own
        for metric, part, value, where in GPT2_LINES:
            same = self.metadata.get("vocab_size") == GPT2_VOCAB_SIZE if part else not local
            if metric == name and part in source and same:
                return value, where
        return None

    def _axis(self, axis: str) -> list[float | None]:
        if axis == "tokens":
            return [line.get("tokens") for line in self.lines]
        if axis == "flops":
            each = self.metadata.get("flops_per_token")
            return [each and "tokens" in line and line["tokens"] * each for line in self.lines]
        scale = {"hours": 1, "minutes": 60}[axis]
        return [hours and hours * scale for hours in training_hours(self.lines)]


def training_hours(lines: list[dict]) -> list[float | None]:
    """Returns the training hours at each line; for runs of older releases, computed from the speed."""
    seconds, hours, tokens = 0.0, [], 0
    for line in lines:
        if "train/seconds" in line:
            seconds = line["train/seconds"]
        elif speed := line.get("train/tokens_per_second"):
            seconds += (line.get("tokens", tokens) - tokens) / speed
        if "train/tokens_per_second" in line:
            tokens = line.get("tokens", tokens)
        hours.append(seconds / 3600 if seconds else None)
    return hours


def read_run(folder: str | Path) -> Run:
    """All that a run left so far. Raises `FileNotFoundError` if there is no such folder, `ValueError` if it
    holds nothing of a run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give that of a run, its --output_dir")
    run = Run(folder, folder.resolve().name)
    run.settings = read_part(run, "config.yaml")
    run.metadata = read_part(run, "run.json")
    status = read_part(run, "status.json")
    run.status = {name: value for name, value in read_status(folder).items() if name in status}
    for part, name in (("lines", "metrics.jsonl"), ("samples", "samples.jsonl")):
        entries = [entry for entry in read_json_lines(folder / name) if is_entry(entry)]
        setattr(run, part, sorted(entries, key=lambda entry: entry["step"]))
        note_lost_lines(run, name, len(entries))
    for place in (*list_checkpoints(folder), folder):
        try:
            run.evaluated |= read_record(place / "evaluation.json")
        except (OSError, ValueError):
            name = (place / "evaluation.json").relative_to(folder)
            run.problems.append(f"{name} is damaged: left out")
    known = {"output_dir", "max_steps"} <= run.settings.keys() or "run_id" in run.metadata
    if not (known or run.lines or list_checkpoints(folder)):
        raise ValueError(f"{folder} holds nothing of a run: give the --output_dir of one")
    complete_metadata(run)
    if not run.lines:
        run.problems.append("metrics.jsonl has no lines yet: no curves")
    return run


def read_part(run: Run, name: str) -> dict:
    """Reads a JSON or YAML file of the run's folder, without values of another type than `TYPES` says; empty if it is
    missing or damaged."""
    path = run.folder / name
    if not path.exists():
        run.problems.append(f"{name} is missing: the run is of another release, or just starting")
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        values = None
    if not isinstance(values, dict):
        run.problems.append(f"{name} is damaged: left out")
        return {}
    for key, kind in TYPES[name].items():
        value = values.get(key, 0 if kind is int else None)
        too_large = isinstance(value, int) and not 0 <= value < LARGEST
        if key in values and (too_large or not isinstance(value, kind)):
            run.problems.append(f"{name} has {key} = {reprlib.repr(values.pop(key))}: left out")
    return values


def is_entry(entry: dict) -> bool:
    """Whether a line of `metrics.jsonl` or `samples.jsonl` has numbers for its step, tokens and metrics. A metric that
    was not finite is null."""
    metrics = [value for name, value in entry.items() if "/" in name and value is not None]
    counts = [entry["step"], entry.get("tokens", 0)]
    return all(map(is_number, counts + metrics)) and min(counts) >= 0


def is_number(value: object) -> bool:
    """Whether a value is a number that can be drawn or, if it is not finite, left out of a curve."""
    if isinstance(value, float) and not math.isfinite(value):
        return True
    return isinstance(value, int | float) and abs(value) < LARGEST


def note_lost_lines(run: Run, name: str, whole: int) -> None:
    """Notes unreadable lines and repeated steps of a log in the run's `problems`."""
    path = run.folder / name
    written = sum(map(bool, path.read_bytes().split(b"\n"))) if path.exists() else 0
    if lost := written - whole:
        run.problems.append(f"{name}: {lost} damaged line{'s' * (lost > 1)} left out")
    steps = [entry["step"] for entry in run.lines] if name == "metrics.jsonl" else []
    if any(step == after for step, after in pairwise(steps)):
        run.problems.append(f"{name}: some steps stand in it twice")


def complete_metadata(run: Run) -> None:
    """Fills in metadata that older releases did not record, from the model and the data."""
    directory = Path(model_directory(run.folder))
    if "flops_per_token" not in run.metadata and (directory / "config.json").is_file():
        try:
            shape = read_config(directory)
            length = run.settings.get("sequence_length") or shape.n_positions
            run.metadata["parameters"] = shape.parameter_count
            run.metadata["vocab_size"] = shape.vocab_size
            run.metadata["flops_per_token"] = flops_per_token(shape, length)
        except (OSError, ValueError):
            run.problems.append("its model's config.json is damaged: no curves over FLOPs")
    if "flops_per_token" not in run.metadata:
        run.problems.append("neither run.json nor a checkpoint is there: no curves over FLOPs")
    if not {"data", "tokenizer"} <= run.metadata.keys() and run.settings.get("data_dir"):
        try:
            manifest = read_manifest(run.settings["data_dir"])
            found = {"data": manifest["source"], "tokenizer": manifest["tokenizer"]["fingerprint"]}
            run.metadata = found | run.metadata
        except (OSError, ValueError):
            if "data" not in run.metadata:
                run.problems.append(f"its data, {run.settings['data_dir']}, is not there any more")

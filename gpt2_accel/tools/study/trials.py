"""The runs of a study: a trial is a recipe with its settings, a result what its run's folder recorded; `runs.csv` lists them."""

import ast
import csv
import functools
import hashlib
import io
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt2_accel.checkpoint.find import model_directory, read_status
from gpt2_accel.config import INERT, TrainConfig
from gpt2_accel.data.shards import data_fingerprint, read_manifest
from gpt2_accel.estimate.dry_run import model_shape
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.hf.convert import local_directory
from gpt2_accel.models import ModelConfig
from gpt2_accel.runtime.files import digest, read_json_lines, write_file
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.tools.study.children import PACKAGE, ask, settings_of

WARMUP = "warmup_share"  # of the updates; may stand for warmup_steps until the number of updates is known
CODE = "code.txt"  # in a run's folder: the fingerprint of the code that trained it
NOT_TRAINED = {"cli", "generation", "tools"}  # rooms on which no loss depends


@dataclass(frozen=True)
class Trial:
    """A run of a study: a recipe, its command line, and what follows from it.

    `changes` are the settings on the command line; `resolved` are all settings of the run, as `TrainConfig` has them.
    `files` holds the SHA-256 of the modules of the project that the recipe imports, and of the model of `init_from`, by
    path; `precision` what of the launch changes numbers; `label` what a run's folder is called beside its id.
    """

    recipe: Path
    changes: Mapping[str, Any]
    resolved: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    precision: Mapping[str, str] = field(default_factory=dict)
    label: str = "run"

    def changed(self, label: str | None = None, **changes: Any) -> "Trial":
        """Returns the trial with other values of settings of `TrainConfig`. Raises `ValueError` for one that is out of its
        range."""
        both = {"changes": {**self.changes, **changes}, "resolved": {**self.resolved, **changes}}
        trial = replace(self, **both, label=label or self.label)
        assert trial.config
        return trial

    def lasting(self, updates: int) -> "Trial":
        """Returns the trial with this number of updates, the warmup steps of its `WARMUP`, if it has
        one, and the settings that the recipe derives from them. Raises the errors of `read_trial`."""
        changes = {**self.changes, "max_steps": updates}
        if WARMUP in changes:
            changes["warmup_steps"] = round(changes.pop(WARMUP) * updates)
        return replace(read_trial(self.recipe, changes, self.precision), label=self.label)

    @cached_property
    def config(self) -> TrainConfig:
        """The settings, without those that only the recipe has."""
        names = TrainConfig.__dataclass_fields__
        return TrainConfig(**{name: v for name, v in self.resolved.items() if name in names})

    @cached_property
    def shape(self) -> ModelConfig:
        """The shape of the model. Raises `ValueError` if it is not possible."""
        vocab_size = read_manifest(self.config.data_dir)["tokenizer"]["vocab_size"]
        return model_shape(self.config, vocab_size)

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of forward and backward per token."""
        return flops_per_token(self.shape, self.config.tokens_per_sequence)

    @property
    def tokens(self) -> int:
        """The tokens of the whole run."""
        return self.config.max_steps * self.config.total_batch_size

    @property
    def flops(self) -> float:
        """The FLOPs of the whole run."""
        return float(self.tokens * self.flops_per_token)

    @cached_property
    def id(self) -> str:
        """What identifies the run: 12 hexadecimal digits of the SHA-256 of its settings that differ from the defaults and
        change numbers, its data, the content of `files`, and its precision."""
        default, missing = TrainConfig().settings(), object()
        own: dict[str, Any] = {
            name: value
            for name, value in self.resolved.items()
            if name not in INERT | {"init_from"} and default.get(name, missing) != value
        }
        own["recipe"] = self.recipe.name
        if self.files:
            own["files"] = sorted((Path(path).name, sha) for path, sha in self.files.items())
        content = [own, data_fingerprint(self.config.data_dir), self.precision]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def arguments(self, output_dir: Path) -> list[str]:
        """Returns the command line of the recipe."""
        settings = {**self.changes, "output_dir": str(output_dir), "resume_from": "latest"}
        return [word for name, v in settings.items() for word in (f"--{name}", *as_words(name, v))]


def read_trial(
    recipe: Path, changes: Mapping[str, Any], precision: Mapping[str, str] | None = None
) -> Trial:
    """Returns the trial of a recipe's command line, with all settings that the recipe trains with. Raises `ValueError` for
    settings that the recipe refuses."""
    words = Trial(recipe, changes, {}).arguments(Path("runs/.settings"))  # a folder of no run
    resolved, files = ask_settings(recipe, *words)
    if resolved["init_from"]:
        folder = Path(local_directory(model_directory(resolved["init_from"])))
        weights = [path for kind in ("safetensors", "bin") for path in folder.glob(f"*.{kind}")]
        files = files | {str(path): digest(path) for path in (folder / "config.json", *weights)}
    typed = {name: resolved.get(name, value) for name, value in changes.items()}
    return Trial(recipe, typed, resolved, files, precision or {})


@functools.cache  # runs that differ in their seeds only have the same settings
def ask_settings(recipe: Path, *words: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what `settings_of` returns in a child. Raises the errors of `ask`."""
    return ask(settings_of, recipe, recipe_source(recipe), words)


def as_words(name: str, value: Any) -> list[str]:
    """Returns the value of a setting as words of a command line. Raises `ValueError` for what is no scalar or list of scalars."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, bool, int, float)) for item in values):
        raise ValueError(f"{name} cannot be {value!r}")
    return [str(item) for item in values]


@dataclass(frozen=True)
class Result:
    """A recorded run.

    `id` is that of its trial; `settings` is the JSON of those that the study changed. `loss` is the val/loss after the last
    update in nats per token, infinite if the run diverged, and `bits_per_byte` its val/bits_per_byte, None if the data's
    bytes are unknown. `code` is the fingerprint of the code that trained it. There is no time in it: a run that was killed
    and continued has the same row.
    """

    id: str
    settings: str
    parameters: int
    updates: int
    tokens: int
    flops: float
    loss: float
    bits_per_byte: float | None = None
    code: str = ""

    def metric(self, name: str) -> float:
        """Returns `loss` or `bits_per_byte`. Raises `ValueError` if it is unknown."""
        value = math.inf if math.isinf(self.loss) else getattr(self, name)
        if value is None:
            raise ValueError(f"run {self.id} has no {name}: compare by loss")
        return value


@functools.cache
def recipe_source(recipe: Path) -> bytes:
    """Returns the text of a recipe, read once: runs of one study have one recipe, also if its file changes meanwhile."""
    return recipe.read_bytes()


@functools.cache  # of what this process has imported: files may change later
def code_fingerprint(recipe: Path) -> str:
    """Returns 12 hexadecimal digits of the SHA-256 of a recipe and of the parts of this package on
    which a run's numbers depend, without comments and docstrings."""
    code = hashlib.sha256(syntax(recipe_source(recipe)))
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] not in NOT_TRAINED:
            code.update(syntax(path.read_bytes()))
    return code.hexdigest()[:12]


def syntax(source: bytes) -> bytes:
    """Returns the syntax tree of a Python file as text, without docstrings."""
    return ast.dump(WithoutConstants().visit(ast.parse(source))).encode()


class WithoutConstants(ast.NodeTransformer):
    """Removes the statements that are a constant, as docstrings are."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def recorded_code(folder: Path) -> str:
    """Returns the fingerprint of the code that trained the run in `folder`; empty if unknown."""
    path = folder / CODE
    return path.read_text(encoding="utf-8") if path.exists() else ""


def caveats(recipe: Path, results: Collection[Result]) -> list[str]:
    """Returns a remark on the runs that other code recorded, if there are any."""
    other = sum(result.code != code_fingerprint(recipe) for result in results)
    return (
        [f"{other} of {len(results)} runs were recorded by other code than this"] if other else []
    )


def read_run(trial: Trial, folder: Path) -> Result | None:
    """Returns the result of the run in `folder`, None if it neither finished nor diverged.

    Raises `ValueError` if its metrics lack the evaluation after its last update."""
    status = read_status(folder)
    diverged = status.get("state") == "failed" and status["reason"].startswith(Diverged.__name__)
    if status.get("state") != "finished" and not diverged:
        return None
    [*_, line] = {}, *read_json_lines(folder / "metrics.jsonl")
    loss, tokens = line.get("val/loss"), line.get("tokens", 0)
    if not diverged and (loss is None or line["step"] != status["step"]):
        raise ValueError(f"its metrics lack the last val/loss: remove {folder}")
    settings = {n: v for n, v in trial.changes.items() if n not in INERT or n == "data_dir"}
    return Result(
        trial.id,
        json.dumps(settings, sort_keys=True),
        trial.shape.parameter_count,
        status["step"],
        tokens,
        float(tokens * trial.flops_per_token),
        math.inf if diverged else loss,
        None if diverged else line.get("val/bits_per_byte"),
        recorded_code(folder),
    )


def read_table(path: Path) -> dict[str, Result]:
    """Returns the rows of a CSV file by id; empty if there is no such file.

    Raises `ValueError` with the number of the first line that is cut, lacks a column, has one that
    cannot be read, or contradicts another line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kinds = {part.name: part.type for part in fields(Result)} | {"bits_per_byte": float}
    names, found = None, {}
    for number, line in enumerate(lines, 1):
        try:
            [cells] = csv.reader([line.decode()], strict=True)
            if names is None:
                names = {name: kinds[name] for name in cells}
            elif cells:
                pairs = zip(names.items(), cells, strict=True)
                row = Result(**{name: kind(cell) for (name, kind), cell in pairs if cell})
                if math.isnan(row.loss) or found.setdefault(row.id, row) != row:
                    raise ValueError
            if not line.endswith(b"\n"):
                raise ValueError
        except (csv.Error, KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: this row of the table of runs is damaged: restore the file "
                "from a copy, or remove the line"
            ) from error
    return found


def write_table(path: Path, results: Iterable[Result]) -> None:
    """Writes the CSV file atomically, in the order of the settings, so that the same runs give the same file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
    writer.writeheader()
    for result in sorted(results, key=lambda result: (result.settings, result.id)):
        writer.writerow(asdict(result))
    write_file(path, text.getvalue())

"""The runs of a study: a trial is a recipe with its settings, a result what its run's folder recorded; `runs.csv` lists them."""

import ast
import csv
import functools
import hashlib
import io
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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

PARSER = threading.Lock()
CODE = "code.txt"  # in a run's folder: the fingerprint of the code that trained it
NOT_TRAINED = {"cli", "generation", "tools"}  # rooms on which no loss depends
# Launch options that affect results. Runs have those of this process, which `accelerate launch` sets.
LAUNCH = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "dynamo": "ACCELERATE_DYNAMO_BACKEND"}


@dataclass(frozen=True)
class Trial:
    """A run of a study: a recipe, its command line, and what follows from it.

    `changes` are the settings on the command line; `resolved` are all settings of the run, as `TrainConfig` has them.
    `files` holds the SHA-256 of the modules of the project that the recipe imports, and of the model of `init_from`, by
    path; `label` is the name of the run's folder beside its id.
    """

    recipe: Path
    changes: Mapping[str, Any]
    resolved: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    label: str = "run"

    def changed(self, label: str, **changes: Any) -> "Trial":
        """Returns the trial with another label and other values of settings of `TrainConfig` on which no other setting
        depends. Raises `ValueError` for a value that is out of its range."""
        both = {"changes": self.changes | changes, "resolved": self.resolved | changes}
        trial = replace(self, label=label, **both)
        assert trial.config
        return trial

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
        change numbers, its data, the content of `files`, and the launch options that affect results."""
        default = TrainConfig().settings()
        own: dict[str, Any] = {"recipe": self.recipe.name}
        for name, value in self.resolved.items():
            usual = name in default and default[name] == value
            if not usual and name not in INERT and name != "init_from":
                own[name] = value
        if self.files:
            own["files"] = sorted((Path(path).name, sha) for path, sha in self.files.items())
        launch = {kind: os.environ.get(name, "no").lower() for kind, name in LAUNCH.items()}
        content = [own, data_fingerprint(self.config.data_dir), launch]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def arguments(self, output_dir: Path) -> list[str]:
        """Returns the command line of the recipe. Raises `ValueError` for a value that is neither a scalar nor a list of
        scalars."""
        words = []
        for name, value in self.changes.items():
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(item, str | int | float) for item in values):
                raise ValueError(f"{name} cannot be {value!r}")
            words += [f"--{name}", *map(str, values)]
        return [*words, "--output_dir", str(output_dir), "--resume_from", "latest"]


def read_trial(recipe: Path, changes: Mapping[str, Any]) -> Trial:
    """Returns the trial of a recipe's command line, with all settings that the recipe trains with. Raises `ValueError` for
    settings that the recipe refuses."""
    words = Trial(recipe, changes, {}).arguments(Path("runs/.settings"))  # a folder of no run
    resolved, files = ask_settings(recipe, *words)
    if resolved["init_from"]:
        folder = Path(local_directory(model_directory(resolved["init_from"])))
        for name in ("config.json", "*.safetensors", "*.bin"):
            files = files | {str(path): digest(path) for path in folder.glob(name)}
    typed = {name: resolved.get(name, value) for name, value in changes.items()}
    return Trial(recipe, typed, resolved, files)


@functools.cache  # runs that differ in their seeds only have the same settings
def ask_settings(recipe: Path, *words: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what `settings_of` returns in a child. Raises the errors of `ask`."""
    return ask(settings_of, recipe, recipe_source(recipe), words)


class Result(NamedTuple):
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


@functools.cache
def recipe_source(recipe: Path) -> bytes:
    """Returns the text of a recipe, read once: runs of one study have one recipe, also if its file changes meanwhile."""
    return recipe.read_bytes()


@functools.cache  # of what this process has imported: files may change later
def code_fingerprint(recipe: Path) -> str:
    """Returns 12 hexadecimal digits of the SHA-256 of a recipe and of the parts of this package on which a run's numbers
    depend, without comments and docstrings."""
    code = hashlib.sha256(syntax(recipe_source(recipe)))
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] not in NOT_TRAINED:
            code.update(syntax(path.read_bytes()))
    return code.hexdigest()[:12]


def syntax(source: bytes) -> bytes:
    """Returns the syntax tree of a Python file as text, without docstrings."""
    with PARSER:  # Python 3.11 fails if two threads build trees at once
        return ast.dump(WithoutConstants().visit(ast.parse(source))).encode()


class WithoutConstants(ast.NodeTransformer):
    """Removes the statements that are a constant, as docstrings are."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def recorded_code(folder: Path) -> str:
    """Returns the fingerprint of the code that trained the run in `folder`; empty if unknown."""
    path = folder / CODE
    return path.read_text(encoding="utf-8") if path.exists() else ""


def read_run(trial: Trial, folder: Path) -> Result | None:
    """Returns the result of the run in `folder`, None if it neither finished nor diverged.

    Raises `ValueError` if its metrics lack the evaluation after its last update."""
    status = read_status(folder)
    state = status.get("state")
    diverged = state == "failed" and status["reason"].startswith(Diverged.__name__)
    if state != "finished" and not diverged:
        return None
    lines = read_json_lines(folder / "metrics.jsonl")
    line = lines[-1] if lines else {}
    loss = math.inf if diverged else line.get("val/loss")
    if not diverged and (loss is None or line["step"] != status["step"]):
        raise ValueError(f"its metrics lack the last val/loss: remove {folder}")
    settings = {n: v for n, v in trial.changes.items() if n not in INERT or n == "data_dir"}
    tokens = line.get("tokens", 0)
    return Result(
        trial.id,
        json.dumps(settings, sort_keys=True),
        trial.shape.parameter_count,
        status["step"],
        tokens,
        float(tokens * trial.flops_per_token),
        loss,
        None if diverged else line.get("val/bits_per_byte"),
        recorded_code(folder),
    )


def read_table(path: Path) -> dict[str, Result]:
    """Returns the rows of a CSV file by id; empty if there is no such file.

    Raises `ValueError` with the number of the first line that is cut, lacks a column, has one that
    cannot be read, or contradicts another line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kinds = Result.__annotations__ | {"bits_per_byte": float}
    found: dict[str, Result] = {}
    for number, line in enumerate(lines, 1):
        try:
            [cells] = csv.reader([line.decode()], strict=True)
            if number == 1:
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
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Result._fields)
    writer.writerows(sorted(results, key=lambda result: (result.settings, result.id)))
    write_file(path, text.getvalue())

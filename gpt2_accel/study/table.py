"""The recorded runs of a study: a CSV file with one row per run, which decides what is left to train."""

import csv
import functools
import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import gpt2_accel
from gpt2_accel.checkpoint.find import read_status
from gpt2_accel.files import read_json_lines, write_file, write_json
from gpt2_accel.runtime.guard import Diverged
from gpt2_accel.study.children import recipe_source

RESULT = "result.json"  # in the folder of a run
NOT_TRAINED = {"cli", "generation", "report", "study"}  # rooms on which no loss depends


@dataclass(frozen=True)
class Result:
    """A recorded run.

    `id` identifies its resolved settings, its data and its precision; `settings` is the JSON of those that the study
    changed. `loss` is the last val/loss in nats per token, infinite if the run diverged, and `bits_per_byte` the last
    val/bits_per_byte, None if the data's bytes are unknown. `code` is the fingerprint of the code that trained it. There is
    no time in it: a run that was killed and continued has the same row.
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

    @property
    def diverged(self) -> bool:
        return math.isinf(self.loss)

    def metric(self, name: str) -> float:
        """Returns `loss` or `bits_per_byte`. Raises `ValueError` if it is unknown."""
        value = math.inf if self.diverged else getattr(self, name)
        if value is None:
            raise ValueError(f"run {self.id} has no {name}: compare by loss")
        return value


def identify(settings: Mapping[str, Any], data: str, precision: Mapping[str, str]) -> str:
    """Returns 12 hexadecimal digits of the SHA-256 of a run's settings, its data's fingerprint and its precision."""
    content = json.dumps([settings, data, precision], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


@functools.cache  # of what this process has imported: files may change later
def code_fingerprint(recipe: Path) -> str:
    """Returns 12 hexadecimal digits of the SHA-256 of a recipe and of what of this package a run's numbers depend on."""
    package = Path(gpt2_accel.__file__).parent
    sources = [
        p for p in package.rglob("*.py") if p.relative_to(package).parts[0] not in NOT_TRAINED
    ]
    content = b"\0".join([recipe_source(recipe), *(path.read_bytes() for path in sorted(sources))])
    return hashlib.sha256(content).hexdigest()[:12]


def read_result(folder: Path) -> Result | None:
    """Returns the record in a run's folder, None if there is none, or if it is damaged: its metrics make it again."""
    try:
        return Result(**json.loads((folder / RESULT).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def record(
    folder: Path, id: str, settings: Mapping[str, Any], flops_per_token: float, code: str
) -> Result | None:
    """Records the run that has ended in `folder`. Returns None, without a record, if it neither finished nor diverged."""
    status = read_status(folder)
    diverged = status.get("state") == "failed" and status["reason"].startswith(Diverged.__name__)
    if status.get("state") != "finished" and not diverged:
        return None
    lines = read_json_lines(folder / "metrics.jsonl")

    def last(name: str) -> Any:
        return next((line[name] for line in reversed(lines) if line.get(name) is not None), None)

    tokens, loss = last("tokens") or 0, last("val/loss")
    if loss is None and not diverged:
        raise ValueError(f"{folder} has no val/loss: set eval_every above 0")
    result = Result(
        id,
        json.dumps(settings, sort_keys=True),
        json.loads((folder / "run.json").read_text(encoding="utf-8"))["parameters"],
        status["step"],
        tokens,
        float(tokens * flops_per_token),
        math.inf if diverged else loss,
        None if diverged else last("val/bits_per_byte"),
        code,
    )
    write_json(folder / RESULT, asdict(result))
    return result


def read_table(path: Path) -> dict[str, Result]:
    """Returns the rows of a CSV file by id; empty if there is no such file. Raises `ValueError` if it is no such table."""
    if not path.exists():
        return {}
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
        return {row["id"]: parse(row) for row in rows}
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise ValueError(
            f"{path} is no table of runs ({error!r}): restore it from a copy, or remove the damaged rows"
        ) from error


def parse(row: Mapping[str, str]) -> Result:
    """Returns the result in a row of the CSV file. Raises `ValueError` for a loss that is no number."""
    bits = row["bits_per_byte"]
    if math.isnan(float(row["loss"])):
        raise ValueError(f"run {row['id']} has the loss {row['loss']}")
    return Result(
        row["id"],
        row["settings"],
        int(row["parameters"]),
        int(row["updates"]),
        int(row["tokens"]),
        float(row["flops"]),
        float(row["loss"]),
        float(bits) if bits else None,
        row.get("code") or "",
    )


def write_table(path: Path, results: Iterable[Result]) -> None:
    """Writes the CSV file atomically, in the order of the settings, so that the same runs give the same file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
    writer.writeheader()
    for result in sorted(results, key=lambda result: (result.settings, result.id)):
        writer.writerow(asdict(result))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text.getvalue():
        write_file(path, text.getvalue())

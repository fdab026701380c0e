"""Reads a run's folder: settings, metadata, curves, samples, evaluations. Runs of release 0.3 and later."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from gpt2_accel.checkpoint.find import list_checkpoints, read_status
from gpt2_accel.evals.results import read_record
from gpt2_accel.files import read_json_lines


@dataclass
class Run:
    """A run's folder as it was found. `problems` says in a line each what is missing or unreadable.

    `lines` and `samples` are those of `metrics.jsonl` and `samples.jsonl`; `metadata` of `run.json`; `status` of
    `status.json`; `evaluated` the entries of `evaluation.json`, the run's own and those of its checkpoints.
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
        return max([self.status.get("step", 0), *(line["step"] for line in self.lines[-1:])])

    def curve(self, name: str, axis: str) -> tuple[list[float], list[float]]:
        """Returns (x, y) of a metric's finite values over `tokens`, `minutes` or `hours` of training, or `flops`; empty where
        one is unknown."""
        points, seconds = [], None
        for line in self.lines:
            seconds, y = line.get("train/seconds", seconds), line.get(name)
            amount = seconds if axis in ("minutes", "hours") else line.get("tokens")
            units = {
                "minutes": 1 / 60,
                "hours": 1 / 3600,
                "flops": self.metadata.get("flops_per_token"),
            }
            unit = units.get(axis, 1)
            if amount is not None and unit and isinstance(y, int | float) and math.isfinite(y):
                points.append((amount * unit, y))
        return [x for x, _ in points], [y for _, y in points]


def read_run(folder: str | Path) -> Run:
    """Returns all that a run left so far. Raises `FileNotFoundError` if there is no such folder, `ValueError` if it holds
    nothing of a run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give that of a run, its --output_dir")
    run = Run(folder, folder.resolve().name, status=read_status(folder))
    run.settings, run.metadata = (read_part(run, name) for name in ("config.yaml", "run.json"))
    run.lines, run.samples = (read_log(run, name) for name in ("metrics.jsonl", "samples.jsonl"))
    checkpoints = list_checkpoints(folder)
    for place in (*checkpoints, folder):
        try:
            run.evaluated |= read_record(place / "evaluation.json")
        except (OSError, ValueError):
            run.problems.append(
                f"{(place / 'evaluation.json').relative_to(folder)} is damaged: left out"
            )
    if not ("output_dir" in run.settings or "run_id" in run.metadata or run.lines or checkpoints):
        raise ValueError(f"{folder} holds nothing of a run: give the --output_dir of one")
    if not run.lines:
        run.problems.append("metrics.jsonl has no lines yet: no curves")
    return run


def read_part(run: Run, name: str) -> dict:
    """Returns the content of a JSON or YAML file of the run's folder, empty if it is missing or damaged."""
    try:
        values = yaml.safe_load((run.folder / name).read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError):
        values = None
    if isinstance(values, dict):
        return values
    run.problems.append(f"{name} is missing or damaged: left out")
    return {}


def read_log(run: Run, name: str) -> list[dict]:
    """Returns the lines of a log, and notes how many are damaged, such as the last one of a killed run."""
    path, lines = run.folder / name, read_json_lines(run.folder / name)
    written = path.read_bytes().split(b"\n") if path.exists() else []
    if lost := sum(map(bool, written)) - len(lines):
        run.problems.append(f"{name}: {lost} damaged line{'s' * (lost > 1)} left out")
    return lines

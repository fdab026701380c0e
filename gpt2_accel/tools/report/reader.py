"""Reads a run's folder: settings, metadata, curves, samples, evaluations. Runs of release 0.3 and later."""

from dataclasses import dataclass, field
from pathlib import Path

from gpt2_accel.checkpoint.find import list_checkpoints, read_status
from gpt2_accel.config import load_saved
from gpt2_accel.evals.results import read_record
from gpt2_accel.hf.loss_plot import values
from gpt2_accel.runtime.files import read_json_lines

# The horizontal axes: a label, what is counted, a key of `metrics.jsonl`, and its unit, None for a run's FLOPs per token.
AXES = {
    "tokens": ("tokens", "tokens", 1),
    "hours": ("hours of training", "train/seconds", 1 / 3600),
    "flops": ("FLOPs", "tokens", None),
}


@dataclass
class Run:
    """A run's folder as it was found; what is missing is empty.

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

    @property
    def step(self) -> int:
        """The number of updates done, as far as the files say: either of them may be the newer."""
        return max([self.status.get("step", 0), *(line["step"] for line in self.lines[-1:])])

    def curve(self, name: str, axis: str) -> tuple[list[float], list[float]]:
        """Returns (x, y) of a metric's finite values over an axis of `AXES`; empty where one is unknown."""
        _, key, unit = AXES[axis]
        unit = unit or self.metadata.get("flops_per_token")
        return values(self.lines, name, key, unit) if unit else ([], [])


def read_run(folder: str | Path) -> Run:
    """Returns all that a run left so far, without the damaged lines of its logs. Raises `FileNotFoundError` if there is no such
    folder, `ValueError` if it holds nothing of a run, or a damaged file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give that of a run, its --output_dir")
    settings, metadata = (
        load_saved(path) for path in (folder / "config.yaml", folder / "run.json")
    )
    lines, samples = (read_json_lines(folder / f"{name}.jsonl") for name in ("metrics", "samples"))
    checkpoints = list_checkpoints(folder)
    if not ("output_dir" in settings or "run_id" in metadata or lines or checkpoints):
        raise ValueError(f"{folder} holds nothing of a run: give the --output_dir of one")
    run = Run(
        folder, folder.resolve().name, settings, metadata, read_status(folder), lines, samples
    )
    for place in (*checkpoints, folder):
        run.evaluated |= read_record(place / "evaluation.json")
    return run

"""The picture of a model card: the loss of a run."""

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from gpt2_accel.runtime.files import atomic_file, read_json_lines

CURVES = {"train/loss": {"linewidth": 0.8, "alpha": 0.5}, "val/loss": {"linewidth": 2}}
SHOWN = 0.97  # of the values: the first ones, from before the loss falls, would flatten the rest


def draw_loss(run_dir: str | Path, path: str | Path) -> None:
    """Draws the training and the validation loss of a run over its tokens, to the PNG file `path`.

    Does nothing without matplotlib or without curves.
    """
    lines = read_json_lines(Path(run_dir) / "metrics.jsonl")
    if find_spec("matplotlib") is None or not lines:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5, 3), layout="constrained", dpi=160)  # legible on a phone too
    ax = figure.subplots()
    values = []
    for name, style in CURVES.items():
        points = [(line["tokens"], line[name]) for line in lines if is_finite(line.get(name))]
        values += [y for _, y in points]
        ax.plot(*np.reshape(points, (-1, 2)).T, label=name, color="#0077bb", **style)
    if values:
        ax.set_ylim(top=np.quantile(values, SHOWN))
    ax.set_xlabel("tokens")
    ax.set_ylabel("nats per token")
    ax.grid(axis="y", linewidth=0.6)
    ax.legend(frameon=False)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", facecolor="white")


def is_finite(value: object) -> bool:
    """Whether a value of `metrics.jsonl` is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)

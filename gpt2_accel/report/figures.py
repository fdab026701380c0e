"""Figures of runs, drawn with matplotlib: for the report, model cards, the README.

Each function returns a `Figure`, whose `savefig` writes PNG; `themed_svg` turns one into SVG that takes its
colours from the page around it.
"""

import io
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.files import atomic_file
from gpt2_accel.report.reader import Run, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours (2008), which colour-blind readers tell apart, those that show on black and white.
COLOURS = ("#0077bb", "#e07b00", "#009e73", "#cc5599", "#56a4e9", "#a68a00")
INK, FAINT = "#202124", "#d5d7db"
AXES = {"tokens": "tokens", "hours": "hours of training", "flops": "FLOPs"}
WIDE, NARROW = (
    5.0,
    3.5,
)  # inches: both legible on a phone; a desktop has two narrow ones side by side
LEAST_SPAN = 0.04  # of a vertical axis, as a share of its values: less is noise


def require_matplotlib() -> None:
    """Raises `ValueError` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'matplotlib>=3.9'")


def new_figure(title: str, width: float = WIDE, height: float = 3.2) -> tuple["Figure", "Axes"]:
    """Creates a figure, sized in inches, and its axes in the report's style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=160)
    ax = figure.subplots()
    ax.set_title(title, loc="left", fontsize=9, color=INK)
    ax.spines[:].set_visible(False)
    ax.spines["bottom"].set(visible=True, color=FAINT)
    ax.tick_params(color=FAINT, labelcolor=INK, labelsize=8, length=3)
    ax.xaxis.label.set(color=INK, fontsize=8)
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.patch.set_visible(False)
    return figure, ax


def add_legend(ax: "Axes") -> None:
    """Adds a legend in the report's style."""
    ax.legend(frameon=False, labelcolor=INK, fontsize=8)


def same_tokens(runs: list[Run]) -> bool:
    """Whether the runs have the same tokenizer, so that losses in nats per token are comparable."""
    known = [run.metadata for run in runs]
    return len({each.get("tokenizer") or each.get("vocab_size") for each in known}) <= 1


def loss_figure(runs: list[Run], axis: str = "tokens", width: float = WIDE) -> "Figure":
    """Training loss, faint, and validation loss, bold, of several runs over one of `AXES`, in nats per token. Where the runs'
    tokenizers differ, only the validation loss, in bits per byte."""
    bold, title = "val/loss", "nats per token: training faint, validation bold"
    if not same_tokens(runs):
        bold, title = "val/bits_per_byte", "validation loss in bits per byte"
    figure, ax = new_figure(title, width)
    shown: list[float] = []
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        if bold == "val/loss":
            shown += plot(ax, run, "train/loss", axis, color=colour, linewidth=0.8, alpha=0.5)
        shown += plot(ax, run, bold, axis, color=colour, linewidth=2)
        ax.plot([], [], color=colour, label=run.name)
    finish_axes(ax, axis, shown)
    add_legend(ax)
    return figure


def metric_figure(runs: list[Run], name: str) -> "Figure":
    """A small chart of a metric of several runs over tokens."""
    training = name.startswith("train/")
    figure, ax = new_figure(name, NARROW, 2.2)
    shown = [0.0] if training else []
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        shown += plot(ax, run, name, "tokens", color=colour, linewidth=1.3)
    finish_axes(ax, "tokens", shown)
    if training:
        ax.set_ylim(bottom=0)
    return figure


def plot(ax: "Axes", run: Run, name: str, axis: str, **style: object) -> list[float]:
    """Draws a metric of a run, with a marker at each of few points; returns the values that the axes should show: without
    the initial fall if it would take more than half of the chart."""
    x, y = run.curve(name, axis)
    ax.plot(x, y, marker="o" if len(x) <= 60 else None, markersize=3, **style)
    rest = y[len(y) // 20 :]
    return rest if y and y[0] > y[-1] and np.ptp(y) > 2 * np.ptp(rest) else y


def draw_loss(run_dir: str | Path, path: str | Path) -> None:
    """Draws the loss curves of a run to the PNG file `path`, legible on a phone too. Does nothing without matplotlib or
    without curves."""
    if find_spec("matplotlib") is not None and (Path(run_dir) / "metrics.jsonl").exists():
        figure = loss_figure([read_run(run_dir)])
        with atomic_file(path) as file:
            figure.savefig(file, format="png", facecolor="white")


def finish_axes(ax: "Axes", axis: str, values: list[float]) -> None:
    """Sets the label and number format of the horizontal axis, and vertical limits that show `values`."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.set_xlabel(AXES[axis])
    ax.xaxis.set_major_formatter(lambda value, _: short_number(value, axis == "flops"))
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = max(high - low, LEAST_SPAN * max(abs(low), abs(high))) or 1.0
    middle = (low + high) / 2
    ax.set_ylim(middle - 0.55 * span, middle + 0.55 * span)
    if high >= 10_000:
        ax.yaxis.set_major_formatter(lambda value, _: short_number(value))


def short_number(value: float, scientific: bool = False) -> str:
    """Formats a number such as 1.5B, 10M, 300k, 20, or with `scientific` 1.5e9."""
    for size, letter in () if scientific else ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}".replace("e+", "e")


def themed_svg(figure: "Figure") -> str:
    """Returns a figure as an `<svg>` element in the colours of the page."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gpt2_accel"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")

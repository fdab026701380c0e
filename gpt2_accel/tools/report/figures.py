"""Figures of runs, drawn with matplotlib: for the report, model cards, the README.

Each function returns a `Figure`, whose `savefig` writes PNG; `themed_svg` turns one into SVG that takes its
colours from the page around it.
"""

import io
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.runtime.files import atomic_file
from gpt2_accel.tools.report.reader import AXES, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours (2008), which colour-blind readers tell apart, those that show on black and white.
COLOURS = ("#0077bb", "#e07b00", "#009e73", "#cc5599", "#56a4e9", "#a68a00")
INK, FAINT = "#202124", "#d5d7db"
WIDTH = 3.5  # inches: legible on a phone; a desktop has two side by side
LEAST_SPAN = 0.04  # of a vertical axis, as a share of its values: less is noise


def require_matplotlib() -> None:
    """Raises `ValueError` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'matplotlib>=3.9'")


def new_figure(title: str, width: float = 5.0, height: float = 3.2) -> tuple["Figure", "Axes"]:
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


def loss_figure(runs: list[Run], axis: str = "tokens") -> "Figure":
    """Training loss, faint, and validation loss, bold, of several runs over one of `AXES`, in nats per token. Where the runs'
    tokenizers differ, only the validation loss, in bits per byte."""
    lines = {"train/loss": {"linewidth": 0.8, "alpha": 0.5}, "val/loss": {"linewidth": 2}}
    title = "nats per token: training faint, validation bold"
    if not same_tokens(runs):
        lines, title = {"val/bits_per_byte": {"linewidth": 2}}, "validation loss in bits per byte"
    figure = chart(runs, title, lines, axis, height=3.2)
    add_legend(figure.axes[0])
    return figure


def chart(
    runs: list[Run],
    title: str,
    lines: Mapping[str, Mapping],
    axis: str = "tokens",
    height: float = 2.2,
) -> "Figure":
    """Draws metrics of several runs over one of `AXES`, with a marker at each of few points. `lines` holds the style of each
    metric.

    The axes do not show the initial fall of a curve if it would take more than half of the chart; those of training begin
    with 0.
    """
    figure, ax = new_figure(title, WIDTH, height)
    from_zero = title.startswith("train/")
    shown = [0.0] if from_zero else []
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        for name, style in lines.items():
            x, y = run.curve(name, axis)
            marker = "o" if len(x) <= 60 else None
            ax.plot(x, y, marker=marker, markersize=3, color=colour, **style)
            rest = y[len(y) // 20 :]
            falls = y and y[0] > y[-1] and np.ptp(y) > 2 * np.ptp(rest)
            shown += rest if falls else y
        ax.plot([], [], color=colour, label=run.name)
    finish_axes(ax, axis, shown)
    if from_zero:
        ax.set_ylim(bottom=0)
    return figure


def save_png(figure: "Figure", path: str | Path) -> None:
    """Writes a figure as a PNG file."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png", facecolor="white")


def finish_axes(ax: "Axes", axis: str, values: list[float]) -> None:
    """Sets the label and number format of the horizontal axis, and vertical limits that show `values`."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.set_xlabel(AXES[axis][0])
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

"""Figures of runs, drawn with matplotlib: for the report, model cards, the README.

Each function returns a `Figure`, whose `savefig` writes PNG; `themed_svg` turns one into SVG that takes its
colours from the page around it.
"""

import io
import math
import re
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.files import atomic_file
from gpt2_accel.report.names import in_words
from gpt2_accel.report.reader import Run, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours (2008), which colour-blind readers tell apart, those that show on black and white.
COLOURS = ("#0077bb", "#e07b00", "#009e73", "#cc5599", "#56a4e9", "#a68a00")
INK, FAINT = "#202124", "#d5d7db"
AXES = {"tokens": "tokens", "hours": "hours of training", "flops": "FLOPs"}
WIDE, NARROW = 8, 4  # inches: figures for a desktop and a PNG, and for a phone
LEAST_SPAN = 0.04  # of a vertical axis, as a share of its values: less is noise


def require_matplotlib() -> None:
    """Raises `ValueError` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'matplotlib>=3.9'")


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1):
    """Creates a figure, sized in inches, and its axes, (rows, columns), in the report's style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=160)
    figure.get_layout_engine().set(h_pad=0.1)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[:].set_visible(False)
        ax.spines["bottom"].set(visible=True, color=FAINT)
        ax.tick_params(color=FAINT, labelcolor=INK, labelsize=8, length=3)
        ax.xaxis.label.set(color=INK, fontsize=8)
        ax.yaxis.label.set(color=INK, fontsize=8)
        ax.grid(axis="y", color=FAINT, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.patch.set_visible(False)
    return figure, axes


def set_title(ax: "Axes", text: str) -> None:
    """Sets the title above a figure's axes."""
    ax.set_title(text, loc="left", fontsize=9, color=INK)


def same_tokens(runs: list[Run]) -> bool:
    """Whether the runs have the same tokenizer, so that losses in nats per token are comparable."""
    known = [run.metadata for run in runs]
    return len({each.get("tokenizer") or each.get("vocab_size") for each in known}) <= 1


def loss_figure(runs: list[Run], axis: str = "tokens", width: float = WIDE) -> "Figure":
    """Training loss, faint, its moving average, thin, and validation loss, bold, of several runs over one of `AXES`, in nats
    per token. Where the runs' tokenizers differ, only the validation loss, in bits per byte."""
    nats = same_tokens(runs)
    figure, [[ax]] = new_figure(width, 4.2 if width == WIDE else 3.2)
    shown = []
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        x, y = run.curve("train/loss", axis) if nats else ([], [])
        ax.plot(x, y, color=colour, linewidth=0.7, alpha=0.35)
        bold_x, bold_y = run.curve("val/loss" if nats else "val/bits_per_byte", axis)
        # The legend names what is drawn: the validation loss, or else the training loss.
        thin = {"label": run.name if x and not bold_x else None, "linewidth": 1}
        plot(ax, x, smoothed(y), 1, color=colour, markersize=2.5, **thin)
        bold = {"label": run.name if bold_x else None, "linewidth": 2.2}
        plot(ax, bold_x, bold_y, color=colour, markersize=4, **bold)
        shown += settled(y) + settled(bold_y)
    title = "loss in nats per token: training faint, its moving average thin, validation bold"
    if not nats:
        title = "validation loss in bits per byte, as the tokenizers differ"
    finish_axes(ax, axis, title if width == WIDE else title.replace(": ", ":\n"), shown)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, loc="upper right", labelcolor=INK, fontsize=9)
    return figure


def plot(ax: "Axes", x: list[float], y: list[float], most: int = 60, **style: object) -> None:
    """Draws a curve, with a marker at each point if there are at most `most`."""
    ax.plot(x, y, marker="o" if len(x) <= most else None, **style)


def draw_loss(run_dir: str | Path, path: str | Path) -> None:
    """Draws the loss curves of a run to the PNG file `path`, legible on a phone too. Does nothing without matplotlib or
    without curves."""
    if find_spec("matplotlib") is not None and (Path(run_dir) / "metrics.jsonl").exists():
        figure = loss_figure([read_run(run_dir)], width=NARROW)
        with atomic_file(path) as file:
            figure.savefig(file, format="png", facecolor="white")


def metrics_figure(runs: list[Run], names: list[str], width: float = WIDE) -> "Figure":
    """Draws small charts over tokens, one per metric, of several runs; two side by side if there is room."""
    columns = 2 if width == WIDE else 1
    rows = math.ceil(len(names) / columns)
    figure, axes = new_figure(width, 2.3 * rows, rows, columns)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    for ax, name in zip(axes.flat, names, strict=False):
        training = name.startswith("train/")
        shown = [0.0] if training else []
        for run, colour in zip(runs, cycle(COLOURS), strict=False):
            x, y = run.curve(name, "tokens")
            shown += y if training else settled(y)
            plot(ax, x, y, 1 if training else 60, color=colour, linewidth=1.3, markersize=3)
        finish_axes(ax, "tokens", in_words(name.removeprefix("train/")), shown)
        if training:
            ax.set_ylim(bottom=0)
    return figure


def settled(y: list[float]) -> list[float]:
    """Returns the values without the initial fall if it would take more than half of the chart."""
    rest = y[len(y) // 20 :]
    return rest if y and y[0] > y[-1] and np.ptp(y) > 2 * np.ptp(rest) else y


def finish_axes(ax: "Axes", axis: str, title: str, values: list[float]) -> None:
    """Sets the title, the label and number format of the horizontal axis, and vertical limits that show `values`."""
    from matplotlib.ticker import MaxNLocator

    set_title(ax, title)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(5))
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


def smoothed(y: list[float]) -> list[float]:
    """Returns the centred moving average over 1/40 of the points on either side."""
    window = np.ones(2 * (len(y) // 40) + 1)
    if len(window) == 1:
        return y
    return (np.convolve(y, window, "same") / np.convolve(np.ones(len(y)), window, "same")).tolist()


def themed_svg(figure: "Figure", width: float = WIDE) -> str:
    """Returns a figure for a page of `width` inches as an `<svg>` element without ids, in the colours of the page."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gpt2_accel"}):
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' height="[\d.]+pt"', "", svg, count=1)
    style = f'style="max-width: {figure.get_figwidth() / width:.0%}"'
    svg = re.sub(r'width="[\d.]+pt"', style, svg, count=1)
    return svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")

"""Figures of runs and of attention, drawn with matplotlib: for the report, model cards, the README.

Each function returns a `Figure`, whose `savefig` writes PNG; `themed_svg` turns one into SVG that takes its
colours from the page around it.
"""

import io
import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from gpt2_accel.files import atomic_file
from gpt2_accel.models import LanguageModel, evaluating
from gpt2_accel.report.names import in_words
from gpt2_accel.report.reader import Run, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours (2008), which colour-blind readers tell apart, those that show on black and white.
COLOURS = ("#0077bb", "#e07b00", "#009e73", "#cc5599", "#56a4e9", "#a68a00")
INK, FAINT = "#202124", "#d5d7db"
AXES = {
    "tokens": "tokens",
    "minutes": "minutes of training",
    "hours": "hours of training",
    "flops": "FLOPs",
}
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
WIDE, NARROW = 8, 4  # inches: figures for a desktop and a PNG, and for a phone
MOST_POINTS = 1000  # of one curve
LEAST_SPAN = 0.04  # of a vertical axis, as a share of its values: less is noise


def require_matplotlib() -> None:
    """Raises `ValueError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install 'matplotlib>=3.9'") from error


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
    return len({run.tokenizer for run in runs}) <= 1


def loss_figure(runs: list[Run], axis: str = "tokens", width: float = WIDE) -> "Figure":
    """Training loss, faint, its moving average, thin, and validation loss, bold, of several runs over one of `AXES`: in
    nats per token, or in bits per byte where the runs' tokenizers differ. The training loss is then by the bytes per
    token of the validation data.
    """
    nats = same_tokens(runs)
    validation = "val/loss" if nats else "val/bits_per_byte"
    figure, [[ax]] = new_figure(width, 4.2 if width == WIDE else 3.2)
    shown = []
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        bold_x, bold_y = run.curve(validation, axis)
        x, y = thinned(*run.curve("train/loss", axis))
        if not nats:
            unit = run.bits_per_byte
            x, y = (x, [value * unit for value in y]) if unit else ([], [])
        ax.plot(x, y, color=colour, linewidth=0.7, alpha=0.35)
        style = {"linewidth": 1, "marker": "o" if len(x) == 1 else None, "markersize": 2.5}
        # The legend names what is drawn: the validation loss, or else the training loss.
        style["label"] = run.name if x and not bold_x else None
        ax.plot(x, smoothed(y), color=colour, gid=f"{run.name}, training", **style)
        style = {"linewidth": 2.2, "marker": "o" if len(bold_x) <= 60 else None, "markersize": 4}
        style["label"] = run.name if bold_x else None
        ax.plot(bold_x, bold_y, color=colour, gid=f"{run.name}, validation", **style)
        shown += settled(y) + settled(bold_y)
    shown += draw_gpt2_line(ax, runs, validation)
    unit = "nats per token" if nats else "bits per byte, as the tokenizers differ"
    colon = ": " if width == WIDE else ":\n"
    lines = "training faint, its moving average thin, validation bold"
    finish_axes(ax, axis, f"loss in {unit}{colon}{lines}", shown)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, loc="upper right", labelcolor=INK, fontsize=9)
    return figure


def draw_loss(run_dir: str | Path, path: str | Path) -> None:
    """Draws the loss curves of a run to the PNG file `path`, legible on a phone too. Does nothing without matplotlib or
    without curves."""
    if find_spec("matplotlib") is not None and (Path(run_dir) / "metrics.jsonl").exists():
        figure = loss_figure([read_run(run_dir)], width=NARROW)
        with atomic_file(path) as file:
            figure.savefig(file, format="png", facecolor="white")


def metrics_figure(
    runs: list[Run], names: list[str], axis: str = "tokens", width: float = WIDE
) -> "Figure":
    """Draws small charts, one per metric, of several runs; two side by side if there is room."""
    columns = 2 if width == WIDE else 1
    rows = math.ceil(len(names) / columns)
    figure, axes = new_figure(width, 2.3 * rows, rows, columns)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    for ax, name in zip(axes.flat, names, strict=False):
        training = name.startswith("train/")
        shown = [0.0] if training else []
        for run, colour in zip(runs, cycle(COLOURS), strict=False):
            x, y = thinned(*run.curve(name, axis))
            shown += y if training else settled(y)
            marker = "o" if len(x) <= (1 if training else 60) else None
            style = {"marker": marker, "markersize": 3, "gid": run.name}
            ax.plot(x, y, color=colour, linewidth=1.3, **style)
        if gpt2 := draw_gpt2_line(ax, runs, name):
            ax.legend(frameon=False, loc="best", labelcolor=INK, fontsize=8)
        shown += gpt2
        finish_axes(ax, axis, in_words(name.removeprefix("train/")), shown)
        if training:
            ax.set_ylim(bottom=0)
    return figure


def settled(y: list[float]) -> list[float]:
    """Returns the values without the initial fall if it would take more than half of the chart."""
    rest = y[len(y) // 20 :]
    return rest if y and y[0] > y[-1] and span(y) > 2 * span(rest) else y


def span(values: list[float]) -> float:
    """Returns the difference between the highest and the lowest finite value."""
    finite = [value for value in values if math.isfinite(value)]
    return max(finite, default=0.0) - min(finite, default=0.0)


def finish_axes(ax: "Axes", axis: str, title: str, values: list[float]) -> None:
    """Sets the title, the label and number format of the horizontal axis, and vertical limits that show `values`."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    set_title(ax, title)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.set_xlabel(AXES[axis])
    if axis == "tokens":
        ax.xaxis.set_major_formatter(lambda value, _: short_number(value))
    elif axis == "flops":
        power = 3 * math.floor(math.log10(ax.get_xlim()[1]) / 3)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value / 10.0**power:.4g}")
        ax.set_xlabel(f"training compute in 10{str(power).translate(SUPERSCRIPT)} FLOPs")
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    span = max(high - low, LEAST_SPAN * max(abs(low), abs(high))) or 1.0
    middle = (low + high) / 2
    ax.set_ylim(middle - 0.55 * span, middle + 0.55 * span)
    if high >= 10_000:
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))


def draw_gpt2_line(ax: "Axes", runs: list[Run], name: str) -> list[float]:
    """Draws GPT-2's value of a metric, labelled for the legend, if it applies to all runs with that metric; returns it."""
    lines = {run.gpt2_line(name) for run in runs if run.last(name) is not None}
    drawn = [line for line in lines if line and len(lines) == 1]
    for value, source in drawn:
        label = f"GPT-2 124M: {value:.4g} ({source})"
        ax.axhline(value, color=INK, linewidth=1, linestyle=(0, (4, 3)), label=label)
    return [value for value, _ in drawn]


def short_number(value: float) -> str:
    """Formats a number such as 1.5B, 10M, 300k, 20."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def thinned(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """Returns at most `MOST_POINTS` evenly spaced points, including the last."""
    step = math.ceil(len(x) / MOST_POINTS) or 1
    return x[::-step][::-1], y[::-step][::-1]


def smoothed(y: list[float]) -> list[float]:
    """Returns the centred moving average over 1/40 of the points on either side, ignoring values that are not finite."""
    reach = len(y) // 40
    if not reach:
        return y
    finite, window = np.isfinite(y), np.ones(2 * reach + 1)
    sums = np.convolve(np.where(finite, y, 0), window, "same")
    return (sums / np.maximum(np.convolve(finite, window, "same"), 1)).tolist()


class AttentionRecorder(TorchFunctionMode):
    """Collects the attention weights of each call of `F.scaled_dot_product_attention`, (B, H, T, T), which computes
    them but does not return them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            q, k = args[0].float(), args[1].float()  # (B, H, T, D)
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # grouped-query attention
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            self.found.append(scores.masked_fill(later, -math.inf).softmax(dim=-1))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def attention_weights(model: LanguageModel, input_ids: torch.Tensor) -> torch.Tensor:
    """How much each position attends to each before it: input_ids (1, T) -> (n_layer, n_head, T, T).

    Each row sums to 1. Works for any model that computes causal attention by `F.scaled_dot_product_attention`.
    """
    with evaluating(model), AttentionRecorder() as recorder:
        model(input_ids)
    return torch.cat(recorder.found)


def attention_figure(weights: torch.Tensor, width: float = WIDE) -> "Figure":
    """Draws all heads as small images, a row per layer and a column per head; darker means more attention.

    weights: (L, H, T, T)."""
    L, H, T, _ = weights.shape
    side = min(1.3, (width - 0.8) / H)  # inches
    figure, axes = new_figure(side * H + 0.8, side * L + 0.6, L, H)
    from matplotlib.colors import to_rgb

    for (layer, head), ax in np.ndenumerate(axes):
        share = weights[layer, head].cpu().numpy()
        # By opacity, for light and dark pages. The square root makes small shares visible.
        opacity = np.where(np.tri(T, dtype=bool), 0.06 + 0.94 * np.sqrt(share), 0.0)
        ax.imshow(np.dstack((*(np.full((T, T), c) for c in to_rgb(COLOURS[0])), opacity)))
        ax.set(xticks=[], yticks=[])
        ax.grid(False)
        ax.spines["bottom"].set_visible(False)
        if layer == L - 1:
            ax.set_xlabel(f"head {head}" if side > 0.6 else str(head))
        if head == 0:
            ax.set_ylabel(f"layer {layer}" if side > 0.6 else str(layer))
    return figure


def chart_data(figure: "Figure") -> list[dict]:
    """Where the axes of a drawn figure with curves lie, in shares of its size from the upper left, and their
    curves: what the report shows under the pointer."""
    charts = []
    for ax in figure.axes:
        lines = [
            {
                "name": line.get_gid(),
                "colour": line.get_color(),
                "x": rounded(line.get_xdata()),
                "y": rounded(line.get_ydata()),
            }
            for line in ax.get_lines()
            if line.get_gid() and len(line.get_xdata())
        ]
        if lines:
            place, (low, high) = ax.get_position(), ax.get_xlim()
            edges = {
                "left": place.x0,
                "right": place.x1,
                "top": 1 - place.y1,
                "bottom": 1 - place.y0,
            }
            charts.append({**edges, "from": low, "to": high, "lines": lines})
    return charts


def rounded(values: Sequence[float]) -> list[float | None]:
    """Rounds to five digits; values that are not finite become None, since JSON lacks them."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in map(float, values)]


def themed_svg(figure: "Figure", width: float = WIDE) -> str:
    """Returns a figure for a page of `width` inches as an `<svg>` element without ids, in the colours of the page."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gpt2_accel"}):
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' height="[\d.]+pt"', "", svg, count=1)
    width = f'style="max-width: {figure.get_figwidth() / width:.0%}"'
    svg = re.sub(r'width="[\d.]+pt"', width, svg, count=1)
    return svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")

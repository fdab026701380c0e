"""Figures of runs: for the report, the README.

Each function returns a `Figure`, whose `savefig` writes PNG; `themed_svg` turns one into SVG that takes its
colours from the page around it.
"""

import io
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import cycle
from typing import TYPE_CHECKING

from gpt2_accel.hf.loss_plot import COLOURS, FAINT, INK, LOSS_STYLES, LOSSES, chart
from gpt2_accel.hf.loss_plot import new_figure as new_figure
from gpt2_accel.hf.loss_plot import save_png as save_png
from gpt2_accel.hf.loss_plot import short_number as short_number
from gpt2_accel.tools.report.reader import AXES, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Raises `ValueError` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'matplotlib>=3.9'")


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
    styles, title = LOSS_STYLES, LOSSES
    if not same_tokens(runs):
        styles, title = {"val/bits_per_byte": {"linewidth": 2}}, "validation loss in bits per byte"
    figure = metric_figure(runs, title, styles, axis, height=3.2)
    add_legend(figure.axes[0])
    return figure


def metric_figure(
    runs: list[Run],
    title: str,
    styles: Mapping[str, Mapping],
    axis: str = "tokens",
    height: float = 2.2,
) -> "Figure":
    """Draws metrics of several runs over one of `AXES`. `styles` holds the properties of each metric's lines. The vertical
    axes of training begin with 0."""
    curves = []
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        for name, style in styles.items():
            curves.append((*run.curve(name, axis), dict(style, color=colour)))
        curves.append(([], [], {"label": run.name, "color": colour}))
    from_zero = title.startswith("train/")
    return chart(title, AXES[axis][0], curves, height=height, from_zero=from_zero)


def themed_svg(figure: "Figure") -> str:
    """Returns a figure as an `<svg>` element in the colours of the page."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gpt2_accel"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")

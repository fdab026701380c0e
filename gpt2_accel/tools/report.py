"""The report of one or more runs: one HTML file that needs no network, and its figures as PNGs.

It shows the content of a run's folder so far.
"""

import io
from collections.abc import Iterable
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment

from gpt2_accel.charts import curve_points, outcome
from gpt2_accel.checkpoint.find import list_checkpoints, read_status
from gpt2_accel.config import TrainConfig
from gpt2_accel.evals.formulas import number
from gpt2_accel.evals.results import read_record, rows_of
from gpt2_accel.runtime.files import atomic_files, duration, read_json_lines
from gpt2_accel.runtime.options import load_saved

# Adapted from Okabe and Ito (2008) and Paul Tol: colour-blind readers can tell them apart, on black
# and on white.
COLOURS = ("#0077bb", "#e07b00", "#009e73", "#cc5599", "#56a4e9", "#a68a00")
INK = "#202124"
FAINT = "#d5d7db"
HEIGHT = 2.2  # inches, with a width of 3.5 legible on a phone; a desktop has two side by side
# Horizontal axes: label, key in `metrics.jsonl`, and factor, None for the run's FLOPs per token.
AXES = {
    "tokens": ("tokens", "tokens", 1),
    "hours": ("hours of training", "train/seconds", 1 / 3600),
    "flops": ("FLOPs", "tokens", None),
}
# Endings of metrics that depend on the tokenizer.
PER_TOKEN = ("/loss", "/perplexity", "/perplexity_per_token")
# Endings of metrics without a curve of their own: functions of the loss, and times.
DRAWN = (*PER_TOKEN, "/bits_per_byte", "/seconds")


class RunFolder:
    """The content of a run's folder so far; an attribute is empty if its file is missing.

    `settings` is `config.yaml`; `metadata` is `run.json`; `status` is `status.json`; `lines` and
    `samples` are the undamaged lines of `metrics.jsonl` and `samples.jsonl`; `newest` is the newest
    value of each metric, also of `evaluation.json` in the checkpoints and in the folder.

    Raises `FileNotFoundError` if the folder does not exist, `ValueError` if it is not the folder of
    a run, or a file is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder: give the --output_dir of a run")
        self.name = folder.resolve().name
        self.settings = load_saved(folder / "config.yaml")
        self.metadata = load_saved(folder / "run.json")
        self.status = read_status(folder)
        self.lines = read_json_lines(folder / "metrics.jsonl")
        self.samples = read_json_lines(folder / "samples.jsonl")
        checkpoints = list_checkpoints(folder)
        known = "output_dir" in self.settings or "run_id" in self.metadata
        if not (known or self.lines or checkpoints):
            raise ValueError(f"{folder} does not contain a run: give the --output_dir of a run")
        self.newest: dict[str, Any] = {}
        for line in self.lines:
            self.newest |= line
        for place in chain(checkpoints, [folder]):
            for entry in read_record(place / "evaluation.json").values():
                self.newest |= entry["results"]

    def curve(self, name: str, axis: str) -> tuple[list[float], list[float]]:
        """Returns (x, y) of a metric's finite values over one of `AXES`; empty if the FLOPs per
        token are needed and unknown."""
        _, key, factor = AXES[axis]
        factor = factor or self.metadata.get("flops_per_token")
        if not factor:
            return [], []
        return curve_points(self.lines, name, key, factor)


def write_report(runs: list[RunFolder], folder: str | Path) -> Path:
    """Writes `report.html` and its figures as PNGs to `folder`; returns the path of the HTML
    file."""
    document, pictures = report_of(runs)
    with atomic_files(folder) as scratch:
        (scratch / "report.html").write_text(document, encoding="utf-8")
        for name, figure in pictures.items():
            figure.savefig(scratch / f"{name}.png", facecolor="white")
    return Path(folder) / "report.html"


def report_of(runs: list[RunFolder]) -> tuple[str, dict[str, Any]]:
    """Returns the report as HTML, and its figures by file name without suffix.

    It has a section for each text for validation: numbers on different texts are not comparable.
    """
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.folder)
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        groups.setdefault(run.metadata.get("validation", ""), []).append(run)
    sections: list[tuple] = []
    pictures: dict[str, Any] = {}
    for group in groups.values():
        metrics = comparable(group)
        figures = draw(group, metrics, f"{len(sections) + 1}-" if sections else "")
        pictures |= figures
        results = rows_of([{x: number(run.newest, x) for x in metrics} for run in group])
        sections.append((group, figures, results))
    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string(source)
    document = template.render(
        runs=runs,
        sections=sections,
        settings=rows_of([run.settings for run in runs]),
        usual=TrainConfig().settings(),
        axes=AXES,
        duration=duration,
        outcome=outcome,
        svg=themed_svg,
    )
    return document, pictures


def same_tokenizer(runs: list[RunFolder]) -> bool:
    """Whether the runs have the same tokenizer, so that losses in nats per token are comparable."""
    return len({run.metadata.get("tokenizer") for run in runs}) <= 1


def comparable(runs: list[RunFolder]) -> list[str]:
    """Returns the names of the runs' metrics, except training metrics and standard errors, and
    except per-token metrics if the tokenizers differ."""
    left_out = () if same_tokenizer(runs) else PER_TOKEN
    found = dict.fromkeys(chain.from_iterable(run.newest for run in runs))
    return [
        name
        for name in found
        if "/" in name
        and "_stderr" not in name
        and not name.startswith("train/")
        and not name.endswith(left_out)
    ]


def draw(runs: list[RunFolder], metrics: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Returns figures by file name: the loss over each of `AXES`, and `metrics` and training
    metrics over tokens, except `DRAWN`. Skips figures of fewer than two values. If the tokenizers
    differ, the loss is in bits per byte."""
    styles: dict[str, dict[str, Any]]
    if same_tokenizer(runs):
        title = "nats per token: training faint, validation bold"
        styles = {"train/loss": {"linewidth": 0.8, "alpha": 0.5}, "val/loss": {"linewidth": 2}}
    else:
        title = "validation loss in bits per byte"
        styles = {"val/bits_per_byte": {"linewidth": 2}}
    figures = {f"{prefix}loss-over-{axis}": draw_one(runs, title, styles, axis) for axis in AXES}
    training = [name for name in runs[0].newest if name.startswith("train/")]
    for name in chain(metrics, training):
        if not name.endswith(DRAWN):
            figure = draw_one(runs, name, {name: {"linewidth": 1.3}}, "tokens", 3.5)
            figures[prefix + name.replace("/", "-")] = figure
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_one(
    runs: list[RunFolder], title: str, styles: dict[str, dict], axis: str, width: float = 5
) -> Any | None:
    """Draws metrics, by their styles, of all runs over one of `AXES`, `width` inches wide; returns
    a `Figure` of matplotlib, None for fewer than two values. Curves of few points have markers.

    The vertical axis leaves out values in the first twentieth of a curve that are above the rest.
    """
    from matplotlib.figure import Figure  # takes half a second
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(width, HEIGHT), layout="constrained", dpi=160)
    ax = figure.subplots()
    longest = 0
    bottom = []
    top = []
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        for name, style in styles.items():
            x, y = run.curve(name, axis)
            marker = "o" if len(x) <= 60 else None
            ax.plot(x, y, color=colour, marker=marker, markersize=3, **style)
            longest = max(longest, len(y))
            bottom += y
            top += y[len(y) // 20 :]
        ax.plot([], [], color=colour, label=run.name)
    if longest < 2:
        return None
    margin = 0.05 * (max(top) - min(bottom)) or 1.0
    ax.set_ylim(min(bottom) - margin, max(top) + margin)
    ax.set_xlim(left=0)
    ax.set_title(title, loc="left", fontsize=9, color=INK, parse_math=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(color=FAINT, labelcolor=INK, labelsize=8)
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    ax.set_xlabel(AXES[axis][0], color=INK, fontsize=8)
    ax.locator_params("x", nbins=4)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure


def themed_svg(figure: Any) -> str:
    """Returns a figure as an `<svg>` element in the colours of the page."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")

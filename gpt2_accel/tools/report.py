"""The report of one run or several: one HTML file that needs no network, and its pictures as PNGs.

Draws what a run's folder has so far, of release 0.3 and later.
"""

import io
from collections.abc import Iterable
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

from gpt2_accel.checkpoint.find import list_checkpoints, read_status
from gpt2_accel.estimate.flops import duration
from gpt2_accel.evals.results import read_record, rows_of
from gpt2_accel.hf.loss_plot import (
    COLOURS,
    FAINT,
    INK,
    LOSS_STYLES,
    LOSSES,
    add_legend,
    chart,
    require_matplotlib,
    values,
)
from gpt2_accel.runtime.files import atomic_files, number, read_json_lines
from gpt2_accel.runtime.options import load_saved
from gpt2_accel.tokenizer import GPT2_FINGERPRINT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The horizontal axes: a label, a key of `metrics.jsonl`, and its unit, None for a run's FLOPs per
# token.
AXES = {
    "tokens": ("tokens", "tokens", 1),
    "hours": ("hours of training", "train/seconds", 1 / 3600),
    "flops": ("FLOPs", "tokens", None),
}
TRAINING = ("learning_rate", "grad_norm", "tokens_per_second", "mfu", "memory_gb")
METADATA = ("parameters", "data", "hardware", "git_commit")  # of `run.json`
# Endings of metrics that depend on the tokenizer.
PER_TOKEN = ("/loss", "/perplexity", "/perplexity_per_token")

# Results of OpenAI's models with GPT-2's tokens: on OpenWebText, in nanoGPT's README.md, and on
# HellaSwag's validation set, in build-nanogpt's hellaswag.py and play.ipynb.
PUBLISHED = {
    "val/loss": {"GPT-2 124M": 3.12, "350M": 2.84, "774M": 2.67, "1558M": 2.54},
    "hellaswag/acc_norm_per_token": {"GPT-2 124M": 0.2955, "GPT-3 124M": 0.337},
}
PUBLISHED_STYLE = {"color": INK, "linestyle": ":", "linewidth": 0.8, "marker": ""}


class Run:
    """A run's folder as it is so far; what is missing is empty.

    `lines` and `samples` are those of `metrics.jsonl` and `samples.jsonl`, without damaged ones;
    `metadata` is `run.json`; `status` is `status.json`; `evaluated` has the results in
    `evaluation.json`, the run's own and those of its checkpoints.

    Raises `FileNotFoundError` if there is no such folder, `ValueError` if it holds nothing of a
    run, or a damaged file.
    """

    def __init__(self, folder: str | Path):
        self.folder = folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not a folder: give that of a run, its --output_dir"
            )
        self.name = folder.resolve().name
        self.settings = load_saved(folder / "config.yaml")
        self.metadata = load_saved(folder / "run.json")
        self.status = read_status(folder)
        self.lines = read_json_lines(folder / "metrics.jsonl")
        self.samples = read_json_lines(folder / "samples.jsonl")
        checkpoints = list_checkpoints(folder)
        known = "output_dir" in self.settings or "run_id" in self.metadata
        if not (known or self.lines or checkpoints):
            raise ValueError(f"{folder} holds nothing of a run: give the --output_dir of one")
        self.evaluated = []
        for place in chain(checkpoints, [folder]):
            entries = read_record(place / "evaluation.json").values()
            self.evaluated += [entry["results"] for entry in entries]

    def newest(self) -> dict[str, Any]:
        """Returns the newest value of each metric, those of evaluations included."""
        found: dict[str, Any] = {}
        for line in chain(self.lines, self.evaluated):
            found |= line
        return found

    def curve(self, name: str, axis: str) -> tuple[list[float], list[float]]:
        """Returns (x, y) of a metric's finite values over an axis of `AXES`; empty where one is
        unknown."""
        _, key, unit = AXES[axis]
        unit = unit or self.metadata.get("flops_per_token")
        return values(self.lines, name, key, unit) if unit else ([], [])


def write_report(runs: list[Run], folder: str | Path) -> Path:
    """Writes `report.html` and the PNGs of its pictures to `folder`; returns the path of the HTML
    file.

    Raises `ValueError` if matplotlib is missing."""
    require_matplotlib()
    document, pictures = report_of(runs)
    with atomic_files(folder) as scratch:
        (scratch / "report.html").write_text(document, encoding="utf-8")
        for name, figure in pictures.items():
            figure.savefig(scratch / f"{name}.png", facecolor="white")
    return Path(folder) / "report.html"


def report_of(runs: list[Run]) -> tuple[str, dict[str, "Figure"]]:
    """Returns the report of runs as HTML, and its figures by file name."""
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.folder)
    metrics = comparable(runs)
    columns = []
    for run in runs:
        newest = run.newest()
        columns.append(facts(run) | {name: number(newest, name) for name in metrics})
    settings = rows_of([run.settings for run in runs])
    if len(runs) > 1:
        settings = {name: cells for name, cells in settings.items() if len(set(cells)) > 1}
    figures = draw(runs, metrics)
    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string(source)
    document = template.render(
        runs=runs,
        facts=rows_of(columns),
        figures=figures,
        settings=settings,
        svg=themed_svg,
    )
    return document, figures


def facts(run: Run) -> dict[str, Any]:
    """Returns a run's metadata and progress by title; the state is such as `stopped at update 120:
    SIGTERM`."""
    state = ""
    if run.status:
        state = f"{run.status['state']} at update {run.status['step']:,}"
        if run.status.get("reason"):
            state += f": {run.status['reason']}"
    tokens, hours, flops = (max(run.curve("step", axis)[0], default=0) for axis in AXES)
    found = {
        "state": state,
        "tokens": f"{tokens:,}",
        "training": duration(hours * 3600),
        "FLOPs": f"{flops:.3g}",
    }
    for name in METADATA:
        found[name] = run.metadata.get(name) or ""
    found["changes"] = "; ".join(run.metadata.get("changes", []))
    return found


def same_tokens(runs: list[Run]) -> bool:
    """Whether the runs have the same tokenizer, so that losses in nats per token are comparable."""
    known = [run.metadata for run in runs]
    return len({each.get("tokenizer") or each.get("vocab_size") for each in known}) <= 1


def published(runs: list[Run], name: str) -> dict[str, float]:
    """Returns OpenAI's results of a metric, by model; empty unless all runs have the same tokens
    and data."""
    for run in runs:
        data = "openwebtext" in run.metadata.get("data", "").lower()
        if name != "val/loss":
            data = not run.settings.get("hellaswag_data")
        if not data or run.metadata.get("tokenizer") != GPT2_FINGERPRINT:
            return {}
    return PUBLISHED.get(name, {})


def comparable(runs: list[Run]) -> list[str]:
    """Returns the names of the runs' metrics other than those of training and standard errors, and
    without per-token metrics if the tokenizers differ."""
    left_out = ["_stderr"]
    if not same_tokens(runs):
        left_out += PER_TOKEN
    newest: dict[str, object] = {}
    for run in runs:
        newest |= run.newest()
    names = [name for name in newest if "/" in name and not name.startswith("train/")]
    return [name for name in names if not name.endswith(tuple(left_out))]


def draw(runs: list[Run], metrics: Iterable[str]) -> dict[str, "Figure"]:
    """Draws the loss over each of `AXES`, then `metrics` and those of `TRAINING` over tokens;
    returns the figures by file name. Leaves out what has fewer than two values. If the tokenizers
    differ, the loss is in bits per byte."""
    if same_tokens(runs):
        title = LOSSES
        styles = LOSS_STYLES
    else:
        title = "validation loss in bits per byte"
        styles = {"val/bits_per_byte": {"linewidth": 2}}
    plots: dict[str, tuple[str, dict[str, dict], str]] = {}
    for axis in AXES:
        plots["loss" if axis == "tokens" else f"loss-over-{axis}"] = (title, styles, axis)
    training = [f"train/{name}" for name in TRAINING]
    for name in list(metrics) + training:
        plots[name.replace("/", "-")] = (name, {name: {"linewidth": 1.3}}, "tokens")
    figures = {}
    for file, (title, styles, axis) in plots.items():
        figure = draw_one(runs, title, styles, axis, legend=file.startswith("loss"))
        if figure is not None:
            figures[file] = figure
    return figures


def draw_one(
    runs: list[Run], title: str, styles: dict[str, dict], axis: str, legend: bool
) -> "Figure | None":
    """Draws metrics, by their styles, of all runs over one of `AXES`, and OpenAI's results; returns
    None for fewer than two values. OpenAI's results have a legend, too."""
    curves = []
    known: dict[str, Any] = {}
    for name, style in styles.items():
        known |= published(runs, name)
        for run, colour in zip(runs, cycle(COLOURS), strict=False):
            x, y = run.curve(name, axis)
            curves.append((x, y, dict(style, color=colour)))
    if max(len(x) for x, _, _ in curves) < 2:
        return None
    end = max(x[-1] for x, _, _ in curves if x)
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        curves.append(([], [], {"label": run.name, "color": colour}))
    for model, y in known.items():
        curves.append(([0, end], [y, y], PUBLISHED_STYLE | {"label": f"{model}: {y}"}))
    figure = chart(title, AXES[axis][0], curves)
    if legend or known:
        figure.set_figheight(3.2)
        add_legend(figure.axes[0])
    return figure


def themed_svg(figure: "Figure") -> str:
    """Returns a figure as an `<svg>` element in the colours of the page."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")

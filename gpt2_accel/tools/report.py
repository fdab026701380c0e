"""The report of one run or several: one HTML file that needs no network, and its pictures as PNGs.

Draws what a run's folder has so far, of release 0.3 and later.
"""

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment

from gpt2_accel.checkpoint.find import list_checkpoints, read_status
from gpt2_accel.estimate.flops import duration
from gpt2_accel.evals.results import number, read_record, result_rows, rows_of
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
from gpt2_accel.runtime.files import atomic_files, read_json_lines
from gpt2_accel.runtime.options import load_saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The horizontal axes: a label, a key of `metrics.jsonl`, and its unit, None for a run's FLOPs per token.
AXES = {
    "tokens": ("tokens", "tokens", 1),
    "hours": ("hours of training", "train/seconds", 1 / 3600),
    "flops": ("FLOPs", "tokens", None),
}
TRAINING = ("learning_rate", "grad_norm", "tokens_per_second", "mfu", "memory_gb")
METADATA = ("parameters", "data", "hardware", "git_commit")  # of `run.json`
# Endings of metrics that depend on the tokenizer.
PER_TOKEN = ("/loss", "/perplexity", "/perplexity_per_token")


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
    settings = load_saved(folder / "config.yaml")
    metadata = load_saved(folder / "run.json")
    lines = read_json_lines(folder / "metrics.jsonl")
    samples = read_json_lines(folder / "samples.jsonl")
    checkpoints = list_checkpoints(folder)
    if not ("output_dir" in settings or "run_id" in metadata or lines or checkpoints):
        raise ValueError(f"{folder} holds nothing of a run: give the --output_dir of one")
    name = folder.resolve().name
    run = Run(folder, name, settings, metadata, read_status(folder), lines, samples)
    for place in (*checkpoints, folder):
        run.evaluated |= read_record(place / "evaluation.json")
    return run


def write_report(runs: list[Run], folder: str | Path) -> Path:
    """Writes `report.html` and the PNGs of its pictures to `folder`; returns the path of the HTML file.

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
    metrics = comparable(runs, [line for run in runs for line in run.lines])
    columns, entries, notes = [], {}, {}
    for run in runs:
        newest = {name: value for line in run.lines for name, value in line.items()}
        columns.append(facts(run) | {name: number(newest, name) for name in metrics})
        for name, entry in run.evaluated.items():
            entries[f"{run.name}: {name}, update {entry.get('step')}"] = entry["results"]
            notes |= dict.fromkeys(f"{run.name}: {note}" for note in entry["notes"])
    results = result_rows(entries.values())
    settings = rows_of([run.settings for run in runs])
    if len(runs) > 1:
        settings = {name: cells for name, cells in settings.items() if len(set(cells)) > 1}
    sections = {
        "Loss": loss_figures(runs),
        "Evaluations": figures(runs, metrics),
        "Training": figures(runs, [f"train/{name}" for name in TRAINING]),
    }
    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    document = (
        Environment(autoescape=True)
        .from_string(source)
        .render(
            runs=runs,
            facts=rows_of(columns),
            sections=sections,
            entries=entries,
            results={name: results[name] for name in comparable(runs, entries.values())},
            notes=notes,
            settings=settings,
            svg=themed_svg,
        )
    )
    return document, sections["Loss"] | sections["Evaluations"] | sections["Training"]


def facts(run: Run) -> dict[str, object]:
    """Returns a run's metadata and progress by title; the state is such as `stopped at update 120: SIGTERM`."""
    known, status = run.metadata, run.status
    reason = f": {status['reason']}" if status.get("reason") else ""
    tokens, hours, flops = (max(run.curve("step", axis)[0], default=0) for axis in AXES)
    return {
        "state": f"{status['state']} at update {status['step']:,}{reason}" if status else "",
        "tokens": f"{tokens:,}",
        "training": duration(hours * 3600),
        "FLOPs": f"{flops:.3g}",
        **{name: known.get(name) or "" for name in METADATA},
        "changes": "; ".join(known.get("changes", [])),
    }


def same_tokens(runs: list[Run]) -> bool:
    """Whether the runs have the same tokenizer, so that losses in nats per token are comparable."""
    known = [run.metadata for run in runs]
    return len({each.get("tokenizer") or each.get("vocab_size") for each in known}) <= 1


def comparable(runs: list[Run], found: Iterable[Mapping]) -> list[str]:
    """Returns the names of evaluations' metrics in `found`, without standard errors, and without per-token metrics if the
    tokenizers differ."""
    left_out = ("_stderr",) if same_tokens(runs) else ("_stderr", *PER_TOKEN)
    names = dict.fromkeys(name for line in found for name in line)
    return [
        n for n in names if "/" in n and not n.startswith("train/") and not n.endswith(left_out)
    ]


def loss_figures(runs: list[Run]) -> dict[str, "Figure"]:
    """Draws training loss, faint, and validation loss, bold, over each of `AXES` that is known. If the tokenizers differ,
    only the validation loss, in bits per byte."""
    styles, title = LOSS_STYLES, LOSSES
    if not same_tokens(runs):
        styles, title = {"val/bits_per_byte": {"linewidth": 2}}, "validation loss in bits per byte"
    drawn = {}
    for axis in AXES:
        if any(run.curve("step", axis)[0] for run in runs):
            name = "loss" if axis == "tokens" else f"loss-over-{axis}"
            drawn[name] = figure_of(runs, title, styles, axis, 3.2)
            add_legend(drawn[name].axes[0])
    return drawn


def figures(runs: list[Run], names: Iterable[str]) -> dict[str, "Figure"]:
    """Draws the metrics with several values over tokens; one value is in the table of runs."""
    return {
        name.replace("/", "-"): figure_of(runs, name, {name: {"linewidth": 1.3}})
        for name in names
        if any(len(run.curve(name, "tokens")[0]) > 1 for run in runs)
    }


def figure_of(
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
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")

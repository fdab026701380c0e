"""The report of one run or several: one HTML file that needs no network, and its pictures as PNGs."""

from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment

from gpt2_accel.estimate.flops import duration
from gpt2_accel.evals.results import number, result_rows, rows_of
from gpt2_accel.runtime.files import atomic_files
from gpt2_accel.tools.report import figures
from gpt2_accel.tools.report.reader import AXES, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = ("learning_rate", "grad_norm", "tokens_per_second", "mfu", "memory_gb")
METADATA = ("parameters", "data", "hardware", "git_commit")  # of `run.json`
# Endings of metrics that depend on the tokenizer.
PER_TOKEN = ("/loss", "/perplexity", "/perplexity_per_token")


class Page(NamedTuple):
    """The report as HTML, and its figures by file name."""

    document: str
    pictures: Mapping[str, "Figure"]


def write_report(runs: list[Run], folder: str | Path) -> Path:
    """Writes `report.html` and the PNGs of its pictures to `folder`; returns the path of the HTML file. Draws what is there.

    Raises `ValueError` if matplotlib is missing."""
    figures.require_matplotlib()
    page = report_of(runs)
    with atomic_files(folder) as scratch:
        (scratch / "report.html").write_text(page.document, encoding="utf-8")
        for name, figure in page.pictures.items():
            figure.savefig(scratch / f"{name}.png", facecolor="white")
    return Path(folder) / "report.html"


def report_of(runs: list[Run]) -> Page:
    """Returns the report of runs."""
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.folder)
    metrics = comparable(runs, [line for run in runs for line in run.lines])
    columns = [facts(run) | {name: newest(run, name) for name in metrics} for run in runs]
    entries, notes = {}, {}
    for run in runs:
        for name, entry in run.evaluated.items():
            entries[f"{run.name}: {name}, update {entry.get('step')}"] = entry["results"]
            notes |= dict.fromkeys(f"{run.name}: {note}" for note in entry["notes"])
    results = result_rows(entries.values())
    settings = rows_of([run.settings for run in runs])
    if len(runs) > 1:
        settings = {name: cells for name, cells in settings.items() if len(set(cells)) > 1}
    sections = draw([run for run in runs if run.lines], metrics)
    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string(source)
    document = template.render(
        runs=runs,
        facts=rows_of(columns),
        sections=sections,
        entries=entries,
        results={name: results[name] for name in comparable(runs, entries.values())},
        notes=notes,
        settings=settings,
        svg=figures.themed_svg,
    )
    return Page(document, ChainMap(*sections.values()))


def facts(run: Run) -> dict[str, object]:
    """Returns a run's metadata and progress by title; the state is such as `stopped at update 120: SIGTERM`."""
    known, status = run.metadata, run.status
    reason = f": {status['reason']}" if status.get("reason") else ""
    tokens, hours, flops = (run.curve("step", axis)[0][-1:] for axis in AXES)
    return {
        "state": f"{status['state']} at update {run.step:,}{reason}" if status else "",
        "tokens": f"{tokens[0]:,}" if tokens else "",
        "training": duration(hours[0] * 3600) if hours else "",
        "FLOPs": f"{flops[0]:.3g}" if flops else "",
        **{name: known.get(name) or "" for name in METADATA},
        "changes": "; ".join(known.get("changes", [])),
    }


def newest(run: Run, name: str) -> str:
    """Returns a run's newest value of a metric, with its update if that is not the run's last one."""
    line = next((line for line in reversed(run.lines) if name in line), None)
    if line is None:
        return ""
    return number(line, name) + f" at update {line['step']:,}" * (line["step"] < run.step)


def comparable(runs: list[Run], found: Iterable[Mapping]) -> list[str]:
    """Returns the names of evaluations' metrics in `found`, without standard errors, and without per-token metrics if the
    tokenizers differ."""
    left_out = ("_stderr",) if figures.same_tokens(runs) else ("_stderr", *PER_TOKEN)
    names = dict.fromkeys(name for values in found for name in values)
    return [
        n for n in names if "/" in n and not n.startswith("train/") and not n.endswith(left_out)
    ]


def draw(runs: list[Run], metrics: Iterable[str]) -> dict[str, dict[str, "Figure"]]:
    """Draws the loss, the other `metrics` and training metrics of runs that have lines. Returns the figures by section and
    file name."""
    loss = {}
    for axis in AXES:
        if any(run.curve("step", axis)[0] for run in runs):
            name = "loss" if axis == "tokens" else f"loss-over-{axis}"
            loss[name] = figures.loss_figure(runs, axis)
    in_loss = "val/loss" if figures.same_tokens(runs) else "val/bits_per_byte"
    return {
        "Loss": loss,
        "Evaluations": charts(runs, [name for name in metrics if name != in_loss]),
        "Training": charts(runs, [f"train/{name}" for name in TRAINING]),
    }


def charts(runs: list[Run], names: Iterable[str]) -> dict[str, "Figure"]:
    """Draws the metrics with several values; one value is in the table of runs."""
    return {
        name.replace("/", "-"): figures.metric_figure(runs, name, {name: {"linewidth": 1.3}})
        for name in names
        if any(len(run.curve(name, "tokens")[0]) > 1 for run in runs)
    }

"""The report of one run or several: one HTML file that needs no network, and its pictures as PNGs."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from gpt2_accel.estimate.flops import duration
from gpt2_accel.evals.results import Rows, number, result_rows
from gpt2_accel.files import atomic_files
from gpt2_accel.report import figures
from gpt2_accel.report.reader import AXES, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = ("learning_rate", "grad_norm", "tokens_per_second", "mfu", "memory_gb")
METADATA = ("parameters", "data", "hardware", "git_commit")  # of `run.json`
MOST_SAMPLES = 50  # of a run that are shown
PER_TOKEN = (
    "/loss",
    "/perplexity",
    "/perplexity_per_token",
)  # endings that depend on the tokenizer
REM_PER_INCH = 7.5  # size of a picture on the page


@dataclass
class Page:
    """A page under construction. `body` is the HTML of its sections, `pictures` the figures by file name."""

    title: str
    body: list[str] = field(default_factory=list)
    pictures: dict[str, "Figure"] = field(default_factory=dict)

    def section(self, title: str) -> None:
        """Starts a section."""
        self.body.append(f"<h2>{html.escape(title)}</h2>")

    def table(self, heads: Sequence[str], rows: Rows) -> None:
        """Adds a table. The first of `heads` is that of the rows' titles."""
        head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads[1:])
        lines = [f"<tr><td></td>{head}</tr>"]
        for title, cells in rows.items():
            row = "".join(f"<td>{html.escape(cell or '-')}</td>" for cell in cells)
            lines.append(f'<tr><th scope="row">{html.escape(title)}</th>{row}</tr>')
        self.body.append(f'<div class="wide"><table>{"".join(lines)}</table></div>')

    def picture(self, name: str, figure: "Figure") -> None:
        """Adds a figure, which is also written as `<name>.png`."""
        self.pictures[name] = figure
        width = f'style="width: {REM_PER_INCH * figure.get_figwidth()}rem"'
        self.body.append(f"<figure {width}>{figures.themed_svg(figure)}</figure>")

    def document(self) -> str:
        """Returns the page as HTML."""
        template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
        return template.substitute(title=html.escape(self.title), body="\n".join(self.body))


def write_report(runs: list[Run], folder: str | Path) -> Path:
    """Writes `report.html` and the PNGs of its pictures to `folder`; returns the path of the HTML file. Draws what is there. Raises
    `ValueError` if matplotlib is missing."""
    figures.require_matplotlib()
    page = report_of(runs)
    with atomic_files(folder) as scratch:
        (scratch / "report.html").write_text(page.document(), encoding="utf-8")
        for name, figure in page.pictures.items():
            figure.savefig(scratch / f"{name}.png", facecolor="white")
    return Path(folder) / "report.html"


def report_of(runs: list[Run]) -> Page:
    """Returns the report of runs."""
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.folder)
    page = Page(", ".join(run.name for run in runs))
    metrics = comparable(runs, [line for run in runs for line in run.lines])
    columns = [facts(run) | {name: newest(run, name) for name in metrics} for run in runs]
    heads = ["", *(run.name for run in runs)]
    page.section("Runs")
    page.table(heads, {title: [c[title] for c in columns] for title in columns[0]})
    add_curves(page, [run for run in runs if run.lines], metrics)
    if any(run.evaluated for run in runs):
        add_evaluations(page, runs)
    if any(run.samples for run in runs):
        page.section("Samples")
        page.body += [samples(run) for run in runs]
    settings = {
        name: [str(run.settings.get(name, "")) for run in runs]
        for name in dict.fromkeys(name for run in runs for name in run.settings)
    }
    page.section("Settings")
    differ = {name: own for name, own in settings.items() if len(runs) == 1 or len({*own}) > 1}
    page.table(heads, differ)
    return page


def facts(run: Run) -> dict[str, str]:
    """Returns a run's metadata and progress by title; the state is such as `stopped at update 120: SIGTERM`."""
    known, last, status = run.metadata, run.lines[-1] if run.lines else {}, run.status
    reason = f": {status['reason']}" if status.get("reason") else ""
    hours, flops = (run.curve("step", axis)[0][-1:] for axis in ("hours", "flops"))
    return {
        "state": f"{status['state']} at update {run.step:,}{reason}" if status else "",
        "tokens": f"{last['tokens']:,}" if "tokens" in last else "",
        "training": duration(hours[0] * 3600) if hours else "",
        "FLOPs": f"{flops[0]:.3g}" if flops else "",
        **{name: str(known.get(name) or "") for name in METADATA},
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


def add_evaluations(page: Page, runs: list[Run]) -> None:
    """Adds the table of `evaluation.json`'s results, one column per model, with notes."""
    heads, entries, notes = [""], [], {}
    for run in runs:
        for name, entry in run.evaluated.items():
            heads.append(f"{run.name}: {name}, update {entry.get('step')}")
            entries.append(entry)
            notes |= dict.fromkeys(f"{run.name}: {note}" for note in entry["notes"])
    results = [entry["results"] for entry in entries]
    names, rows = comparable(runs, results), result_rows(results)
    page.section("Results of evaluate.py")
    page.table(heads, {name: rows[name] for name in names})
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    page.body.append(f"<ul>{items}</ul>")


def add_curves(page: Page, runs: list[Run], metrics: Sequence[str]) -> None:
    """Adds the sections with the loss, the other `metrics` and training metrics of runs that have lines."""
    if not runs:
        return
    page.section("Loss")
    for axis in (a for a in AXES if any(run.curve("step", a)[0] for run in runs)):
        name = "loss" if axis == "tokens" else f"loss-over-{axis}"
        page.picture(name, figures.loss_figure(runs, axis))
    in_loss = "val/loss" if figures.same_tokens(runs) else "val/bits_per_byte"
    others = [name for name in metrics if name != in_loss]
    for title, names in (("Evaluations", others), ("Training", [f"train/{n}" for n in TRAINING])):
        # What has one value is in the table of runs.
        drawn = [n for n in names if any(len(run.curve(n, "tokens")[0]) > 1 for run in runs)]
        if drawn:
            page.section(title)
        for name in drawn:
            page.picture(
                name.replace("/", "-"), figures.chart(runs, name, {name: {"linewidth": 1.3}})
            )


def samples(run: Run) -> str:
    """Returns a run's last samples as HTML, the newest first and open."""
    parts = []
    for sample in reversed(run.samples[-MOST_SAMPLES:]):
        prompt, text = str(sample.get("prompt", "")), str(sample.get("text", ""))
        parts.append(
            f"<details{'' if parts else ' open'}><summary>update {sample['step']:,}</summary><pre><b>{html.escape(prompt)}</b>"
            f"{html.escape(text.removeprefix(prompt))}</pre></details>"
        )
    return f"<h3>{html.escape(run.name)}</h3>{''.join(parts)}"

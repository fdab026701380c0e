"""The report of one run or several: one HTML file that needs no network, and its pictures as PNGs."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from gpt2_accel.estimate.flops import duration
from gpt2_accel.files import atomic_files
from gpt2_accel.report import figures
from gpt2_accel.report.figures import AXES, COLOURS, NARROW, WIDE
from gpt2_accel.report.names import compares, in_words
from gpt2_accel.report.reader import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = ("learning_rate", "grad_norm", "tokens_per_second", "mfu", "memory_gb")
MOST_SAMPLES = 12  # of one prompt that are shown, evenly over the run


@dataclass
class Page:
    """The report under construction: titles and HTML of its sections, and figures by file name."""

    sections: list[tuple[str, str]] = field(default_factory=list)
    figures: dict[str, "Figure"] = field(default_factory=dict)

    def picture(self, name: str, draw: Callable[[float], "Figure"], caption: str = "") -> str:
        """Draws a figure for desktops, which is also `<name>.png`, and one for phones; returns them as HTML."""
        parts = []
        for place, width in (("narrow", NARROW), ("broad", WIDE)):
            self.figures[name] = figure = draw(width)
            parts.append(f'<div class="{place}">{figures.themed_svg(figure, width)}</div>')
            figure.set_layout_engine("none")  # it has its layout: the PNG is drawn faster
        text = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
        return f"<figure>{''.join(parts)}{text}</figure>"

    def section(self, title: str, *parts: str) -> None:
        """Adds a section unless it is empty."""
        if any(parts):
            self.sections.append((html.escape(title), "".join(parts)))

    def body(self) -> str:
        """Returns the contents list and the sections."""
        links, texts = [], []
        for number, (title, text) in enumerate(self.sections, start=1):
            links.append(f'<a href="#section-{number}">{title}</a>')
            texts.append(f'<section id="section-{number}"><h2>{title}</h2>{text}</section>')
        return "\n".join([f"<nav>{' '.join(links)}</nav>", *texts])


def write_report(runs: list[Run], folder: str | Path) -> Path:
    """Writes `report.html` and the PNGs of its pictures to `folder`; returns the path of the HTML file. Draws what is there. Raises
    `ValueError` if matplotlib is missing."""
    figures.require_matplotlib()
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.folder)
    page = Page()
    page.section("Runs", table_of_runs(runs))
    add_curves(page, runs)
    page.section("Results of evaluate.py", table_of_evaluations(runs))
    page.section("Samples", *(samples(run) for run in runs))
    page.section("Settings", table_of_settings(runs))
    return save_page(page, ", ".join(run.name for run in runs), folder, "report.html")


def save_page(page: Page, title: str, folder: str | Path, name: str) -> Path:
    """Writes a page as the HTML file `name` to `folder`, with the PNGs of its pictures; returns the path of the file."""
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    document = template.substitute(title=html.escape(title), body=page.body())
    with atomic_files(folder) as scratch:
        (scratch / name).write_text(document, encoding="utf-8")
        for picture, figure in page.figures.items():
            figure.savefig(scratch / f"{picture}.png", facecolor="white")
    return Path(folder) / name


def table_of_runs(runs: list[Run]) -> str:
    """Returns the table of the runs' metadata, progress and newest evaluations, one column per run."""
    metrics = compared_metrics(runs)
    columns = [facts(run) | {in_words(name): newest(run, name) for name in metrics} for run in runs]
    return table(heads_of(runs), {title: [c[title] for c in columns] for title in columns[0]})


def facts(run: Run) -> dict[str, str]:
    """Returns a run's metadata and progress by title."""
    known, last = run.metadata, run.lines[-1] if run.lines else {}
    hours, flops = (run.curve("step", axis)[0][-1:] for axis in ("hours", "flops"))
    return {
        "state": state_of(run),
        "parameters": f"{known['parameters']:,}" if "parameters" in known else "",
        "data": known.get("data", ""),
        "tokens": f"{last['tokens']:,}" if "tokens" in last else "",
        "training": duration(hours[0] * 3600) if hours else "",
        "FLOPs": f"{flops[0]:.3g}" if flops else "",
        "hardware": known.get("hardware", ""),
        "git commit": (known.get("git_commit") or "")[:12],
    }


def state_of(run: Run) -> str:
    """Describes a run's state, such as `stopped at update 120 of 2,000: SIGTERM`."""
    if not run.status:
        return ""
    of = f" of {run.settings['max_steps']:,}" if "max_steps" in run.settings else ""
    reason = f": {run.status['reason']}" if run.status.get("reason") else ""
    return f"{run.status.get('state')} at update {run.step:,}{of}{reason}"


def newest(run: Run, name: str) -> str:
    """Returns a run's newest value of a metric, with its update if that is not the run's last one."""
    line = next((line for line in reversed(run.lines) if name in line), None)
    if line is None:
        return ""
    return figure(line, name) + f" at update {line['step']:,}" * (line["step"] < run.step)


def figure(values: dict, name: str) -> str:
    """Formats a metric with its standard error, if there is one: 3.4742 ± 0.0341, or 12,345."""
    known = [v for v in (values.get(name), values.get(f"{name}_stderr")) if v is not None]
    return " ± ".join(f"{value:.4f}" if value < 1000 else f"{value:,.0f}" for value in known)


def compared_metrics(runs: list[Run]) -> list[str]:
    """Returns the names of the runs' evaluations, without per-token metrics if the tokenizers differ."""
    same = figures.same_tokens(runs)
    return [
        name
        for name in dict.fromkeys(n for run in runs for line in run.lines for n in line if "/" in n)
        if not name.startswith("train/")
        and not name.endswith("_stderr")
        and (same or compares(name))
    ]


def heads_of(runs: list[Run]) -> list[str]:
    """Returns the heads of the runs' columns: colour and name."""
    return [heading(run.name, c) for run, c in zip(runs, cycle(COLOURS), strict=False)]


def heading(name: str, colour: str, below: str = "") -> str:
    """Returns the head of a run's column: its colour, its name, and a line below."""
    below = f"<br><small>{html.escape(below)}</small>" if below else ""
    return f'<i style="background:{colour}"></i>{html.escape(name)}{below}'


def table(heads: list[str], rows: dict[str, list[str | None]]) -> str:
    """Returns an HTML table from column heads (HTML) and rows of a title and cells (text)."""
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{html.escape(title)}</th>'
        + "".join(f"<td>{in_html(str(cell or '-'))}</td>" for cell in cells)
        + "</tr>"
        for title, cells in rows.items()
    )
    return f'<div class="wide"><table><tr><td></td>{head}</tr>{body}</table></div>'


def markdown(heads: Sequence[str], rows: dict[str, list[str]]) -> str:
    """Returns a Markdown table from heads, the first of the titles, and rows of a title and cells."""
    lines = [list(heads), *([title, *cells] for title, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def table_of_evaluations(runs: list[Run]) -> str:
    """Returns the table of `evaluation.json`'s results, one column per model, with notes."""
    found = [
        (run, heading(run.name, colour, f"{name}, update {entry.get('step')}"), entry)
        for run, colour in zip(runs, cycle(COLOURS), strict=False)
        for name, entry in run.evaluated.items()
    ]
    if not found:
        return ""
    same = figures.same_tokens(runs)
    names = dict.fromkeys(n for *_, entry in found for n in entry["results"])
    rows = {
        in_words(n): [figure(entry["results"], n) for *_, entry in found]
        for n in names
        if not n.endswith("_stderr") and (same or compares(n))
    }
    notes = dict.fromkeys(f"{run.name}: {note}" for run, _, e in found for note in e["notes"])
    return table([head for _, head, _ in found], rows) + bullets(list(notes))


def table_of_settings(runs: list[Run]) -> str:
    """Returns the table of a run's settings, or of those that differ between several runs."""
    rows = {
        name: [str(run.settings.get(name, "")) for run in runs]
        for name in dict.fromkeys(name for run in runs for name in run.settings)
    }
    if len(runs) > 1:
        rows = {name: own for name, own in rows.items() if len(set(own)) > 1}
    return table(heads_of(runs), rows) if rows else ""


def add_curves(page: Page, runs: list[Run]) -> None:
    """Adds the sections with the loss, other evaluations and training metrics of runs that have lines."""
    runs = [run for run in runs if run.lines]
    if not runs:
        return

    def curves(names: Sequence[str]) -> list[str]:  # what has one value is in the table of runs
        return [n for n in names if any(len(run.curve(n, "tokens")[0]) > 1 for run in runs)]

    in_loss = "val/loss" if figures.same_tokens(runs) else "val/bits_per_byte"
    others = curves([name for name in compared_metrics(runs) if name != in_loss])
    training = curves([f"train/{name}" for name in TRAINING])
    page.section("Loss", caution(runs), loss_tabs(page, runs))
    for title, names in (("Evaluations", others), ("Training", training)):
        if names:
            draw = partial(figures.metrics_figure, runs, names)
            page.section(title, page.picture(title.lower(), draw))


def caution(runs: list[Run]) -> str:
    """Returns a warning if the losses of the runs are not directly comparable."""
    texts = {str(run.metadata.get("data")).partition(" (")[0] for run in runs}  # without tokens
    if len(texts) <= 1:
        return ""
    return "<p>The runs have different data: a lower loss may come from easier text.</p>"


def loss_tabs(page: Page, runs: list[Run]) -> str:
    """Returns the figure of the loss over each known axis of `AXES`, as tabs."""
    parts = []
    for axis in (a for a in AXES if any(run.curve("step", a)[0] for run in runs)):
        file, checked = (f"loss-over-{axis}", "") if parts else ("loss", " checked")
        parts.append(
            f'<input type="radio" name="loss" id="{file}"{checked}><label for="{file}">{AXES[axis]}</label>'
            + page.picture(file, partial(figures.loss_figure, runs, axis))
        )
    return f'<div class="tabs">{"".join(parts)}</div>'


def samples(run: Run) -> str:
    """Returns a run's samples by prompt, the newest first."""
    parts = []
    for prompt in dict.fromkeys(str(sample.get("prompt", "")) for sample in run.samples):
        own = [sample for sample in run.samples if str(sample.get("prompt", "")) == prompt]
        after = f"after {prompt!r}" if prompt else "from an empty prompt"
        parts.append(f"<h3>{html.escape(run.name)}, {html.escape(after)}</h3>")
        every = -(-len(own) // MOST_SAMPLES)
        for number, sample in enumerate(own[::-every]):
            text, shown = str(sample.get("text", "")), " open" if number == 0 else ""
            parts.append(
                f"<details{shown}><summary>update {sample['step']:,}</summary><pre><b>"
                f"{html.escape(prompt)}</b>{html.escape(text.removeprefix(prompt))}</pre></details>"
            )
    return "".join(parts)


def bullets(lines: list[str]) -> str:
    """Returns lines of text as an HTML list, or an empty string."""
    items = "".join(f"<li>{in_html(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def in_html(text: str) -> str:
    """Returns text as HTML in which a path breaks after a slash, not within a name."""
    return html.escape(text).replace("/", "/<wbr>")

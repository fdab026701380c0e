"""The report of one run or several: one HTML file that needs no network, and its pictures as PNGs."""

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import torch

from gpt2_accel.checkpoint.find import verified_directory
from gpt2_accel.estimate.flops import duration
from gpt2_accel.files import atomic_files
from gpt2_accel.hf.convert import from_pretrained
from gpt2_accel.report import figures
from gpt2_accel.report.figures import AXES, COLOURS, NARROW, WIDE
from gpt2_accel.report.names import compares, in_words
from gpt2_accel.report.reader import Run, is_number
from gpt2_accel.tokenizer import encode, load_tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = ("learning_rate", "grad_norm", "tokens_per_second", "mfu", "memory_gb")
VISIBLE = str.maketrans("\n\t ", "⏎⇥·")  # in a token
MOST_TOKENS = 24  # of the text whose attention is drawn
MOST_SAMPLES = 12  # of one prompt that are shown, evenly over the run


@dataclass
class Page:
    """The report under construction: HTML sections, and figures by file name."""

    sections: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    figures: dict[str, "Figure"] = field(default_factory=dict)

    def picture(self, name: str, draw: Callable[[float], "Figure"], caption: str = "") -> str:
        """Draws a figure for desktops, which is also `<name>.png`, and one for phones; returns them as HTML."""
        parts = []
        for place, width in (("narrow", NARROW), ("broad", WIDE)):
            self.figures[name] = figure = draw(width)
            svg = figures.themed_svg(figure, width)
            figure.set_layout_engine("none")  # it has its layout: the PNG is drawn faster
            charts = html.escape(json.dumps(figures.chart_data(figure)))
            parts.append(f'<div class="{place}" data-charts="{charts}">{svg}</div>')
        text = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
        return f"<figure>{''.join(parts)}{text}</figure>"

    def section(self, title: str, *parts: str) -> None:
        """Adds a section unless it is empty."""
        if any(parts):
            place, heading = f"section-{len(self.sections) + 1}", html.escape(title)
            self.contents.append(f'<a href="#{place}">{heading}</a>')
            self.sections.append(
                f'<section id="{place}"><h2>{heading}</h2>{"".join(parts)}</section>'
            )

    def body(self) -> str:
        """Returns the contents list and the sections."""
        return "\n".join([f"<nav>{' '.join(self.contents)}</nav>", *self.sections])


def write_report(runs: list[Run], folder: str | Path, text: str | None = None) -> Path:
    """Writes `report.html` and the PNGs of its pictures to `folder`; returns the path of the HTML file.

    With a `text`, draws the attention of the newest weights on it. Draws what is there, and says in the report, as
    in `Run.problems`, what is not. Raises `ValueError` if matplotlib is missing.
    """
    figures.require_matplotlib()
    tell_apart(runs)
    page = Page()
    page.section("Runs", table_of_runs(runs))
    add_curves(page, runs)
    page.section("Results of evaluate.py", table_of_evaluations(runs))
    page.section("Samples", *(samples(run) for run in runs if run.samples))
    for run in runs if text else []:
        add_attention(page, run, text)
    problems = ((run.folder, line) for run in runs for line in dict.fromkeys(run.problems))
    page.section("Left out", bullets([f"{folder}: {line}" for folder, line in problems]))
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


def tell_apart(runs: list[Run]) -> None:
    """Gives longer, unique names to runs whose folders have the same name."""
    names = [run.name for run in runs]
    for number, run in enumerate(runs, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.folder.resolve().parent.name}-{run.name}"
            if run.name in [other.name for other in runs if other is not run]:
                run.name += f" ({number})"


def table_of_runs(runs: list[Run]) -> str:
    """Returns the table of the runs' metadata and progress, one column per run."""
    rows: dict[str, Callable[[Run], str]] = {
        "state": state_of,
        "parameters": lambda run: number(run.metadata.get("parameters")),
        "data": lambda run: run.metadata.get("data"),
        "tokens": lambda run: of_last_line(run, number(run.last("tokens"))),
        "training": lambda run: of_last_line(run, time_of(run)),
        "FLOPs": lambda run: of_last_line(run, compute_of(run)),
        "hardware": lambda run: run.metadata.get("hardware"),
        "git commit": lambda run: short_commit(run.metadata.get("git_commit")),
    }
    for name in compared_metrics(runs):
        rows[in_words(name)] = lambda run, name=name: newest(run, name)
    heads = [heading(run.name, c) for run, c in zip(runs, cycle(COLOURS), strict=False)]
    return table(heads, {title: [value(run) for run in runs] for title, value in rows.items()})


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
    found = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    found.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(found)


def table_of_evaluations(runs: list[Run]) -> str:
    """Returns the table of `evaluation.json`'s results, one column per model, with notes."""
    found = [
        (run, colour, name, entry)
        for run, colour in zip(runs, cycle(COLOURS), strict=False)
        for name, entry in run.evaluated.items()
    ]
    if not found:
        return ""
    same = figures.same_tokens(runs)
    names = dict.fromkeys(n for *_, entry in found for n in entry["results"])
    names = [n for n in names if not n.endswith("_stderr") and (same or compares(n))]
    heads = [
        heading(run.name, colour, f"{name}, update {entry.get('step')}")
        for run, colour, name, entry in found
    ]
    rows = {in_words(n): [figure(entry["results"], n) for *_, entry in found] for n in names}
    notes = dict.fromkeys(f"{run.name}: {note}" for run, *_, e in found for note in e["notes"])
    return table(heads, rows) + bullets(list(notes))


def compared_metrics(runs: list[Run]) -> list[str]:
    """Returns the names of the runs' evaluations, without per-token metrics if the tokenizers differ."""
    names = dict.fromkeys(name for run in runs for name in run.evaluations)
    same = figures.same_tokens(runs)
    return [name for name in names if same or compares(name)]


def state_of(run: Run) -> str:
    """Describes a run's state, such as `stopped at update 120 of 2,000: SIGTERM`."""
    if not run.status:
        return ""
    of = f" of {run.settings['max_steps']:,}" if "max_steps" in run.settings else ""
    reason = f": {run.status['reason']}" if run.status.get("reason") else ""
    return f"{run.status.get('state')} at update {run.step:,}{of}{reason}"


def number(value: float | None) -> str:
    """Formats a number as 1,234,567."""
    return "" if value is None else f"{value:,.0f}"


def figure(values: dict, name: str) -> str:
    """Formats a metric with its standard error, if there is one: 3.4742 ± 0.0341, or 12,345."""
    both = (values.get(name), values.get(f"{name}_stderr"))
    known = [value for value in both if is_number(value)]
    return " ± ".join(f"{value:.4f}" if value < 1000 else f"{value:,.0f}" for value in known)


def newest(run: Run, name: str) -> str:
    """Returns a run's newest value of a metric, and its update if that is not the run's last."""
    line = next((line for line in reversed(run.lines) if name in line), {})
    return at_update(run, line, figure(line, name))


def of_last_line(run: Run, value: str) -> str:
    """Returns a value of the run's last logged update, and that update if it is not the run's last."""
    return at_update(run, run.lines[-1] if run.lines else {}, value)


def at_update(run: Run, line: dict, value: str) -> str:
    """Adds the update of a line of `metrics.jsonl` to its value, if that is not the run's last update."""
    earlier = value and line["step"] < run.step
    return value + (f" at update {line['step']:,}" if earlier else "")


def short_commit(commit: str | None) -> str:
    """Shortens a commit hash and keeps `-dirty`."""
    name, _, dirty = (commit or "").partition("-")
    return name[:12] + (" with changes" if dirty else "")


def time_of(run: Run) -> str:
    """Returns the run's training time in words."""
    hours, _ = run.curve("step", "hours")
    return duration(hours[-1] * 3600) if hours else ""


def compute_of(run: Run) -> str:
    """Returns the FLOPs spent so far."""
    flops, _ = run.curve("step", "flops")
    return f"{flops[-1]:.3g}" if flops else ""


def add_curves(page: Page, runs: list[Run]) -> None:
    """Adds the sections with the loss, other evaluations and training metrics."""
    drawn = [run for run in runs if run.lines]
    if not drawn:
        return

    def is_curve(name: str) -> bool:  # what has one value is in the table of runs
        return any(len(run.curve(name, "tokens")[0]) > 1 for run in drawn)

    others = [n for n in compared_metrics(drawn) if n != "val/loss" and is_curve(n)]
    training = [name for name in (f"train/{n}" for n in TRAINING) if is_curve(name)]
    if not figures.same_tokens(drawn):  # these are in the picture of the loss
        others = [name for name in others if name != "val/bits_per_byte"]
        for run in drawn:
            if run.bits_per_byte is None:
                run.problems.append("its bits per byte are not known: no loss beside other tokens")
    page.section("Loss", caution(drawn), tabs(page, "loss", drawn, figures.loss_figure))
    if others:

        def draw(runs: list[Run], axis: str, width: float) -> "Figure":
            return figures.metrics_figure(runs, others, axis, width)

        page.section("Evaluations", tabs(page, "evaluations", drawn, draw))
    if training:
        draw_training = partial(figures.metrics_figure, drawn, training, "tokens")
        page.section("Training", page.picture("training", draw_training))


def caution(runs: list[Run]) -> str:
    """Returns a warning if the losses of the runs are not directly comparable."""
    sizes = re.compile(r" \([\d,]+ tokens\)$")  # which depend on the tokenizer
    if len({sizes.sub("", str(run.metadata.get("data"))) for run in runs}) <= 1:
        return ""
    return "<p>The runs have different data: a lower loss may come from easier text.</p>"


def tabs(
    page: Page, name: str, runs: list[Run], draw: Callable[[list[Run], str, float], "Figure"]
) -> str:
    """Returns one figure per known axis of `AXES`, as tabs."""
    longest = max((max(run.curve("step", "hours")[0], default=0) for run in runs), default=0)
    unused = "minutes" if longest > 2 else "hours"
    known = [a for a in AXES if a != unused and any(run.curve("step", a)[0] for run in runs)]
    parts = []
    for axis in known:
        checked = " checked" if axis == known[0] else ""
        file = name if axis == known[0] else f"{name}-over-{axis}"
        parts.append(
            f'<input type="radio" name="{name}" id="{file}"{checked}><label for="{file}">'
            f"{AXES[axis]}</label>{page.picture(file, partial(draw, runs, axis))}"
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


def add_attention(page: Page, run: Run, text: str) -> None:
    """Adds the section with the attention of a run's newest weights on the beginning of `text`."""
    try:
        directory = verified_directory(run.folder, hint="use another checkpoint")
        model, tokenizer = from_pretrained(directory), load_tokenizer(directory)
        ids = encode(tokenizer, [text])[0][: min(MOST_TOKENS, model.config.n_positions)]
        if not ids:
            raise ValueError("the text has no tokens")
    except (OSError, ValueError) as error:
        run.problems.append(f"its attention is not drawn: {error}")
        return
    draw = partial(figures.attention_figure, figures.attention_weights(model, torch.tensor([ids])))
    tokens = " | ".join(tokenizer.decode([i]).translate(VISIBLE) for i in ids)
    caption = (
        f"Each row is a token, and shows how much it attends to each token up to itself: {tokens}"
    )
    page.section(f"Attention of {run.name}", page.picture(f"{run.name}-attention", draw, caption))


def bullets(lines: list[str]) -> str:
    """Returns lines of text as an HTML list, or an empty string."""
    items = "".join(f"<li>{in_html(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def in_html(text: str) -> str:
    """Returns text as HTML in which a path breaks after a slash, not within a name."""
    return html.escape(text).replace("/", "/<wbr>")

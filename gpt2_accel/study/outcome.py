"""The outcome of a comparison: as text and as a page."""

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.files import read_json_lines
from gpt2_accel.report.figures import (
    COLOURS,
    INK,
    WIDE,
    finish_axes,
    new_figure,
    set_title,
    short_number,
)
from gpt2_accel.report.page import Page, bullets, markdown, save_page, table
from gpt2_accel.study.compare import Comparison
from gpt2_accel.study.engine import Engine
from gpt2_accel.study.intervals import interval
from gpt2_accel.study.study_file import METRICS
from gpt2_accel.study.trials import caveats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plus_minus(mean: float, half: float, form: str = ".4f") -> str:
    """Formats an interval: 3.9260 ± 0.0051; without a spread only the mean."""
    return f"{mean:{form}}" + ("" if math.isinf(half) else f" ± {half:{form.lstrip('+')}}")


def rows_of(outcome: Comparison, budget: float | None) -> dict[str, list[str]]:
    """Returns the cells of a table for one budget, by variant: verdict, difference to the baseline, metric, tokens."""
    rows = {}
    for name in outcome.study.variants:
        results, values = outcome.results[name, budget], outcome.values(name, budget)
        finite, verdict = [*filter(math.isfinite, values)], outcome.verdict(name, budget)
        counts = {"diverged": sum(map(math.isinf, values)), "missing": results.count(None)}
        notes = [f"{count} {what}" for what, count in counts.items() if count]
        differs = verdict is not None and math.isfinite(verdict.mean)
        rows[name] = [
            str(verdict or ("baseline" if name == outcome.study.baseline else "no pair of runs")),
            plus_minus(verdict.mean, verdict.half, "+.4f") if differs else "",
            ", ".join([plus_minus(*interval(finite)) if finite else "none", *notes]),
            next((short_number(result.tokens) for result in results if result), ""),
        ]
    return rows


def tables(outcome: Comparison) -> dict[str, tuple[list[str], dict[str, list[str]]]]:
    """Returns the heads and the rows of a table for each budget, by title."""
    study = outcome.study
    heads = ["verdict", "difference to the baseline", METRICS[study.metric], "tokens"]
    return {
        f"{study.unit}: {short_number(budget)}" if budget else "Verdict": (
            heads,
            rows_of(outcome, budget),
        )
        for budget in study.budgets
    }


def remarks(outcome: Comparison) -> list[str]:
    """Returns remarks on shares of tokens, tuning, chance, other code and failures."""
    study, lines = outcome.study, []
    for name in study.variants:
        if found := outcome.token_share(name):
            lines.append(
                f"{name} reaches the {study.metric} of {study.baseline} with {found} of its tokens"
            )
    for name, tuning in outcome.tuned.items():
        best, ends = tuning.best().resolved, ", ".join(tuning.at_end())
        chosen = ", ".join(f"{axis} {best[axis]}" for axis in tuning.axes)
        lines.append(f"{name}: {len(tuning.tried())} trials chose {chosen}")
        if ends:
            lines.append(
                f"{name}: the best {ends} is at the end of its axis: extend it before you judge"
            )
    count = (len(study.variants) - 1) * len(study.budgets)
    if count > 1:
        lines.append(
            f"of {count} comparisons of equal variants, {round(0.05 * count, 2):g} are called better or worse by chance"
        )
    used = {result for own in outcome.results.values() for result in own if result}
    return lines + caveats(study.recipe, used, outcome.failed)


def as_text(outcome: Comparison) -> str:
    """Returns the outcome as Markdown tables, one per budget, and lines of remarks."""
    parts = [
        f"{title}\n\n{markdown(['variant', *heads], rows)}"
        for title, (heads, rows) in tables(outcome).items()
    ]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in remarks(outcome))])


def write_page(outcome: Comparison, engine: Engine, name: str) -> Path:
    """Writes `study.html`, with the heading `name`, into the study's folder; returns its path. Needs matplotlib."""
    page, study = Page(), outcome.study
    for title, own in tables(outcome).items():
        page.section(title, table(*own))
    page.section("Remarks", bullets(remarks(outcome)))
    if len(study.variants) > 1:
        caption = "The mean difference to the baseline, its 95% interval, and the difference of each pair of seeds."
        draw = partial(differences_figure, outcome)
        page.section("Differences", page.picture("differences", draw, caption))
    if curves := curves_of(outcome, engine):
        caption = "Runs of the largest budget: the mean over the seeds, and a band from the lowest to the highest."
        draw = partial(curves_figure, curves)
        page.section("Curves", page.picture("curves", draw, caption))
    settings = {
        name: [", ".join(f"{n} {v}" for n, v in {**study.settings, **own}.items())]
        for name, own in study.variants.items()
    }
    page.section("Settings", table([f"changes to {study.recipe.name}"], settings))
    return save_page(page, name, engine.folder, "study.html")


def differences_figure(outcome: Comparison, width: float) -> "Figure":
    """Draws the interval of each variant's difference to the baseline in the largest budget, with its pairs as points."""
    budget = outcome.study.budgets[-1]
    others = [name for name in outcome.study.variants if name != outcome.study.baseline]
    names = [name for name in others if outcome.differences(name, budget)]
    figure, [[ax]] = new_figure(width, 0.9 + 0.5 * len(names))
    for place, name in enumerate(names):
        points, colour = outcome.differences(name, budget), COLOURS[place % len(COLOURS)]
        mean, half = interval(points)
        ax.plot(points, [place] * len(points), "|", color=colour, markersize=9, alpha=0.6)
        half = None if math.isinf(half) else half
        ax.errorbar(mean, place, xerr=half, fmt="o", color=colour, capsize=4, markersize=5)
    ax.axvline(0, color=INK, linewidth=1)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel(f"{METRICS[outcome.study.metric]}; lower is better")
    set_title(ax, f"difference to {outcome.study.baseline}")
    return figure


def curves_of(outcome: Comparison, engine: Engine) -> dict[str, list[tuple[list, list]]]:
    """Returns (tokens, val/loss) of each seed in the largest budget, by variant, as far as the runs' folders are there."""
    found: dict[str, list[tuple[list, list]]] = {}
    for name in outcome.study.variants:
        for result in filter(None, outcome.results[name, outcome.study.budgets[-1]]):
            lines = read_json_lines(engine.folder_of(result.id) / "metrics.jsonl")
            points = [(line["tokens"], line["val/loss"]) for line in lines if line.get("val/loss")]
            if len(points) > 1:
                found.setdefault(name, []).append(tuple(zip(*points, strict=True)))
    return found


def curves_figure(curves: dict[str, list[tuple[list, list]]], width: float) -> "Figure":
    """Draws the mean of the curves of each variant, with a band from the lowest to the highest."""
    figure, [[ax]] = new_figure(width, 4.2 if width == WIDE else 3.2)
    shown: list[float] = []
    for number, (name, runs) in enumerate(curves.items()):
        x, colour = runs[0][0], COLOURS[number % len(COLOURS)]
        y = np.array([np.interp(x, *run) for run in runs])
        ax.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, linewidth=0)
        ax.plot(x, y.mean(0), "o-", color=colour, markersize=3, label=name, gid=name)
        shown += [*y.min(0), *y.max(0)]
    finish_axes(ax, "tokens", "validation loss in nats per token", shown)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9)
    return figure

"""The outcome of a comparison: as text, as the lines that autoresearch's agents read, and as a page."""

import html
import math
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
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
    settled,
    short_number,
)
from gpt2_accel.report.page import Page, bullets, markdown, save_page, table
from gpt2_accel.study.compare import METRICS, Comparison, Variant
from gpt2_accel.study.engine import Engine
from gpt2_accel.study.intervals import interval
from gpt2_accel.study.table import code_fingerprint

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plus_minus(mean: float, half: float, form: str = ".4f") -> str:
    """Formats an interval: 3.9260 ± 0.0051; without a spread only the mean."""
    return f"{mean:{form}}" + ("" if math.isinf(half) else f" ± {half:{form.lstrip('+')}}")


def rows_of(outcome: Comparison, budget: float | None) -> dict[str, list[str]]:
    """Returns the cells of a table for one budget, by variant: verdict, difference to the baseline, metric, tokens."""
    rows = {}
    for variant in outcome.variants:
        results = variant.results[budget]
        finished = [r for r in results if r is not None]
        values = [v for v in outcome.values(variant, budget) if math.isfinite(v)]
        diverged = sum(result.diverged for result in finished)
        shown = plus_minus(*interval(values)) if values else "none"
        notes = [f"{diverged} diverged"] * bool(diverged)
        notes += [f"{len(results) - len(finished)} missing"] * (len(finished) < len(results))
        verdict = outcome.verdict(variant, budget)
        differs = verdict is not None and math.isfinite(verdict.mean)
        rows[variant.name] = [
            str(verdict or ("baseline" if variant is outcome.baseline else "no pair of runs")),
            plus_minus(verdict.mean, verdict.half, "+.4f") if differs else "",
            ", ".join([shown, *notes]),
            short_number(finished[0].tokens) if finished else "",
        ]
    return rows


def heads(outcome: Comparison) -> list[str]:
    """Returns the heads of the columns of `rows_of`."""
    return ["verdict", "difference to the baseline", METRICS[outcome.study.metric], "tokens"]


def remarks(outcome: Comparison) -> list[str]:
    """Returns what else is to be said: spread, shares of tokens, tuning, comparisons, failures."""
    study, lines = outcome.study, []
    for budget in outcome.budgets:
        values = [v for v in outcome.values(outcome.baseline, budget) if math.isfinite(v)]
        where = f" with {short_number(budget)} {study.unit}" if budget else ""
        if len(values) > 1:
            lines.append(
                f"the runs of {study.baseline}{where} have a standard deviation of {stdev(values):.4f} between seeds"
            )
        lines += unequal_amounts(outcome, budget, where)
    for variant in outcome.variants:
        if (share := outcome.token_share(variant)) is not None:
            mean, half, beyond = share
            number = f"{beyond} {mean:.0%}" if beyond else f"{mean:.1%} ± {half:.1%}"
            lines.append(
                f"{variant.name} reaches the {study.metric} of {study.baseline} with {number} of its tokens"
            )
    for variant in outcome.variants:
        if (tuned := variant.tuned) is not None:
            chosen = ", ".join(f"{n} {tuned.trial.resolved[n]}" for n in study.tuning.axes)
            how = "no single step helps" if tuned.converged else "more trials may find better ones"
            lines.append(f"{variant.name}: {tuned.trials} trials chose {chosen}; {how}")
            if tuned.at_end:
                names = ", ".join(tuned.at_end)
                lines.append(
                    f"{variant.name}: the best {names} is at the end of its axis: extend the axis before you judge"
                )
    count = (len(outcome.variants) - 1) * len(outcome.budgets)
    if count > 1:
        lines.append(
            f"of {count} comparisons of equal variants, {round(0.05 * count, 2):g} are called better or worse by chance"
        )
    used = {r for v in outcome.variants for own in v.results.values() for r in own if r}
    other = sum(result.code != code_fingerprint(study.recipe) for result in used)
    if other:
        lines.append(
            f"{other} of {len(used)} runs were recorded by other code than this: another --output_dir trains all of them again"
        )
    lines += [f"run {id} failed: {reason}" for id, reason in outcome.failed.items()]
    return lines


def unequal_amounts(outcome: Comparison, budget: float | None, where: str) -> list[str]:
    """Returns a remark for each variant whose runs differ by over 1% from the baseline's in tokens, or in FLOPs if they are the
    budget: without a budget, or because a run is a whole number of updates. Returns none for minutes."""
    unit = "flops" if outcome.study.unit == "flops" else "tokens"
    amounts = {
        v.name: getattr(found, unit)
        for v in outcome.variants
        if (found := next(filter(None, v.results[budget]), None))
    }
    base = amounts.get(outcome.baseline.name)
    if base is None or outcome.study.unit == "minutes":
        return []
    return [
        f"{name}{where} has {abs(amount / base - 1):.1%} {'more' if amount > base else 'fewer'} {unit} than "
        f"{outcome.baseline.name}: part of the difference is due to them"
        for name, amount in amounts.items()
        if abs(amount / base - 1) > 0.01
    ]


def as_text(outcome: Comparison) -> str:
    """Returns the outcome as Markdown tables, one per budget, and lines of remarks."""
    parts = []
    for budget in outcome.budgets:
        title = f"{outcome.study.unit}: {short_number(budget)}\n\n" if budget else ""
        parts.append(title + markdown(["variant", *heads(outcome)], rows_of(outcome, budget)))
    parts.append("\n".join(f"- {line}" for line in remarks(outcome)))
    return "\n\n".join(filter(None, parts))


def agent_lines(outcome: Comparison, engine: Engine, seconds: float) -> str:
    """Returns the last lines of an autoresearch experiment (https://github.com/karpathy/autoresearch) for the last variant
    and the largest budget: means over its seeds, the highest memory, nan for what is not known.

    `seconds` is the time of this study so far.
    """
    variant, budget = outcome.variants[-1], outcome.budgets[-1]
    found = [r for r in variant.results[budget] if r is not None]
    lines = [read_json_lines(engine.folder_of(r.id) / "metrics.jsonl") for r in found]

    def seen(name: str) -> list[float]:
        of_runs = ([line[name] for line in run if line.get(name) is not None] for run in lines)
        return [max(values) for values in of_runs if values]

    def mean(values: list[float]) -> float:
        return fmean(values) if values else math.nan

    bits = [r.bits_per_byte if r.bits_per_byte is not None else math.nan for r in found]
    values = {
        "val_bpb": f"{mean([math.inf if r.diverged else b for r, b in zip(found, bits, strict=True)]):.6f}",
        "training_seconds": f"{mean(seen('train/seconds')):.1f}",
        "total_seconds": f"{seconds:.1f}",
        "peak_vram_mb": f"{max(seen('train/memory_gb'), default=math.nan) * 1000:.1f}",
        "mfu_percent": f"{100 * mean(seen('train/mfu')):.2f}",
        "total_tokens_M": f"{mean([r.tokens / 1e6 for r in found]):.1f}",
        "num_steps": f"{mean([r.updates for r in found]):.0f}",
        "num_params_M": f"{mean([r.parameters / 1e6 for r in found]):.1f}",
        "depth": f"{variant.trial.resolved['n_layer']}",
    }
    return "---\n" + "\n".join(f"{name + ':':<17} {value}" for name, value in values.items())


def write_page(outcome: Comparison, engine: Engine) -> Path:
    """Writes `study.html` into the study's folder; returns its path. Needs matplotlib."""
    page, study = Page(), outcome.study
    title = study.path.stem
    for budget in outcome.budgets:
        name = f"Verdict, {short_number(budget)} {study.unit}" if budget else "Verdict"
        page.section(name, table(list(map(html.escape, heads(outcome))), rows_of(outcome, budget)))
    page.section("Remarks", bullets(remarks(outcome)))
    caption = "The mean difference to the baseline, its 95% interval, and the difference of each pair of seeds."
    if len(outcome.variants) > 1:
        page.section(
            "Differences",
            page.picture("differences", lambda width: differences_figure(outcome, width), caption),
        )
    for metric, what in (("val/loss", "validation"), ("train/loss", "training")):
        curves = {v.name: curves_of(outcome, engine, v, metric) for v in outcome.variants}
        if any(len(x) > 1 for runs in curves.values() for x, _ in runs):
            caption = "Runs of the largest budget: the mean over the seeds, and a band from the lowest to the highest."
            draw = partial(curves_figure, curves, f"{what} loss in nats per token")
            page.section("Curves", page.picture("curves", draw, caption))
            break
    settings = {
        name: [", ".join(f"{n} {v}" for n, v in {**study.settings, **own}.items())]
        for name, own in study.variants.items()
    }
    page.section("Settings", table([html.escape(f"changes to {study.recipe.name}")], settings))
    return save_page(page, title, engine.folder, "study.html")


def differences_figure(outcome: Comparison, width: float) -> "Figure":
    """Draws the interval of each variant's difference to the baseline in the largest budget, with its pairs as points."""
    budget = outcome.budgets[-1]
    others = [v for v in outcome.variants if v is not outcome.baseline]
    figure, [[ax]] = new_figure(width, 0.9 + 0.5 * len(others))
    base = outcome.values(outcome.baseline, budget)
    for place, variant in enumerate(others):
        verdict = outcome.verdict(variant, budget)
        if verdict is None or math.isinf(verdict.mean):
            continue
        pairs = zip(outcome.values(variant, budget), base, strict=True)
        points = [a - b for a, b in pairs if math.isfinite(a - b)]
        colour = COLOURS[(1 + place) % len(COLOURS)]
        ax.plot(points, [place] * len(points), "|", color=colour, markersize=9, alpha=0.6)
        half = None if math.isinf(verdict.half) else verdict.half
        ax.errorbar(verdict.mean, place, xerr=half, fmt="o", color=colour, capsize=4, markersize=5)
    ax.axvline(0, color=INK, linewidth=1)
    ax.set_yticks(range(len(others)), [variant.name for variant in others])
    ax.set_ylim(len(others) - 0.5, -0.5)
    ax.set_xlabel(f"{METRICS[outcome.study.metric]}; lower is better")
    set_title(ax, f"difference to {outcome.study.baseline}")
    return figure


def curves_of(
    outcome: Comparison, engine: Engine, variant: Variant, metric: str
) -> list[tuple[list, list]]:
    """Returns (tokens, metric) of each seed in the largest budget, as far as the runs' folders are there."""
    found = []
    for result in variant.results[outcome.budgets[-1]]:
        lines = (
            [] if result is None else read_json_lines(engine.folder_of(result.id) / "metrics.jsonl")
        )
        points = [(line["tokens"], line[metric]) for line in lines if line.get(metric)]
        if points:
            found.append(tuple(map(list, zip(*points, strict=True))))
    return found


def curves_figure(curves: dict[str, list[tuple[list, list]]], title: str, width: float) -> "Figure":
    """Draws the mean of the curves of each variant, with a band from the lowest to the highest."""
    figure, [[ax]] = new_figure(width, 4.2 if width == WIDE else 3.2)
    shown = []
    for number, (name, runs) in enumerate(curves.items()):
        if not runs:
            continue
        x = runs[0][0]
        y = np.array([np.interp(x, *run) for run in runs])
        colour, marker = COLOURS[number % len(COLOURS)], "o" if len(x) <= 60 else None
        ax.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, linewidth=0)
        style = {"color": colour, "marker": marker, "markersize": 3, "label": name, "gid": name}
        ax.plot(x, y.mean(0), **style)
        shown += settled(y.min(0).tolist()) + settled(y.max(0).tolist())
    finish_axes(ax, "tokens", title, shown)
    ax.legend(frameon=False, labelcolor=INK, fontsize=9)
    return figure

"""The outcomes of a comparison and of a scaling study, as Markdown."""

import math
import shlex
from collections.abc import Iterable
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.evals.results import markdown
from gpt2_accel.tools.report.figures import COLOURS, add_legend, new_figure, short_number
from gpt2_accel.tools.study.compare import Comparison
from gpt2_accel.tools.study.intervals import interval, plus_minus
from gpt2_accel.tools.study.law import UNKNOWNS, FittedLaw, bootstrap_interval, loss_of
from gpt2_accel.tools.study.scaling import FEWEST_BUDGETS, FEWEST_RUNS, SIDE, Grid
from gpt2_accel.tools.study.study_file import METRICS
from gpt2_accel.tools.study.trials import caveats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUNS = ("run", "val/loss", "parameters", "tokens")


def comparison_text(outcome: Comparison) -> str:
    """Returns a comparison as Markdown: tables by budget, remarks."""
    study, parts = outcome.study, []
    heads = ("variant", "verdict", "difference to the baseline", METRICS[study.metric], "tokens")
    for budget in study.budgets:
        parts.append(f"{study.unit}: {short_number(budget)}" if budget else "Verdict")
        parts.append(markdown(heads, verdict_rows(outcome, budget)))
    used = {result for own in outcome.results.values() for result in own if result}
    if lines := [*remarks(outcome), *caveats(study.recipe, used)]:
        parts += ["Remarks", bullets(lines)]
    return "\n\n".join(parts)


def bullets(lines: Iterable[str]) -> str:
    """Returns sentences as a list in Markdown."""
    return "\n".join(f"- {line}" for line in lines)


def verdict_rows(outcome: Comparison, budget: float | None) -> dict[str, list[str]]:
    """Returns the cells of a table for one budget, by variant: verdict, difference to the baseline, metric, tokens."""
    rows = {}
    for name in outcome.study.variants:
        values, verdict = outcome.values(name, budget), outcome.verdict(name, budget)
        finite = [*filter(math.isfinite, values)]
        counts = {"diverged": sum(map(math.isinf, values)), "missing": sum(map(math.isnan, values))}
        notes = [f"{count} {what}" for what, count in counts.items() if count]
        rows[name] = [
            str(verdict),
            plus_minus(verdict.mean, verdict.half, "+.4f") if math.isfinite(verdict.mean) else "",
            ", ".join([plus_minus(*interval(finite)) if finite else "none", *notes]),
            next((short_number(r.tokens) for r in outcome.results[name, budget] if r), ""),
        ]
    return rows


def remarks(outcome: Comparison) -> list[str]:
    """Returns the share of tokens of each variant, where it is known, what the tuning of each chose, and which of it is at an end
    of its axis beyond which there may be more: not at 0, and no text."""
    study = outcome.study
    lines = [
        f"{name} reaches the {study.metric} of {study.baseline} with {share} of its tokens"
        for name in study.variants
        if (share := outcome.token_share(name))
    ]
    for name, trial in outcome.tuned.items():
        best = {axis: trial.resolved[axis] for axis in study.tune}
        count = math.prod(map(len, study.tune.values()))
        chosen = ", ".join(f"{axis} {value}" for axis, value in best.items())
        lines.append(f"{name}: {count} trials chose {chosen}")
        for axis, values in study.tune.items():
            at_end = best[axis] in (min(values), max(values))
            if type(best[axis]) in (int, float) and at_end and best[axis] != 0:
                lines.append(f"{name}: the best {axis} is at the end of its axis: extend it")
    return lines


def scaling_text(grid: Grid, law: FittedLaw | None, target: float | None) -> str:
    """Returns a scaling study as Markdown: the law, its remarks, with the best run of `target` FLOPs, the runs."""
    parts, runs = ["Law"], grid.runs
    if law is None:
        lines = [
            f"no law: a fit needs at least {FEWEST_RUNS} finished runs and {FEWEST_BUDGETS} budgets"
        ]
    else:
        parts.append(markdown(("law", "value", "95% interval"), law_rows(law)))
        lines = [form_remark(law), *(target_remarks(grid, law, target) if target else [])]
    lines += [
        f"with {short_number(budget, True)} FLOPs fewer than {SIDE} sizes stand on a side of the lowest loss, as others repeat the "
        "data too often or have too few updates: its minimum is not certain"
        for budget, trials in runs.items()
        if not SIDE <= grid.lowest(trials) < len(trials) - SIDE
    ]
    results = [grid.engine.results.get(trial.id) for trials in runs.values() for trial in trials]
    lines += caveats(grid.base.recipe, [*filter(None, results)])
    return "\n\n".join([*parts, bullets(lines), "Runs", markdown(RUNS, run_rows(grid))])


def run_rows(grid: Grid) -> dict[str, list[str]]:
    """Returns loss, parameters and tokens of each run."""
    return {
        f"{short_number(budget, True)} FLOPs, width {trial.config.n_embd}": [
            f"{grid.loss(trial):.4f}" if trial.id in grid.engine.results else "missing",
            short_number(trial.shape.parameter_count),
            short_number(trial.tokens),
        ]
        for budget, trials in grid.runs.items()
        for trial in trials
    }


def law_rows(law: FittedLaw) -> dict[str, list[str]]:
    """Returns value and interval of each parameter of the law; no interval if the form does not hold."""
    rows = {}
    for name, value, *drawn in zip(UNKNOWNS, law.law, *law.samples, strict=False):
        low, high = bootstrap_interval(drawn)
        rows[name] = [f"{value:.4g}", f"{low:.4g} to {high:.4g}" if law.holds else "none"]
    return rows


def form_remark(law: FittedLaw) -> str:
    """Returns whether the law's form holds over its runs."""
    tests = ", ".join(f"by {name} p = {p:.2g}" for name, p in law.form.items())
    tests = f"F tests of the residuals' means {tests or 'need more runs'}"
    if law.holds:
        return f"no test refuses the form of the law: {tests}; the residuals spread by {law.spread:.4f} nats"
    return (
        f"do not extrapolate this law: its form does not hold over its own runs, and no interval covers that error ({tests}); add a "
        "larger budget and leave out the smallest"
    )


def target_remarks(grid: Grid, law: FittedLaw, flops: float) -> list[str]:
    """Returns the best run with `flops` FLOPs, its predicted loss, and its command, or that there is none."""
    if not law.has_best:
        return ["the law has no best size, since a term is 0: add a larger budget"]
    run = grid.best(law, flops)
    N, D, epochs = run.shape.parameter_count, run.tokens, grid.epochs(run)
    sure = "without an interval, since the law does not fit its own runs"
    if law.holds:
        sure = "95% interval {:.4f} to {:.4f}".format(*law.interval(N, D))
    size = f"{short_number(flops, True)} FLOPs, {flops / grid.budgets[-1]:.3g} times the largest budget,"
    lines = [
        f"the best run with {size} has {short_number(N)} parameters and {short_number(D)} tokens, {epochs:.2g} times the data: "
        f"val/loss {loss_of(law.law, N, D):.4f}, {sure}, by these settings and on this text",
        f"train it: gpt2-accel {shlex.join([run.recipe.stem, *grid.words(run, f'best-{flops:.3g}')])}",
    ]
    if epochs > grid.max_epochs:
        lines.append("the law knows no repetition of data: prepare more text for the best run")
    return lines


def runs_figure(grid: Grid, law: FittedLaw | None) -> "Figure":
    """Draws the loss over the size for each budget, with the law's."""
    figure, ax = new_figure("val/loss in nats per token by budget in FLOPs; lines: the fitted law")
    for (budget, trials), colour in zip(grid.runs.items(), cycle(COLOURS), strict=False):
        N, D = np.array([(trial.shape.parameter_count, trial.tokens) for trial in trials], float).T
        label = short_number(budget, True)
        ax.plot(N, [*map(grid.loss, trials)], "o", color=colour, markersize=4, label=label)
        if law:
            ax.plot(N, loss_of(law.law, N, D), linewidth=1.3, color=colour)
    ax.set_xscale("log")
    ax.set_xlabel("parameters")
    add_legend(ax)
    return figure

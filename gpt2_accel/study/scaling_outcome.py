"""Formats the outcome of a scaling study as text and as a page."""

from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_accel.estimate.law import UNKNOWNS, FittedLaw, bootstrap_interval, holds, loss_of
from gpt2_accel.report.figures import COLOURS, INK, new_figure, set_title, short_number
from gpt2_accel.report.page import Page, bullets, markdown, save_page, table
from gpt2_accel.study.scaling import FEWEST_BUDGETS, FEWEST_RUNS, SIDE, Run, Scaling, lowest
from gpt2_accel.study.trials import caveats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUNS, LAW = (
    ["FLOPs", "val/loss", "parameters", "tokens"],
    ["law", "value", "95% interval"],
)
BEST = (
    "n_layer",
    "n_head",
    "n_embd",
    "total_batch_size",
    "max_steps",
)  # what `--law` needs for the best run


def scientific(value: float) -> str:
    """Formats FLOPs: 1e12, 3.5e13."""
    return f"{value:.3g}".replace("e+", "e")


def run_rows(runs: list[Run]) -> dict[str, list[str]]:
    """Returns loss, parameters and tokens of each run."""
    return {
        f"{scientific(run.budget)}, width {run.trial.config.n_embd}": [
            "missing" if run.result is None else f"{run.loss:.4f}",
            short_number(run.N),
            short_number(run.tokens),
        ]
        for run in runs
    }


def law_rows(law: FittedLaw) -> dict[str, list[str]]:
    """Returns value and interval of each parameter of the law; no interval if the form does not hold."""
    rows = {}
    for name, value, *drawn in zip(UNKNOWNS, law.law, *law.samples, strict=False):
        interval = (
            "{:.4g} to {:.4g}".format(*bootstrap_interval(drawn)) if holds(law.form) else "none"
        )
        rows[name] = [f"{value:.4g}", interval]
    return rows


def form_remark(law: FittedLaw) -> str:
    """Returns whether the law's form holds over its runs."""
    tests = [
        f"by {name} {'p < 0.001' if p < 0.001 else f'p = {p:.2g}'}" for name, p in law.form.items()
    ]
    tests = f"F tests of the residuals' means {', '.join(tests) or 'need more runs'}"
    if holds(law.form):
        return f"no test refuses the form of the law: {tests}; the residuals spread by {law.spread:.4f} nats"
    return (
        f"do not extrapolate this law: its form does not hold over its own runs, and no interval covers that error ({tests}); add a "
        "larger budget and leave out the smallest"
    )


def target_remarks(outcome: Scaling, flops: float) -> list[str]:
    """Returns the best run with `flops` FLOPs, its prediction and its settings, or that there is none."""
    _, A, _, B, _ = outcome.law.law
    if A == 0 or B == 0:
        return ["the law has no best size, since a term is 0: add a larger budget"]
    grid, run = outcome.grid, outcome.grid.best(outcome.law, flops)
    settings, epochs = run.trial.config, grid.epochs(run)
    words = " ".join(f"--{name} {getattr(settings, name)}" for name in BEST)
    lines = [
        f"the best run with {scientific(flops)} FLOPs has {short_number(run.N)} parameters and {short_number(run.tokens)} tokens: "
        f"{outcome.law.predict(run.N, run.tokens, flops)}. Train it with --law and {words}"
    ]
    if epochs > grid.max_epochs:
        lines.append(
            f"it reads the data {epochs:.1f} times, and the law knows no repetition: prepare more text"
        )
    return lines


def remarks(outcome: Scaling, target: float | None) -> list[str]:
    """Returns what else is to be said: the law's form, the best run with `target` FLOPs, uncertain minima, failures."""
    law, grid, lines = outcome.law, outcome.grid, []
    if law is None:
        lines.append(
            f"no law: a fit needs at least {FEWEST_RUNS} finished runs and {FEWEST_BUDGETS} budgets"
        )
    else:
        lines.append(form_remark(law))
        lines += target_remarks(outcome, target) if target else []
    for budget in grid.budgets:
        place, last = lowest(runs := outcome.of(budget)), len(runs) - 1
        if min(place, last - place) < SIDE:
            side = "smaller" if place < SIDE else "larger"
            lines.append(
                f"with {scientific(budget)} FLOPs fewer than {SIDE} {side} sizes stand beside the lowest loss, as others repeat the data "
                "too often or have too few updates: its minimum is not certain"
            )
    results = [run.result for run in outcome.runs if run.result]
    return lines + caveats(grid.base.recipe, results, outcome.failed)


def as_text(outcome: Scaling, target: float | None) -> str:
    """Returns the outcome as Markdown tables and remarks. `target` is in FLOPs."""
    parts = [markdown(RUNS, run_rows(outcome.runs))]
    if outcome.law is not None:
        parts.append(markdown(LAW, law_rows(outcome.law)))
    parts.append("\n".join(f"- {line}" for line in remarks(outcome, target)))
    return "\n\n".join(parts)


def write_page(outcome: Scaling, folder: Path, target: float | None) -> Path:
    """Writes `scaling.html` into `folder`; returns its path."""
    page = Page()
    page.section("Remarks", bullets(remarks(outcome, target)))
    caption = "Each point is a run, each colour a budget in FLOPs. The lines are the fitted law. A pattern in the residuals means "
    caption += "that the law has the wrong form."
    page.section("Equal FLOPs", page.picture("budgets", partial(runs_figure, outcome), caption))
    if outcome.law is not None:
        page.section("Law", table(LAW[1:], law_rows(outcome.law)))
    page.section("Runs", table(RUNS[1:], run_rows(outcome.runs)))
    return save_page(page, "Scaling law", folder, "scaling.html")


def runs_figure(outcome: Scaling, width: float) -> "Figure":
    """Draws the loss over the size for each budget, with the law's, and below it the residuals."""
    law = outcome.law
    figure, axes = new_figure(width, 6.5 if law else 4, 2 if law else 1)
    for budget, colour in zip(outcome.grid.budgets, cycle(COLOURS), strict=False):
        N, D, losses = np.array([(run.N, run.tokens, run.loss) for run in outcome.of(budget)]).T
        style = {"color": colour, "markersize": 4}
        axes[0, 0].plot(N, losses, "o", label=scientific(budget), **style)
        if law is not None:
            fitted = loss_of(law.law, N, D)
            axes[0, 0].plot(N, fitted, linewidth=1.3, **style)
            axes[1, 0].plot(N, losses - fitted, "o", **style)
    for ax, title in zip(
        axes.flat,
        ("val/loss in nats per token, by budget in FLOPs", "residuals: loss less the law's"),
        strict=False,
    ):
        set_title(ax, title)
        ax.set_xscale("log")
        ax.set_xlabel("parameters")
    axes[0, 0].legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure

"""Formats a scaling study: the grid before training, then the outcome as text and as a page."""

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from gpt2_accel.config import TrainConfig
from gpt2_accel.estimate.flops import duration
from gpt2_accel.estimate.law import UNKNOWNS, FittedLaw, bootstrap_interval
from gpt2_accel.files import readable_size, write_file
from gpt2_accel.report.figures import COLOURS, INK, WIDE, new_figure, set_title, short_number
from gpt2_accel.report.page import Page, bullets, markdown, save_page, table
from gpt2_accel.study.engine import Engine
from gpt2_accel.study.scaling import (
    FEWEST_BUDGETS,
    FEWEST_RUNS,
    FEWEST_SIZES,
    SIDE,
    Grid,
    Run,
    Scaling,
    best_run,
    best_size,
    memory,
)
from gpt2_accel.study.trials import caveats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def scientific(value: float) -> str:
    """Formats FLOPs: 1e12, 3.5e13."""
    return f"{value:.3g}".replace("e+", "e")


def short(value: float) -> str:
    """Formats a size or a number of tokens with three digits: 1.39M."""
    return short_number(float(f"{value:.3g}"))


def name_of(run: Run) -> str:
    """Names a run by its budget and its width."""
    return f"{scientific(run.budget)}, width {run.trial.config.n_embd}"


def grid_as_text(grid: Grid, engine: Engine, speed: float) -> str:
    """Returns the first runs of each budget, what they take at `speed` FLOP/s, and how often they read the data.

    Raises `ValueError` for a grid that repeats the data too often."""
    runs = [grid.run(place, b) for b in grid.budgets for place in grid.first(b)]
    rows = {}
    for run in runs:
        config = run.trial.config
        rows[name_of(run)] = [
            f"{config.n_layer}",
            short_number(run.parameters()),
            short_number(run.tokens),
            f"{config.total_batch_size:,}",
            f"{config.learning_rate:.4f}",
            f"{config.max_steps:,}",
            f"{grid.epochs(run):.2g}",
            readable_size(memory(run)),
        ]
    heads = [
        "run",
        "layers",
        "parameters",
        "tokens",
        "batch",
        "rate",
        "updates",
        "epochs",
        "memory",
    ]
    missing = [run for run in runs if not engine.knows(run.trial)]
    seconds = sum(run.budget for run in missing) / speed
    lines = [
        f"{len(runs)} runs, {len(missing)} of them not recorded; a budget grows until {SIDE} sizes lie on each side of the lowest "
        "loss",
        f"{duration(seconds)} for those not recorded at {scientific(speed)} FLOP/s, without the start of each and its evaluation; "
        "small models may be slower",
        f"a run reads the data at most {max(map(grid.epochs, runs)):.2g} times; {grid.max_epochs:g} are allowed",
    ]
    return markdown(heads, rows) + "\n\n" + "\n".join(f"- {line}" for line in lines)


def run_rows(outcome: Scaling) -> dict[str, list[str]]:
    """Returns loss, parameters and tokens of each run."""
    rows = {}
    for budget, runs in outcome.runs.items():
        for place, run in enumerate(runs):
            loss = "missing" if run.result is None else f"{run.loss:.4f}"
            loss += ", lowest" * (place == outcome.best(budget) and math.isfinite(run.loss))
            rows[name_of(run)] = [loss, short_number(run.parameters()), short_number(run.tokens)]
    return rows


def law_rows(law: FittedLaw) -> dict[str, list[str]]:
    """Returns value and interval of each parameter of the law; no interval if the form does not hold."""
    intervals = [bootstrap_interval(own) for own in np.array(law.samples).T]
    return {
        name: [f"{value:.4g}", "{:.4g} to {:.4g}".format(*own) if law.holds else "none"]
        for name, value, own in zip(UNKNOWNS, law.law, intervals, strict=False)
    }


def best_rows(outcome: Scaling, target: float | None) -> dict[str, list[str]]:
    """Returns the loss, the best size and the best number of tokens for each budget and the target."""
    rows, law = {}, outcome.law
    for flops in filter(None, [*outcome.grid.budgets, target]):
        best = best_size(law, flops)
        rows[scientific(flops)] = [f"{law.point.loss(best.N, best.D):.3f}"] + [
            short(value) + (f" ({short(low)} to {short(high)})" if law.holds else "")
            for value, (low, high) in ((best.N, best.N_interval), (best.D, best.D_interval))
        ]
    return rows


def form_remarks(outcome: Scaling) -> list[str]:
    """Returns whether the law's form holds over its runs, and the means of the residuals if it does not."""
    law = outcome.law
    tests = ", ".join(
        f"by {name} {'p < 0.001' if p < 0.001 else f'p = {p:.2g}'}" for name, p in law.form.items()
    )
    tests = f"F tests of the residuals' means {tests or 'need more runs'}"
    if law.holds:
        return [
            f"no test refuses the form of the law: {tests}; the residuals spread by {law.spread:.4f} nats"
        ]
    means = ", ".join(
        f"{scientific(budget)} {np.mean(own):+.3f}"
        for budget, (*_, own) in points_of(outcome, residuals=True).items()
        if own
    )
    return [
        f"do not extrapolate this law: its form does not hold over its own runs, and no interval covers that error ({tests}; mean "
        f"residual in nats by FLOPs: {means}); add a larger budget and leave out the smallest"
    ]


def remarks(outcome: Scaling, target: float | None) -> list[str]:
    """Returns what else is to be said: the law's form, the best run, the minima, failures."""
    law, grid, lines = outcome.law, outcome.grid, []
    if law is None:
        lines.append(
            f"no law: a fit needs at least {FEWEST_RUNS} finished runs, {FEWEST_SIZES} sizes and {FEWEST_BUDGETS} budgets"
        )
    else:
        lines += form_remarks(outcome)
        if target:
            run = best_run(outcome, target)
            lines.append(f"the best run with {scientific(target)} FLOPs: {described(outcome, run)}")
            if (epochs := grid.epochs(run)) > grid.max_epochs:
                lines.append(
                    f"it reads the data {epochs:.1f} times, and the law knows no repetition: prepare more text"
                )
        ends = [law.sizes.N[0], law.sizes.N[-1]]
        at_end = [
            scientific(flops)
            for flops in filter(None, [*grid.budgets, target])
            if best_size(law, flops).N in ends
        ]
        if at_end:
            lines.append(
                f"the best size with {', '.join(at_end)} FLOPs is the smallest or the largest of all: the law does not determine it"
            )
    results = [run.result for runs in outcome.runs.values() for run in runs if run.result]
    if diverged := sum(result.diverged for result in results):
        lines.append(f"{diverged} of {len(results)} runs diverged: lower --learning_rate")
    for budget in outcome.edges:
        low = outcome.best(budget) < SIDE
        side, why = (
            ("smaller", "do not exist, or repeat the data too often")
            if low
            else ("larger", "have too few updates")
        )
        lines.append(
            f"with {scientific(budget)} FLOPs fewer than {SIDE} {side} sizes stand beside the lowest loss: its minimum is not "
            f"certain, and {side} ones {why}"
        )
    finished = [run.result for run in outcome.finished]
    return lines + caveats(grid.base.recipe, finished, outcome.failed)


def described(outcome: Scaling, run: Run) -> str:
    """Returns a run's size, tokens and prediction."""
    config = run.trial.config
    return (
        f"{config.n_layer} layers of {config.n_embd}, {short_number(run.tokens)} tokens, predicted "
        f"{outcome.law.predict(run.shape, run.tokens)}"
    )


def tables(outcome: Scaling, target: float | None) -> dict[str, tuple[list[str], dict]]:
    """Returns heads and rows of the outcome's tables, by title."""
    found = {"Runs": (["FLOPs", "val/loss", "parameters", "tokens"], run_rows(outcome))}
    if outcome.law is not None:
        found["Law"] = ["law", "value", "95% interval"], law_rows(outcome.law)
        found["Best size"] = ["FLOPs", "loss", "best N", "best tokens"], best_rows(outcome, target)
    return found


def as_text(outcome: Scaling, target: float | None) -> str:
    """Returns the outcome as Markdown tables and remarks. `target` is in FLOPs."""
    lines = "\n".join(f"- {line}" for line in remarks(outcome, target))
    return "\n\n".join([*(markdown(*own) for own in tables(outcome, target).values()), lines])


def write_best(outcome: Scaling, flops: float, folder: Path) -> Path:
    """Writes `best.yaml`, the settings of the best run with `flops` FLOPs, with its prediction as a comment; returns its path."""
    run, path = best_run(outcome, flops), folder / "best.yaml"
    own = {"eval_every": TrainConfig.eval_every, "law": str(folder / "law.json")}
    own["output_dir"] = str(folder / f"best-{scientific(flops)}")
    text = yaml.safe_dump({**run.trial.changes, **own}, sort_keys=False)
    write_file(path, f"# {scientific(flops)} FLOPs: {described(outcome, run)}\n{text}")
    return path


def write_page(outcome: Scaling, folder: Path, target: float | None) -> Path:
    """Writes `scaling.html` into `folder`; returns its path."""
    page = Page()
    page.section("Remarks", bullets(remarks(outcome, target)))
    caption = "Each point is a run, each colour a budget in FLOPs. The lines are the fitted law."
    draw = partial(runs_figure, outcome, residuals=False)
    page.section("Equal FLOPs", page.picture("budgets", draw, caption))
    if outcome.law is not None:
        caption = "The measured loss less that of the law. A pattern means that the law has the wrong form."
        draw = partial(runs_figure, outcome, residuals=True)
        page.section("Residuals", page.picture("residuals", draw, caption))
    for title, (heads, rows) in reversed(tables(outcome, target).items()):
        page.section(title, table(heads[1:], rows))
    return save_page(page, "Scaling law", folder, "scaling.html")


def points_of(outcome: Scaling, residuals: bool) -> dict[float, tuple[list[float], list[float]]]:
    """Returns N and the loss of the finished runs, or the loss less that of the law, by budget."""
    found = {}
    for budget, runs in outcome.runs.items():
        own = [run for run in runs if math.isfinite(run.loss)]
        N = [float(run.parameters()) for run in own]
        laws = [residuals and outcome.law.point.loss(run.parameters(), run.tokens) for run in own]
        found[budget] = N, [run.loss - law for run, law in zip(own, laws, strict=True)]
    return found


def runs_figure(outcome: Scaling, width: float, residuals: bool) -> "Figure":
    """Draws the loss over the size for each budget, with the law's curves, or the residuals."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure, [[ax]] = new_figure(width, 2.8 if residuals else 4.2 if width == WIDE else 3.6)
    for number, (budget, (N, values)) in enumerate(points_of(outcome, residuals).items()):
        style = {"color": COLOURS[number % len(COLOURS)], "label": scientific(budget)}
        ax.plot(N, values, "o", markersize=4, **style)
        if outcome.law is not None and N and not residuals:
            x = np.geomspace(min(N), max(N), 100)
            each = np.exp(np.interp(np.log(x), *np.log(outcome.law.sizes)))
            law = outcome.law.point.loss(x, budget / each)
            ax.plot(x, law, color=style["color"], linewidth=1.3)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: short_number(value))
    ax.set_xlabel("parameters")
    if residuals:
        ax.axhline(0, color=INK, linewidth=1)
        set_title(ax, "measured loss less the law's, in nats per token")
    else:
        set_title(ax, "val/loss in nats per token, by budget in FLOPs")
        ax.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure

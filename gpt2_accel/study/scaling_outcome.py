"""Formats a scaling study: the grid before training, then the outcome as text and as a page."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from gpt2_accel.config import TrainConfig
from gpt2_accel.estimate.flops import duration
from gpt2_accel.estimate.law import bootstrap_interval, off
from gpt2_accel.files import readable_size, write_file
from gpt2_accel.report.figures import (
    COLOURS,
    INK,
    WIDE,
    new_figure,
    set_title,
    short_number,
)
from gpt2_accel.report.page import Page, bullets, markdown, save_page, table
from gpt2_accel.study.engine import Engine
from gpt2_accel.study.law_fit import LEAST, MOST
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
from gpt2_accel.study.trials import code_fingerprint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNKNOWNS = ("E", "A", "alpha", "B", "beta")
RUN_HEADS = ["val/loss", "parameters", "tokens"]
LAW_HEADS = ["value", "95% interval"]
BEST_HEADS = ["loss", "best N", "best tokens"]


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
    heads = ["run", "layers", *RUN_HEADS[1:], "batch", "rate", "updates", "epochs", "memory"]
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


def law_rows(outcome: Scaling) -> dict[str, list[str]]:
    """Returns value and interval of each parameter of the law."""
    samples = np.array(outcome.law.samples).T
    return {
        name: [f"{value:.4g}", "{:.4g} to {:.4g}".format(*bootstrap_interval(own))]
        for name, value, own in zip(UNKNOWNS, outcome.law.law, samples, strict=True)
    }


def best_rows(outcome: Scaling, target: float | None) -> dict[str, list[str]]:
    """Returns the loss, the best size and the best number of tokens for each budget and the target."""
    rows, law = {}, outcome.law
    for flops in [*outcome.grid.budgets, *([target] if target else [])]:
        best = best_size(law, flops)
        rows[scientific(flops)] = [f"{law.point.loss(best.N, best.D):.3f}"] + [
            f"{short(value)} ({short(low)} to {short(high)})"
            for value, (low, high) in ((best.N, best.N_interval), (best.D, best.D_interval))
        ]
    return rows


def remarks(outcome: Scaling, target: float | None) -> list[str]:
    """Returns what else is to be said: the fit, the minima, repeated data, failures."""
    law, grid, lines = outcome.law, outcome.grid, []
    if law is None:
        lines.append(
            f"no law: a fit needs at least {FEWEST_RUNS} finished runs, {FEWEST_SIZES} sizes and {FEWEST_BUDGETS} budgets"
        )
    else:
        counts = {True: "with embeddings", False: "without embeddings"}
        lines.append(
            f"N counts the parameters {counts[law.embeddings]}: the residuals have a standard deviation of {law.spread:.4f} nats, "
            f"and of {outcome.by_count[not law.embeddings]:.4f} {counts[not law.embeddings]}"
        )
        lines += [
            f"{name} is {value:.3g}, a bound of the search: the runs do not determine it, add budgets"
            for name, value in zip(UNKNOWNS, law.law, strict=True)
            if value == 0 or (name in ("alpha", "beta") and not inside(value))
        ]
        if law.held_out is not None:
            lines.append(
                f"the runs of {scientific(max(grid.budgets))} FLOPs lie {off(law.held_out)} what a law of the smaller budgets predicts, "
                "on average: expect such an error beside the interval of a prediction"
            )
        if target:
            run = best_run(outcome, target)
            lines.append(f"the best run with {scientific(target)} FLOPs: {described(outcome, run)}")
            if (epochs := grid.epochs(run)) > grid.max_epochs:
                lines.append(
                    f"it reads the data {epochs:.1f} times, and the law knows no repetition: prepare more text"
                )
        lines += [
            f"the best size with {scientific(flops)} FLOPs is the {'smallest' if N == law.sizes.N[0] else 'largest'} of all: the "
            "law does not determine it"
            for flops in filter(None, [*grid.budgets, target])
            if (N := best_size(law, flops).N) in (law.sizes.N[0], law.sizes.N[-1])
        ]
    results = [run.result for runs in outcome.runs.values() for run in runs if run.result]
    if diverged := sum(result.diverged for result in results):
        lines.append(f"{diverged} of {len(results)} runs diverged: lower --learning_rate")
    for budget in outcome.edges:
        low = outcome.best(budget) < SIDE
        side, more = (
            ("smaller", "do not exist, or repeat the data too often")
            if low
            else (
                "larger",
                "have too few updates",
            )
        )
        lines.append(
            f"with {scientific(budget)} FLOPs fewer than {SIDE} {side} sizes stand beside the lowest loss: its minimum is not "
            f"certain, and {side} ones {more}"
        )
    if outcome.unused:
        lines.append(
            f"{outcome.unused} recorded runs are of other budgets or settings, and are not used"
        )
    used = [run.result for run in outcome.finished]
    other = sum(r.code != code_fingerprint(grid.base.recipe) for r in used)
    if other:
        lines.append(
            f"{other} of {len(used)} runs were recorded by other code than this: another --output_dir trains all of them again"
        )
    return lines + [f"run {id} failed: {reason}" for id, reason in outcome.failed.items()]


def inside(exponent: float) -> bool:
    """Whether an exponent is not at a bound of the search."""
    return LEAST * 1.01 < exponent < MOST * 0.99


def described(outcome: Scaling, run: Run) -> str:
    """Returns a run's size, tokens and prediction."""
    config = run.trial.config
    return (
        f"{config.n_layer} layers of {config.n_embd}, {short_number(run.tokens)} tokens, predicted "
        f"{outcome.law.predict(run.shape, run.tokens)}"
    )


def as_text(outcome: Scaling, target: float | None) -> str:
    """Returns the outcome as Markdown tables and remarks. `target` is in FLOPs."""
    parts = [markdown(["FLOPs", *RUN_HEADS], run_rows(outcome))]
    if outcome.law is not None:
        parts.append(markdown(["law", *LAW_HEADS], law_rows(outcome)))
        parts.append(markdown(["FLOPs", *BEST_HEADS], best_rows(outcome, target)))
    parts.append("\n".join(f"- {line}" for line in remarks(outcome, target)))
    return "\n\n".join(parts)


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
    if outcome.law is not None:
        page.section("Best size", table(BEST_HEADS, best_rows(outcome, target)))
    page.section("Remarks", bullets(remarks(outcome, target)))
    caption = "Each point is a run, each colour a budget in FLOPs. The lines are the fitted law."
    draw = partial(budgets_figure, outcome)
    page.section("Equal FLOPs", page.picture("budgets", draw, caption))
    if outcome.law is not None:
        caption = "The measured loss less that of the law. A pattern would mean that the law has the wrong form."
        draw = partial(residuals_figure, outcome)
        page.section("Residuals", page.picture("residuals", draw, caption))
        caption = "The line is the law's best, the band its 95% interval; points are the lowest losses of the grid."
        draw = partial(best_figure, outcome, target)
        page.section("Best size and tokens", page.picture("best", draw, caption))
        page.section("Law", table(LAW_HEADS, law_rows(outcome)))
    page.section("Runs", table(RUN_HEADS, run_rows(outcome)))
    return save_page(page, "Scaling law", folder, "scaling.html")


def log_axis(axis: object, steps: Sequence[float] = (1, 2, 5)) -> None:
    """Labels a logarithmic axis at `steps` of each decade."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_minor_locator(NullLocator())


def size_axis(ax: "Axes", outcome: Scaling) -> None:
    """Makes the horizontal axis one of parameters."""
    ax.set_xscale("log")
    log_axis(ax.xaxis)
    ax.xaxis.set_major_formatter(lambda value, _: short_number(value))
    count = "" if outcome.law is None or outcome.law.embeddings else " without embeddings"
    ax.set_xlabel(f"parameters{count}")


def points_of(outcome: Scaling) -> dict[float, tuple[list[float], list[float], list[float]]]:
    """Returns N as the law counts it, D and the loss of the finished runs, by budget."""
    embeddings = outcome.law is None or outcome.law.embeddings
    found = {}
    for budget, runs in outcome.runs.items():
        own = [r for r in runs if math.isfinite(r.loss)]
        found[budget] = (
            [float(run.parameters(embeddings)) for run in own],
            [float(run.tokens) for run in own],
            [run.loss for run in own],
        )
    return found


def budgets_figure(outcome: Scaling, width: float) -> "Figure":
    """Draws the loss over the size for each budget, with the law's curves."""
    figure, [[ax]] = new_figure(width, 4.2 if width == WIDE else 3.6)
    for number, (budget, (N, _, losses)) in enumerate(points_of(outcome).items()):
        colour = COLOURS[number % len(COLOURS)]
        ax.plot(N, losses, "o", color=colour, markersize=4, label=scientific(budget))
        if outcome.law is not None and N:
            x = np.geomspace(min(N), max(N), 100)
            each = np.exp(outcome.law.sizes.log_flops(np.log(x)))
            ax.plot(x, outcome.law.point.loss(x, budget / each), color=colour, linewidth=1.3)
    size_axis(ax, outcome)
    set_title(ax, "val/loss in nats per token, by budget in FLOPs")
    ax.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure


def residuals_figure(outcome: Scaling, width: float) -> "Figure":
    """Draws the measured loss less the law's, over the size."""
    figure, [[ax]] = new_figure(width, 2.8)
    for number, (N, D, losses) in enumerate(points_of(outcome).values()):
        law = outcome.law.point.loss(np.array(N), np.array(D))
        ax.plot(N, np.array(losses) - law, "o", color=COLOURS[number % len(COLOURS)], markersize=4)
    ax.axhline(0, color=INK, linewidth=1)
    size_axis(ax, outcome)
    set_title(ax, "measured loss less the law's, in nats per token")
    return figure


def best_figure(outcome: Scaling, target: float | None, width: float) -> "Figure":
    """Draws the best size and the best number of tokens over the FLOPs, with their intervals."""
    rows, columns = (1, 2) if width == WIDE else (2, 1)
    figure, axes = new_figure(width, 3.2 * rows, rows, columns)
    budgets = outcome.grid.budgets
    x = np.geomspace(min(budgets) / 1.5, 1.5 * max(*budgets, target or 0), 24)
    best = [best_size(outcome.law, flops) for flops in x]
    points = points_of(outcome)
    for index, (ax, name) in enumerate(zip(axes.flat, ("best size", "best tokens"), strict=True)):
        low, high = np.array([found[index + 2] for found in best]).T
        ax.fill_between(x, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
        ax.plot(x, [found[index] for found in best], color=COLOURS[0])
        for budget in budgets:
            values, losses = points[budget][index], points[budget][2]
            if losses:
                ax.plot(budget, values[np.argmin(losses)], "o", color=COLOURS[1], markersize=4)
        if target:
            ax.axvline(target, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        ax.set_xscale("log")
        ax.set_yscale("log")
        log_axis(ax.xaxis, (1, 3))
        log_axis(ax.yaxis)
        ax.xaxis.set_major_formatter(lambda value, _: scientific(value))
        ax.yaxis.set_major_formatter(lambda value, _: short_number(value))
        ax.set_xlabel("FLOPs")
        set_title(ax, name + (", with the target" if target else ""))
    return figure

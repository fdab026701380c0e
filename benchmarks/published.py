"""Computes the tables of the published studies from their recorded runs: docs/scaling.md and docs/results.md.

`python benchmarks/table.py` writes them between the pages' markers, `tests/benchmarks/test_published.py` compares the pages.
"""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from table import markdown

from gpt2_accel.study.intervals import interval
from gpt2_accel.study.law import UNKNOWNS, bootstrap_interval, fit, loss_of

# Budgets in FLOPs, parameters and tokens of the run that was predicted, and the law's file of that day.
LAWS = (
    ((5e11, 1e12, 2e12, 4e12, 1e13), (803_200, 4706 * 4096), "law-1e14.json"),
    ((2e12, 4e12, 1e13, 2e13), (803_200, 4706 * 8192), "law-2e14.json"),
)
SETTINGS = (
    "optimizer",
    "learning_rate",
    "total_batch_size",
    "lr_schedule",
    "min_lr_ratio",
    "weight_decay",
)
SETTINGS += ("beta2", "warmup_share")
# The table of each corpus, and AdamW's and Muon's settings by `SETTINGS`.
OPTIMIZERS = {
    "Python's library": (
        "muon_python.csv",
        ("adamw", 0.002, 192, "wsd", 0.1, 0.0, 0.9999, 0.1),
        ("muon", 0.022, 768, "linear", 0.03, 0.1, 0.999, 0.05),
    ),
    "tiny Shakespeare": (
        "muon_shakespeare.csv",
        ("adamw", 0.0056, 192, "wsd", 0.03, 0.03, 0.8, 0.1),
        ("muon", 0.011, 384, "linear", 0.0, 0.1, 0.95, 0.003),
    ),
}


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a study's table, with numbers and settings."""
    with path.open(encoding="utf-8") as file:
        rows = [{**row, **json.loads(row["settings"])} for row in csv.DictReader(file)]
    for row in rows:
        row |= {name: float(row[name]) for name in ("parameters", "tokens", "flops", "loss")}
        row["warmup_share"] = row.get("warmup_steps", 0) / row["max_steps"]
    return rows


def scaling(folder: Path) -> str:
    """Returns the table of both laws: the fit, the tests of its form, the predictions."""
    folder = folder / "cpu/scaling"
    runs = read_runs(folder / "runs.csv")
    columns = [
        law_column(runs, budgets, target)
        | {"predicted before the run": predicted(folder / name, target)}
        for budgets, target, name in LAWS
    ]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return markdown(("", "first", "second"), rows)


def predicted(path: Path, target: tuple[int, int]) -> str:
    """Returns the prediction and the interval that the release of that day computed from a law's draws: their quantiles and 1.96
    standard deviations of the residuals, as roots of sums of squares."""
    law = json.loads(path.read_text(encoding="utf-8"))
    loss = loss_of(law["law"], *target)
    drawn = loss_of(np.array(law["samples"]).T, *target)
    low, high = (
        loss + math.copysign(math.hypot(end - loss, 1.96 * law["spread"]), end - loss)
        for end in bootstrap_interval(drawn)
    )
    return f"{loss:.3f}, {low:.3f} to {high:.3f}"


def law_column(
    runs: list[dict], budgets: Sequence[float], target: tuple[int, int]
) -> dict[str, str]:
    """Returns the cells of one law."""
    nearest = [min(budgets, key=lambda b, run=run: abs(math.log(run["flops"] / b))) for run in runs]
    own = [
        (run["parameters"], run["tokens"], run["loss"], budget)
        for run, budget in zip(runs, nearest, strict=True)
        if abs(run["flops"] / budget - 1) < 0.05  # whole updates
    ]
    N, D, losses, of = np.array(own).T
    found = fit(N, D, losses, of)
    law = found.law
    residuals = losses - loss_of(law, N, D)
    powers = [f"{budget:.0e}".replace("e+", "e") for budget in budgets]
    return {
        "budgets in FLOPs": f"{powers[0]} to {powers[-1]}, {len(own)} runs",
        **{name: f"{value:.3g}" for name, value in zip(UNKNOWNS, law, strict=True)},
        "standard deviation of the residuals": f"{found.spread:.3f}",
        "mean residual by budget": ", ".join(f"{residuals[of == b].mean():+.3f}" for b in budgets),
        **{
            f"F test by {name}": "p < 0.001" if p < 0.001 else f"p = {p:.2f}"
            for name, p in found.form.items()
        },
        "form": "holds" if found.holds else "refused",
        "loss of 2 layers of 160": f"{loss_of(law, *target):.3f} after {target[1] / 1e6:.2f}M tokens",
    }


def rates(folder: Path) -> str:
    """Returns the lowest loss and the best rate of each width."""
    by_width: dict[int, dict[float, float]] = {}
    for run in read_runs(folder / "cpu/scaling_rates.csv"):
        by_width.setdefault(run["n_embd"], {})[run["learning_rate"]] = run["loss"]
    rows = []
    for width, losses in sorted(by_width.items()):
        tried, best = sorted(losses), min(losses, key=losses.get)
        span, lowest = f"{tried[0]:g} to {tried[-1]:g}", f"{losses[best]:.3f} at {best:g}"
        rows.append([str(width), span, lowest, f"{best_rate(losses):.4f}"])
    return markdown(("width", "rates", "lowest loss", "minimum of the parabola"), rows)


def best_rate(losses: dict[float, float]) -> float:
    """Returns the minimum of a parabola in the logarithm of the rate through the lowest loss and up to two neighbours on each
    side. `losses` are by rate."""
    tried, best = sorted(losses), min(losses, key=losses.get)
    near = tried[max(0, tried.index(best) - 2) : tried.index(best) + 3]
    a, b, _ = np.polyfit(np.log(near), [losses[rate] for rate in near], 2)
    return math.exp(-b / (2 * a))


def widths(folder: Path) -> str:
    """Returns Muon's best rate by width on two corpora, and for each seed the power of the width that fits it."""
    rows, lines = [], []
    for corpus, name in (("Python's library", "python"), ("tiny Shakespeare", "shakespeare")):
        losses: dict[int, dict[int, dict[float, float]]] = {}  # by width, seed and rate
        for run in read_runs(folder / f"cpu/widths_{name}.csv"):
            by_seed = losses.setdefault(run["n_embd"], {}).setdefault(run["seed"], {})
            by_seed[run["learning_rate"]] = run["loss"]
        of_width = sorted(losses)
        found = [[best_rate(own) for _, own in sorted(losses[width].items())] for width in of_width]
        for width, best in zip(of_width, found, strict=True):
            lowest = [min(own.values()) for own in losses[width].values()]
            rates = ", ".join(f"{rate:.4f}" for rate in best)
            rows.append((corpus, str(width), rates, f"{np.mean(lowest):.3f}"))
        fits = [np.polyfit(np.log(of_width), np.log(best), 1) for best in zip(*found, strict=True)]
        power = plus_minus(np.array([slope for slope, _ in fits]), ".2f")
        at_768 = np.exp([slope * math.log(768) + start for slope, start in fits])
        values = f"{at_768.min():.4f} to {at_768.max():.4f}"
        lines.append(
            f"- {corpus}: the rate falls as the width to the power of {power}; at 768 {values}."
        )
    heads = ("corpus", "width", "best rate of each seed", "mean of the lowest losses")
    return "\n\n".join([markdown(heads, rows), "\n".join(lines)])


def optimizers(folder: Path) -> str:
    """Returns the table of AdamW's and Muon's losses, and Muon's share of the tokens."""
    rows, shares = [], []
    for corpus, (name, *settings) in OPTIMIZERS.items():
        runs = read_runs(folder / "cpu" / name)
        adamw, muon = (losses_of(runs, each) for each in settings)
        for tokens in sorted(adamw):
            losses = plus_minus(adamw[tokens]), plus_minus(muon[tokens])
            difference = plus_minus(muon[tokens] - adamw[tokens], "+.4f")
            rows.append((corpus, f"{tokens:,.0f}", *losses, difference))
        shares.append(f"{share(adamw, muon)} on {corpus}")
    return (
        f"{markdown(('corpus', 'tokens', 'AdamW', 'Muon', 'Muon - AdamW'), rows)}\n\n"
        f"Muon's tokens to AdamW's last loss, as a share of AdamW's: {', '.join(shares)}."
    )


def losses_of(runs: list[dict], settings: Sequence) -> dict[float, np.ndarray]:
    """Returns the losses of the seeds 1 to 5 by tokens, for settings by `SETTINGS`."""
    found: dict[float, dict[int, float]] = {}
    for run in runs:
        warmup = abs(run["warmup_share"] - settings[-1]) <= 0.6 / run["max_steps"]
        same = warmup and all(
            run[name] == value for name, value in zip(SETTINGS[:-1], settings, strict=False)
        )
        if same and run["seed"]:
            found.setdefault(run["tokens"], {})[run["seed"]] = run["loss"]
    return {tokens: np.array([own[seed] for seed in range(1, 6)]) for tokens, own in found.items()}


def share(adamw: dict[float, np.ndarray], muon: dict[float, np.ndarray]) -> str:
    """Returns the share of tokens, on the line through Muon's losses over the logarithm of the tokens, for each seed."""
    logs, last = np.log(sorted(muon)), max(adamw)
    shares = []
    for seed, goal in enumerate(adamw[last]):
        curve = [muon[tokens][seed] for tokens in sorted(muon)]
        shares.append(math.exp(np.interp(-goal, [-loss for loss in curve], logs)) / last)
    mean, half = interval(shares)
    return f"{mean:.1%} ± {half:.1%}"


def plus_minus(values: np.ndarray, form: str = ".3f") -> str:
    """Formats the mean ± half the width of the 95% interval."""
    mean, half = interval(values.tolist())
    return f"{mean:{form}} ± {half:{form.lstrip('+')}}"


def architectures(folder: Path) -> str:
    """Returns the losses of models that each add one change to the one before, after equal tokens and after equal time."""
    with (folder / "cpu/architectures.csv").open(encoding="utf-8") as file:
        runs = [row for row in csv.DictReader(file) if row["seed"] != "0"]  # which tuned the rate
    rows = {name: [name] for name in dict.fromkeys(run["model"] for run in runs)}
    heads = ["model"]
    for corpus, name in (
        ("Python", "data/python_stdlib"),
        ("Shakespeare", "data/shakespeare_char"),
    ):
        heads += [f"{corpus}: equal tokens", "change", "equal time"]
        before = None
        for model, row in rows.items():
            found: dict[int, dict[str, float]] = {}
            for run in runs:
                if (run["corpus"], run["model"]) == (name, model):
                    found.setdefault(int(run["tokens"]), {})[run["seed"]] = float(run["loss"])
            last, timed = (
                np.array([loss for _, loss in sorted(found[of(found)].items())])
                for of in (max, min)
            )
            change = "" if before is None else plus_minus(last - before, "+.3f")
            row += [plus_minus(last), change, f"{timed.mean():.3f}"]
            before = last
    return markdown(heads, rows.values())


STUDIES = {
    "scaling": scaling,
    "rates": rates,
    "widths": widths,
    "optimizers": optimizers,
    "architectures": architectures,
}

"""Compares variants of a recipe: paired seeds, equal budgets, optional tuning, differences from the
baseline with intervals. docs/studies.md describes the YAML file of a study.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from gpt2_accel.config import load_yaml
from gpt2_accel.evals.results import markdown
from gpt2_accel.hf.loss_plot import short_number
from gpt2_accel.runtime.options import suggestion
from gpt2_accel.tools.study.runs import Queue
from gpt2_accel.tools.study.trials import Trial, read_trials

METRICS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
UNITS = ("tokens", "flops")
OWN = ("output_dir", "resume_from", "seed", "max_steps", "epochs")  # settings that the study sets
WARMUP = "warmup_share"  # share of the updates, in place of warmup_steps
ENDING = ("max_hours", "patience")  # settings that end a run before its budget
TUNING_SEED = 0
MOST_SEEDS = 1000  # a verdict asks for at most this many seeds

Settings = dict[str, Any]
At = tuple[str, float | None]  # a variant and a budget


class Point(NamedTuple):
    """A run to train. `tuned` are the settings that tuning varies or has chosen."""

    variant: str
    tuned: Settings
    seed: int
    budget: float | None


@dataclass
class Study:
    """The content of a study's YAML file. The first variant is the baseline.

    Raises `ValueError` for a value that a study cannot have.
    """

    recipe: str
    variants: dict[str, Settings]
    settings: Settings = field(default_factory=dict)
    budget: dict = field(default_factory=dict)
    seeds: int = 3
    metric: str = "loss"
    tune: dict[str, list] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.variants, dict) or not self.variants:
            raise ValueError("variants is empty: name at least one, such as `baseline: {}`")
        self.variants = {str(name): own or {} for name, own in self.variants.items()}
        self.baseline = next(iter(self.variants))
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        if type(self.seeds) is not int or self.seeds < 1:
            raise ValueError(f"seeds is {self.seeds!r}: give a number of at least 1")
        parts = {"settings": self.settings, "tune": self.tune, "budget": self.budget}
        for name, own in (parts | self.variants).items():
            if not isinstance(own, dict):
                raise ValueError(f"{name} is {own!r}: give `name: value` lines")
            for wrong in set(OWN) & set(own):
                raise ValueError(f"{name} sets {wrong}, which the study sets: leave it out")
        self.unit, self.budgets = read_budgets(self.budget)
        for name, values in self.tune.items():
            if not isinstance(values, list) or len(values) < 2:
                raise ValueError(
                    f"tune: {name} is {values!r}: give a list of at least two values; all "
                    "combinations are trained"
                )
            for variant, own in self.variants.items():
                if name in own:
                    raise ValueError(f"{variant} sets {name}, which tune also sets: leave one out")


def read_study(path: Path, recipes: Path) -> Study:
    """Reads a study's YAML file. A recipe that is not a `.py` file is one of the folder `recipes`.

    Raises `FileNotFoundError` if the file or the recipe is missing, `ValueError` for wrong values.
    """
    values = load_yaml(str(path), "STUDY.yaml")
    names = [part.name for part in fields(Study)]
    try:
        for name in values:
            if name not in names:
                raise ValueError(f"unknown part {name!r}{suggestion(str(name), names, '')}")
        study = Study(**{"recipe": None, "variants": {}} | values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    name = str(study.recipe)
    study.recipe = name if name.endswith(".py") else str(recipes / f"{name}.py")
    if not Path(study.recipe).is_file():
        raise FileNotFoundError(f"{path}: the recipe {study.recipe} does not exist")
    return study


def read_budgets(budget: Mapping[str, Any]) -> tuple[str, list[float | None]]:
    """Returns the unit of the budgets, and the budgets in ascending order; "" and [None] for the
    recipe's own `max_steps`. Raises `ValueError` for another unit or number."""
    if not budget:
        return "", [None]
    unit, amounts = next(iter(budget.items()))
    if len(budget) > 1 or unit not in UNITS:
        raise ValueError(f"budget has {', '.join(map(str, budget))}: give {' or '.join(UNITS)}")
    budgets = np.unique(np.array(amounts, float))  # YAML reads 1e6 as text
    if not budgets.size or not np.isfinite(np.log(budgets)).all():
        raise ValueError(f"budget is {amounts!r}: give numbers above 0")
    return unit, budgets.tolist()


# The runs


def plan(study: Study, points: Sequence[Point]) -> list[Trial]:
    """Returns a trial for each point, with as many updates as its budget allows, at least one.

    Raises `ValueError` with the run's name for settings that the recipe refuses, and for settings
    that make runs incomparable.
    """
    recipe = Path(study.recipe)
    changes = []
    warmups = []
    for point in points:
        settings = (
            study.settings | study.variants[point.variant] | point.tuned | {"seed": point.seed}
        )
        warmups.append(settings.pop(WARMUP, None))
        changes.append((f"{point.variant}-seed{point.seed}", settings))
    trials = read_trials(recipe, changes)
    resized = []
    for point, warmup, trial in zip(points, warmups, trials, strict=True):
        settings = dict(trial.changes)
        updates = trial.config.max_steps
        if point.budget:
            cost = trial.config.total_batch_size
            if study.unit == "flops":
                cost *= trial.flops_per_token
            updates = max(1, round(point.budget / cost))
        settings["max_steps"] = updates
        if warmup is not None:
            if "warmup_steps" in settings or not 0 <= float(warmup) <= 1:
                raise ValueError(
                    f"{trial.label}: {WARMUP} is {warmup!r}: give a number from 0 to 1, and no "
                    "warmup_steps"
                )
            settings["warmup_steps"] = round(warmup * updates)
        if not trial.config.eval_every:
            raise ValueError(
                f"{trial.label}: eval_every is 0, so a run has no val/loss: set it above 0"
            )
        for name in ENDING:
            if trial.resolved.get(name):
                raise ValueError(f"{trial.label}: {name} ends a run before its budget: set it to 0")
        resized.append((trial.label, settings))
    # Again, since a recipe may choose settings by the length of a run.
    return read_trials(recipe, resized)


def tuning_points(study: Study) -> list[Point]:
    """Returns a point for each variant and each combination of the values to tune, with the largest
    budget."""
    if not study.tune:
        return []
    points = []
    for name in study.variants:
        for values in itertools.product(*study.tune.values()):
            tuned = dict(zip(study.tune, values, strict=True))
            points.append(Point(name, tuned, TUNING_SEED, study.budgets[-1]))
    return points


def seed_points(study: Study, tuned: Mapping[str, Settings]) -> list[Point]:
    """Returns the points of the comparison, seed by seed. `tuned` has each variant's tuned
    settings."""
    points = []
    seeds = range(1, study.seeds + 1)
    for seed, budget, name in itertools.product(seeds, study.budgets, study.variants):
        points.append(Point(name, tuned.get(name, {}), seed, budget))
    return points


def compare(study: Study, queue: Queue) -> str:
    """Trains the runs of a study and returns the outcome as Markdown. Raises `ValueError` for
    settings that the recipe refuses, and `OSError` if the folder cannot be written."""
    tuned, remarks = tune_variants(study, queue)
    points = seed_points(study, tuned)
    trials = plan(study, points)
    queue.run(trials)
    values: dict[At, list[float]] = {}
    tokens = {}
    for point, trial in zip(points, trials, strict=True):
        at = (point.variant, point.budget)
        values.setdefault(at, []).append(queue.metric(trial, study.metric, math.nan))
        tokens[at] = trial.tokens
    return Comparison(study, values, tokens).text(remarks + queue.caveats(trials))


def tune_variants(study: Study, queue: Queue) -> tuple[dict[str, Settings], list[str]]:
    """Trains the tuning points. Returns each variant's settings with the lowest metric, and remarks
    on them; both empty without tuning."""
    points = tuning_points(study)
    trials = plan(study, points)
    queue.run(trials)
    tried: dict[str, list[Settings]] = {}
    losses: dict[str, list[float]] = {}
    for point, trial in zip(points, trials, strict=True):
        # With the recipe's types: YAML reads 1e-3 as text.
        tuned = {axis: trial.resolved.get(axis, value) for axis, value in point.tuned.items()}
        tried.setdefault(point.variant, []).append(tuned)
        losses.setdefault(point.variant, []).append(queue.metric(trial, study.metric))
    best = {}
    remarks = []
    for name, settings in tried.items():
        best[name] = settings[int(np.argmin(losses[name]))]
        remarks += tuning_remarks(name, best[name], settings)
    return best, remarks


def tuning_remarks(name: str, best: Settings, tried: Sequence[Settings]) -> list[str]:
    """Returns the tuned settings of a variant, and a remark on each number, other than 0, at an end
    of its axis."""
    values = ", ".join(f"{axis} {value}" for axis, value in best.items())
    lines = [f"{name}: {len(tried)} trials chose {values}"]
    for axis, value in best.items():
        along = [point[axis] for point in tried]
        if type(value) in (int, float) and value and value in (min(along), max(along)):
            lines.append(f"{name}: the best {axis} is at the end of its axis: extend it")
    return lines


def preview(study: Study, queue: Queue) -> str:
    """Returns the runs of a study as a table, and the FLOPs of those that are not recorded."""
    return queue.forecast(plan(study, tuning_points(study) + seed_points(study, {})))


# The outcome


@dataclass
class Comparison:
    """The outcome of a study, by variant and budget.

    `values` has the metric of each seed: NaN for a run that failed, infinite for a run that
    diverged. `tokens` has the tokens of a run.
    """

    study: Study
    values: Mapping[At, Sequence[float]]
    tokens: Mapping[At, int]

    def verdict(self, variant: str, budget: float | None) -> tuple[str, str]:
        """Returns the verdict on a variant, and the difference from the baseline with its interval;
        "baseline" and "" for the baseline.

        `judge` gives the verdict on the pairs in which both runs ended without diverging. If the
        numbers of runs that diverged differ, the verdict begins with them.
        """
        if variant == self.study.baseline:
            return "baseline", ""
        values = self.values[variant, budget]
        base = self.values[self.study.baseline, budget]
        # Not finite if a run of a pair diverged or is missing.
        differences = [a - b for a, b in zip(values, base, strict=True) if math.isfinite(a - b)]
        verdict = judge(differences)
        if values.count(math.inf) != base.count(math.inf):
            verdict = f"{diverged(values)} diverged, {diverged(base)} of the baseline; {verdict}"
        return verdict, plus_minus(differences, "+.4f")

    def row(self, variant: str, budget: float | None) -> list[str]:
        """Returns the cells of a table: verdict, difference from the baseline, metric, tokens."""
        values = self.values[variant, budget]
        metric = [plus_minus(list(filter(math.isfinite, values))) or "none"]
        for state, test in (("diverged", math.isinf), ("missing", math.isnan)):
            count = sum(map(test, values))
            if count:
                metric.append(f"{count} {state}")
        verdict, difference = self.verdict(variant, budget)
        return [verdict, difference, ", ".join(metric), short_number(self.tokens[variant, budget])]

    def text(self, remarks: Sequence[str]) -> str:
        """Returns the outcome as Markdown: a table for each budget, and remarks."""
        study = self.study
        parts = []
        for budget in study.budgets:
            parts.append(f"{study.unit}: {short_number(budget)}" if budget else "Verdict")
            rows = {name: self.row(name, budget) for name in study.variants}
            unit = METRICS[study.metric]
            heads = ("variant", "verdict", "difference from the baseline", unit, "tokens")
            parts.append(markdown(heads, rows))
        if remarks:
            parts += ["Remarks", "\n".join(f"- {line}" for line in remarks)]
        return "\n\n".join(parts)


def diverged(values: Sequence[float]) -> str:
    """Returns how many of the runs that did not fail diverged: 1 of 3."""
    return f"{values.count(math.inf)} of {sum(not math.isnan(value) for value in values)}"


def half_width(spread: float, count: Any) -> Any:
    """Returns half the width of the 95% interval of a mean, by Student's t, from the standard
    deviation of `count` values. `count` is a number or an array, and so is the result."""
    from scipy.stats import t

    return t.ppf(0.975, count - 1) * spread / np.sqrt(count)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of one or more values, and half the width of its 95% interval, infinite for
    one value."""
    if len(values) < 2:
        return values[0], math.inf
    return fmean(values), float(half_width(stdev(values), len(values)))


def plus_minus(values: Sequence[float], form: str = ".4f") -> str:
    """Formats the mean of values and its interval, such as 3.9260 ± 0.0051: no interval for
    one value, empty for none."""
    if not values:
        return ""
    mean, half = interval(values)
    text = format(mean, form)
    if not math.isinf(half):
        text += f" ± {half:{form.lstrip('+')}}"
    return text


def judge(differences: Sequence[float]) -> str:
    """Returns the verdict on the differences within pairs of runs of one seed; lower is better.

    It is "better" or "worse" if the 95% interval excludes zero, "equal" if all pairs are equal, or
    "not distinguishable" with the number of further seeds that would make the interval exclude
    zero at this mean and spread.
    """
    count = len(differences)
    if not count:
        return "no pair of runs"
    if count == 1:
        return "not distinguishable: one seed has no spread, take at least two"
    if not any(differences):
        return "equal"
    mean, half = interval(differences)
    if abs(mean) > half:
        return "better" if mean < 0 else "worse"
    counts = np.arange(count + 1, MOST_SEEDS + 1)
    enough = abs(mean) > half_width(stdev(differences), counts)
    if not enough.any():
        return f"not distinguishable: even {MOST_SEEDS:,} seeds may not tell them apart"
    more = int(counts[enough.argmax()]) - count
    seeds = "seed" if more == 1 else "seeds"
    return f"not distinguishable: about {more} more {seeds}"

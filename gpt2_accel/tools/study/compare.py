"""Compares variants of a recipe: paired seeds, equal budgets, optional tuning, differences to the
baseline with intervals.

A study is a YAML file, which docs/studies.md describes.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from gpt2_accel.config import load_yaml
from gpt2_accel.evals.results import markdown
from gpt2_accel.hf.loss_plot import short_number
from gpt2_accel.runtime.options import suggestion
from gpt2_accel.tools.study.runs import Queue
from gpt2_accel.tools.study.trials import Trial, read_trials

METRICS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
UNITS = ("tokens", "flops")
OWN = ("output_dir", "resume_from", "seed", "max_steps", "epochs")  # which the study sets
WARMUP = "warmup_share"  # of the updates, in place of warmup_steps
ENDING = ("max_hours", "patience")  # settings that end a run before its budget
TUNING_SEED = 0
CONFIDENCE = 0.95
MOST_SEEDS = 1000  # a difference that needs more is called equal to zero for all purposes

Settings = dict[str, Any]
At = tuple[str, float | None]  # a variant and a budget
Point = tuple[str, Settings, int, float | None]  # a variant, what tuning gives it, a seed, a budget


@dataclass
class Study:
    """The content of a study's YAML file. The first variant is the baseline.

    Raises `ValueError` for what a study cannot have.
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
            raise ValueError("variants is empty: name at least one, such as `as_it_is: {}`")
        self.variants = {str(name): own or {} for name, own in self.variants.items()}
        self.baseline = next(iter(self.variants))
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        if type(self.seeds) is not int or self.seeds < 1:
            raise ValueError(f"seeds is {self.seeds!r}: give a number of at least 1")
        shared = {"settings": self.settings, "tune": self.tune, "budget": self.budget}
        for name, own in (shared | self.variants).items():
            if not isinstance(own, dict):
                raise ValueError(f"{name} is {own!r}: give `name: value` lines")
            for wrong in set(OWN) & set(own):
                raise ValueError(f"{name} sets {wrong}, which the study sets: leave it out")
        self.unit, self.budgets = read_budgets(self.budget)
        for name, values in self.tune.items():
            if not isinstance(values, list) or len(values) < 2:
                raise ValueError(
                    f"tune: {name} is {values!r}: give each setting a list of values; all "
                    "combinations are trained"
                )
            for variant, own in self.variants.items():
                if name in own:
                    raise ValueError(f"{variant} sets {name}, which tune also sets: leave one out")


def read_study(path: Path, recipes: Path) -> Study:
    """Reads a study's YAML file; a recipe without a slash is one of the folder `recipes`.

    Raises `FileNotFoundError` if it or the recipe is missing, `ValueError` for anything that it
    cannot hold.
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
        raise FileNotFoundError(f"{path}: there is no recipe {study.recipe}")
    return study


def read_budgets(budget: Mapping[str, Any]) -> tuple[str, list[float | None]]:
    """Returns the unit of the budgets, and the budgets from the smallest; [None] for the recipe's
    own length of a run."""
    if not budget:
        return "", [None]
    unit, amounts = next(iter(budget.items()))
    if len(budget) > 1 or unit not in UNITS:
        raise ValueError(f"budget has {', '.join(map(str, budget))}: give {' or '.join(UNITS)}")
    found = np.unique(np.array(amounts, float))  # YAML reads 1e6 as a text
    if not found.size or not np.isfinite(np.log(found)).all():
        raise ValueError(f"budget is {amounts!r}: give numbers above 0")
    return unit, found.tolist()


# The runs


def plan(study: Study, points: Sequence[Point]) -> list[Trial]:
    """Returns the runs of a study at some points, each with the updates that its budget pays for,
    at least one.

    Raises `ValueError`, with the run's name, for settings that the recipe refuses, or with which a
    run cannot be compared.
    """
    recipe = Path(study.recipe)
    changes = []
    shares = []
    for name, tuned, seed, _ in points:
        own = study.settings | study.variants[name] | tuned | {"seed": seed}
        shares.append(own.pop(WARMUP, None))
        changes.append((f"{name}-seed{seed}", own))
    trials = read_trials(recipe, changes)
    resized = []
    for (_, _, _, budget), share, trial in zip(points, shares, trials, strict=True):
        own = dict(trial.changes)
        each = trial.config.total_batch_size
        if study.unit == "flops":
            each *= trial.flops_per_token
        updates = max(1, round(budget / each)) if budget else trial.config.max_steps
        own["max_steps"] = updates
        if share is not None:
            if "warmup_steps" in own or not 0 <= float(share) <= 1:
                raise ValueError(
                    f"{trial.label}: {WARMUP} is {share!r}: give a number from 0 to 1, and no "
                    "warmup_steps"
                )
            own["warmup_steps"] = round(share * updates)
        if not trial.config.eval_every:
            raise ValueError(
                f"{trial.label}: eval_every is 0, so a run has no val/loss: set it above 0"
            )
        for ending in filter(trial.resolved.get, ENDING):
            raise ValueError(f"{trial.label}: {ending} ends a run before its budget: set it to 0")
        resized.append((trial.label, own))
    # Again, since a recipe may choose settings by the length of a run.
    return read_trials(recipe, resized)


def tuning_points(study: Study) -> list[Point]:
    """Returns each variant with each combination of the values to tune, in the largest budget."""
    if not study.tune:
        return []
    points = []
    for name in study.variants:
        for values in itertools.product(*study.tune.values()):
            tuned = dict(zip(study.tune, values, strict=True))
            points.append((name, tuned, TUNING_SEED, study.budgets[-1]))
    return points


def seed_points(study: Study, tuned: Mapping[str, Settings]) -> list[Point]:
    """Returns the points of the comparison, seed by seed. `tuned` has the settings that tuning
    chose by variant."""
    seeds = range(1, study.seeds + 1)
    each = itertools.product(seeds, study.budgets, study.variants)
    return [(name, tuned.get(name, {}), seed, budget) for seed, budget, name in each]


def compare(study: Study, queue: Queue) -> str:
    """Trains what a study needs and returns its outcome as Markdown. Raises `ValueError` for
    settings that a recipe refuses."""
    tuned, remarks = tune(study, queue)
    points = seed_points(study, tuned)
    trials = plan(study, points)
    queue.run(trials)
    values: dict[At, list[float]] = {}
    tokens = {}
    for (name, _, _, budget), trial in zip(points, trials, strict=True):
        value = queue.metric(trial, study.metric, math.nan)
        values.setdefault((name, budget), []).append(value)
        tokens[name, budget] = trial.tokens
    return Comparison(study, values, tokens).text(remarks + queue.caveats(trials))


def tune(study: Study, queue: Queue) -> tuple[dict[str, Settings], list[str]]:
    """Trains the tuning points. Returns the settings of the one with the lowest metric by variant,
    and remarks on them."""
    points = tuning_points(study)
    trials = plan(study, points)
    queue.run(trials)
    losses = [queue.metric(trial, study.metric) for trial in trials]
    best = {}
    remarks = []
    for name in study.variants if points else ():
        own = [place for place, point in enumerate(points) if point[0] == name]
        tried = [typed(trials[place], points[place][1]) for place in own]
        best[name] = tried[int(np.argmin([losses[place] for place in own]))]
        remarks += tuning_remarks(name, best[name], tried)
    return best, remarks


def typed(trial: Trial, tuned: Settings) -> Settings:
    """Returns the tuned settings of a trial with the types of the recipe: YAML reads 1e-3 as a
    text."""
    return {axis: trial.resolved.get(axis, value) for axis, value in tuned.items()}


def tuning_remarks(name: str, best: Settings, tried: Sequence[Settings]) -> list[str]:
    """Returns what tuning chose for a variant, and which of it is at an end of its axis beyond
    which there may be more: not at 0, and no text."""
    values = ", ".join(f"{axis} {value}" for axis, value in best.items())
    lines = [f"{name}: {len(tried)} trials chose {values}"]
    for axis, value in best.items():
        along = [point[axis] for point in tried]
        if type(value) in (int, float) and value and value in (min(along), max(along)):
            lines.append(f"{name}: the best {axis} is at the end of its axis: extend it")
    return lines


def dry_run(study: Study, queue: Queue) -> str:
    """Returns the runs of a study as a table, and the time of those that are not recorded."""
    return queue.forecast(plan(study, tuning_points(study) + seed_points(study, {})))


# The outcome


@dataclass
class Comparison:
    """The outcome of a study.

    `values` has the metric of each seed by variant and budget: NaN for a run that failed, infinite
    for one that diverged. `tokens` are those of each of these runs.
    """

    study: Study
    values: Mapping[At, Sequence[float]]
    tokens: Mapping[At, int]

    def verdict(self, variant: str, budget: float | None) -> tuple[str, str]:
        """Returns the verdict on a variant, or that it is the baseline, and the difference to the
        baseline with its interval.

        It is `judge`'s verdict on the pairs in which no run diverged, after the numbers of runs
        that diverged, if these differ.
        """
        if variant == self.study.baseline:
            return "baseline", ""
        own = self.values[variant, budget]
        base = self.values[self.study.baseline, budget]
        # Not finite if a run of a pair diverged or is missing.
        differences = [a - b for a, b in zip(own, base, strict=True) if math.isfinite(a - b)]
        verdict = judge(differences)
        if own.count(math.inf) != base.count(math.inf):
            verdict = f"{diverged(own)} diverged, {diverged(base)} of the baseline; {verdict}"
        return verdict, plus_minus(differences, "+.4f")

    def row(self, variant: str, budget: float | None) -> list[str]:
        """Returns the cells of a table: verdict, difference to the baseline, metric, tokens."""
        values = self.values[variant, budget]
        metric = [plus_minus(list(filter(math.isfinite, values))) or "none"]
        for what, test in (("diverged", math.isinf), ("missing", math.isnan)):
            count = sum(map(test, values))
            if count:
                metric.append(f"{count} {what}")
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
            heads = ("variant", "verdict", "difference to the baseline", unit, "tokens")
            parts.append(markdown(heads, rows))
        if remarks:
            parts += ["Remarks", "\n".join(f"- {line}" for line in remarks)]
        return "\n\n".join(parts)


def diverged(values: Sequence[float]) -> str:
    """Returns how many of the runs that ended diverged: 1 of 3."""
    return f"{values.count(math.inf)} of {sum(not math.isnan(value) for value in values)}"


def half_width(spread: float, count: Any) -> Any:
    """Returns half the width of the 95% interval of a mean, by Student's t, from the standard
    deviation of `count` values, a number or an array."""
    from scipy.stats import t

    return t.ppf((1 + CONFIDENCE) / 2, count - 1) * spread / np.sqrt(count)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of at least one value, and half the width of its 95% interval, infinite for
    one value."""
    if len(values) < 2:
        return values[0], math.inf
    return fmean(values), float(half_width(stdev(values), len(values)))


def plus_minus(values: Sequence[float], form: str = ".4f") -> str:
    """Formats the mean of values and its interval: 3.9260 ± 0.0051; only the mean of one value;
    empty without values."""
    if not values:
        return ""
    mean, half = interval(values)
    return f"{mean:{form}}" + ("" if math.isinf(half) else f" ± {half:{form.lstrip('+')}}")


def judge(differences: Sequence[float]) -> str:
    """Returns the verdict on the differences of pairs of runs with the same seed; lower is better.

    It is "better" or "worse" if the 95% interval excludes zero, "equal" if every pair is equal, or
    "not distinguishable", with how many more seeds of this mean and spread would make the interval
    exclude zero.
    """
    count = len(differences)
    if count < 2:
        few = "one seed has no spread, take at least two"
        return f"not distinguishable: {few}" if differences else "no pair of runs"
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
    return f"not distinguishable: about {more} more seed{'s' * (more > 1)}"

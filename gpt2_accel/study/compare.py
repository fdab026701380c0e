"""Compares variants of a recipe: paired seeds, equal budgets, optionally tuned; differences to the baseline with intervals.

A study is a YAML file:

    recipe: quickstart            # a recipe's name, or the path of a script
    settings: {n_layer: 2}        # of all variants
    variants:                     # the first is the baseline, unless `baseline` names another
      adamw: {optimizer: adamw, learning_rate: 2e-3}
      muon: {learning_rate: 1.8e-2}
    budget: {tokens: 1e6}         # or flops, or minutes of training; several numbers in a list; default the recipe's
    seeds: 5
    metric: loss                  # or bits_per_byte
    tune:                         # of each variant, with seed 0
      trials: 20                  # or until_no_step_helps: true
      axes: {learning_rate: [1e-3, 2e-3, 4e-3]}

Settings may have `warmup_share` in place of `warmup_steps`: a share of the updates, whose number follows from the budget.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpt2_accel.config import TrainConfig, load_yaml, parse_config
from gpt2_accel.options import suggestion
from gpt2_accel.study.children import settings_of
from gpt2_accel.study.engine import INERT, WARMUP, Engine, Trial, as_words, grid
from gpt2_accel.study.intervals import Verdict, interval, judge
from gpt2_accel.study.speed import speed
from gpt2_accel.study.table import Result
from gpt2_accel.study.tune import Axes, Descent, Tuned, ordered

METRICS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
BUDGETS = ("tokens", "flops", "minutes")
NAME = re.compile(r"[\w.+=,:()%/-][\w.+=,:()%/ -]*")  # of a variant, in tables and pictures
PARTS = ("recipe", "settings", "variants", "baseline", "budget", "seeds", "metric", "tune")
OWN = ("output_dir", "resume_from", "seed", "max_steps", "law")  # which the study sets
ENDING = ("max_hours", "patience", *TrainConfig.commands())  # which end a run before its budget
TUNING_SEED = 0


@dataclass(frozen=True)
class Tuning:
    """What is tuned: values by setting, and the number of trials of each variant, None until no step helps."""

    axes: Axes
    trials: int | None


@dataclass(frozen=True)
class StudyFile:
    """The content of a study's YAML file. `budgets` are in `unit`; without any, a run is as long as the recipe's."""

    path: Path
    recipe: Path
    settings: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    baseline: str
    unit: str | None
    budgets: Sequence[float]
    seeds: int
    metric: str
    tuning: Tuning | None


def read_study(path: str | Path, recipes: Path) -> StudyFile:
    """Reads a study's YAML file; a recipe without a slash is one of the folder `recipes`.

    Raises `FileNotFoundError` if it or the recipe is missing, `ValueError` for anything that it cannot hold.
    """
    values = load_yaml(str(path), "STUDY.yaml")

    def wrong(problem: str) -> ValueError:
        return ValueError(f"{path}: {problem}")

    def part(name: str, kind: type, default: Any) -> Any:
        value = values.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise wrong(f"{name} is {value!r}, expected {describe[kind]}")
        return value

    describe = {dict: "`name: value` lines", str: "a text", int: "a number"}
    for name in values:
        if name not in PARTS:
            raise wrong(f"unknown part {name!r}{suggestion(str(name), PARTS, '')}")
    name = part("recipe", str, None)
    recipe = Path(name) if "/" in name or name.endswith(".py") else recipes / f"{name}.py"
    if not recipe.is_file():
        raise FileNotFoundError(f"{path}: there is no recipe {recipe}")
    settings, variants = part("settings", dict, {}), part("variants", dict, None)
    variants = {name: {} if own is None else own for name, own in variants.items()}
    for where, own in (("settings", settings), *variants.items()):
        if not isinstance(where, str) or not NAME.fullmatch(where) or where.startswith("_"):
            raise wrong(
                f"{where!r} cannot be a variant's name: quote a text of letters, digits, spaces and .+=,:()%/-"
            )
        if not isinstance(own, dict):
            raise wrong(f"{where} is {own!r}, expected {describe[dict]}")
        for name, value in own.items():
            if name in OWN:
                raise wrong(f"{where} sets {name}, which the study sets: leave it out")
            if name in ENDING and value:
                raise wrong(
                    f"{where} sets {name}, which ends a run before its budget: leave it out"
                )
            if value is None:
                raise wrong(f"{where} has no value for {name}: give one, or leave {name} out")
        if {"warmup_steps", WARMUP} <= own.keys():
            raise wrong(f"{where} sets warmup_steps and {WARMUP}: leave one out")
        if not 0 <= as_number(own.get(WARMUP, 0)) <= 1:
            raise wrong(f"{where} sets {WARMUP} to {own[WARMUP]!r}: give a number from 0 to 1")
    if not variants:
        raise wrong("variants is empty: name at least one, such as `as_it_is: {}`")
    baseline = str(values.get("baseline", next(iter(variants))))
    if baseline not in variants:
        raise wrong(f"baseline {baseline!r} is none of the variants {', '.join(variants)}")
    budget = part("budget", dict, {})
    if len(budget) > 1 or not budget.keys() <= set(BUDGETS):
        raise wrong(f"budget has {', '.join(map(str, budget))}: give one of {', '.join(BUDGETS)}")
    [(unit, amounts)] = budget.items() or [(None, None)]
    amounts = amounts if isinstance(amounts, list) else [amounts]
    budgets = sorted(as_number(amount) for amount in amounts) if unit else []
    if (unit and not budgets) or not all(0 < amount < math.inf for amount in budgets):
        raise wrong(f"budget is {amounts!r}: give numbers above 0")
    if len(set(budgets)) < len(budgets):
        raise wrong(f"budget is {amounts!r}: give each number once")
    seeds, metric = part("seeds", int, 3), part("metric", str, "loss")
    if seeds < 1:
        raise wrong(f"seeds must be at least 1, got {seeds}")
    if metric not in METRICS:
        raise wrong(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    tuning = read_tuning(part("tune", dict, {}), wrong) if "tune" in values else None
    return StudyFile(
        Path(path),
        recipe,
        settings,
        variants,
        baseline,
        unit,
        budgets,
        seeds,
        metric,
        tuning,
    )


def read_tuning(values: Mapping[str, Any], wrong: Any) -> Tuning:
    """Reads the part `tune` of a study's file."""
    trials, until = values.get("trials"), values.get("until_no_step_helps", False)
    axes = values.get("axes")
    known = {"trials", "until_no_step_helps", "axes"}
    if not values.keys() <= known or not isinstance(axes, dict) or not axes:
        raise wrong("tune has axes (values by setting), and trials or until_no_step_helps")
    if (type(trials) is int and trials > 1) == (until is True):
        raise wrong("tune has either trials, at least 2, or until_no_step_helps: true")
    fields = {*TrainConfig.__dataclass_fields__, WARMUP} - {*OWN, *ENDING}
    for name, own in axes.items():
        if name not in fields:
            raise wrong(f"tune: unknown setting {name!r}{suggestion(str(name), fields, '')}")
        if name in INERT:
            raise wrong(f"tune: {name} does not change a run's loss: leave it out")
        if not isinstance(own, list) or len(own) < 2:
            raise wrong(f"tune: {name} needs a list of at least two values")
        try:
            own[:] = [typed(name, value) for value in own]
        except ValueError as error:
            raise wrong(f"tune: {error}") from error
        if len(set(own)) < len(own) or (ordered(own) and own != sorted(own)):
            raise wrong(f"tune: the values of {name} have to be different, and numbers to rise")
    return Tuning(axes, trials)


def typed(name: str, value: Any) -> Any:
    """Returns a YAML value of a setting in the type that a run has it in. Raises `ValueError` for one that is out of range."""
    if name == WARMUP:
        if not 0 <= as_number(value) <= 1:
            raise ValueError(f"{WARMUP} is {value!r}: give numbers from 0 to 1")
        return as_number(value)
    if isinstance(value, list):
        raise ValueError(f"{name} cannot be {value!r}")
    return getattr(parse_config(TrainConfig, [f"--{name}", *as_words(name, value)]), name)


def as_number(value: Any) -> float:
    """Returns a YAML value as a number, NaN if it is none. YAML reads 6e-4 as a text."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


@dataclass
class Variant:
    """A variant of a study: its trial without seed and budget, its tuning, and its results by budget and seed, None for a
    run that failed."""

    name: str
    trial: Trial
    tuned: Tuned | None = None
    results: dict[float | None, list[Result | None]] = field(default_factory=dict)


@dataclass
class Comparison:
    """The outcome of a study."""

    study: StudyFile
    variants: list[Variant]
    failed: Mapping[str, str]

    @property
    def baseline(self) -> Variant:
        return next(v for v in self.variants if v.name == self.study.baseline)

    @property
    def budgets(self) -> list[float | None]:
        return list(self.study.budgets) or [None]

    def values(self, variant: Variant, budget: float | None) -> list[float]:
        """Returns the metric of each seed, NaN for a run that failed."""
        results = variant.results[budget]
        return [math.nan if r is None else r.metric(self.study.metric) for r in results]

    def verdict(self, variant: Variant, budget: float | None) -> Verdict | None:
        """Returns the verdict on a variant; None for the baseline, or if no pair of runs is there.

        If more or fewer of its runs diverged than of the baseline's, the verdict says that, not better or worse.
        """
        values, base = self.values(variant, budget), self.values(self.baseline, budget)
        pairs = [(a, b) for a, b in zip(values, base, strict=True) if not math.isnan(a + b)]
        if variant is self.baseline or not pairs:
            return None
        more = sum(math.isinf(a) - math.isinf(b) for a, b in pairs)
        if more:
            return Verdict(math.inf, math.inf, f"diverged {'more' if more > 0 else 'less'} often")
        differences = [a - b for a, b in pairs if math.isfinite(a - b)]
        return judge(differences) if differences else None

    def token_share(self, variant: Variant) -> tuple[float, float, str] | None:
        """Returns the share of the baseline's tokens, in the largest budget, with which a variant reaches the baseline's
        metric: mean over the seeds, half the width of the 95% interval, and "<" or ">" if it is outside of the variant's
        budgets, which are then the share. Interpolates over the logarithm of the tokens. None with one budget."""
        if variant is self.baseline or len(self.budgets) < 2:
            return None
        goals = self.values(self.baseline, self.budgets[-1])
        rows = [self.values(variant, budget) for budget in self.budgets]
        tokens = [[r and r.tokens for r in variant.results[budget]] for budget in self.budgets]
        base = [r and r.tokens for r in self.baseline.results[self.budgets[-1]]]
        shares = []
        for seed, goal in enumerate(goals):
            own = [row[seed] for row in rows]
            if not all(map(math.isfinite, [goal, *own])):
                return None
            shares.append(tokens_to(goal, [t[seed] for t in tokens], own) / base[seed])
        least, most = tokens[0][0] / base[0], tokens[-1][0] / base[0]
        if not all(map(math.isfinite, shares)):  # a seed reaches it in no budget
            return most, math.inf, ">"
        mean, half = interval(shares)
        if mean < least:
            return least, half, "<"
        return (most, half, ">") if mean > most else (mean, half, "")


def tokens_to(goal: float, tokens: Sequence[int], losses: Sequence[float]) -> float:
    """Returns the tokens at which a loss that is linear in the logarithm of the tokens between two budgets is first `goal`.

    Below the smallest budget the line of the first two goes on if it falls, else the smallest is returned. A loss that no
    budget reaches gives infinity.
    """
    if losses[0] <= goal:
        if losses[1] >= losses[0]:
            return tokens[0]
        place = 0
    elif (place := next((i for i, loss in enumerate(losses) if loss <= goal), 0) - 1) < 0:
        return math.inf
    (x1, x2), (y1, y2) = map(math.log, tokens[place : place + 2]), losses[place : place + 2]
    return math.exp(x1 + (goal - y1) * (x2 - x1) / (y2 - y1))


def compare(study: StudyFile, engine: Engine) -> Comparison:
    """Trains what a study needs and returns its outcome. Raises `ValueError` for settings that a recipe refuses."""
    if engine.part != (0, 1) and (study.tuning or study.unit == "minutes"):
        raise ValueError(
            "--part divides a grid of known runs: leave out --part, or the part tune and a budget in minutes, whose speed "
            "each machine would measure itself"
        )
    variants = [Variant(name, first_trial(study, name)) for name in study.variants]
    for variant in variants:
        check_on_axes(study, variant)
    check_different(study, engine, variants)
    budgets = list(study.budgets) or [None]
    if study.tuning is not None:
        descents = []
        for variant in variants:
            budgeted = partial(with_budget, study, engine, amount=budgets[-1])
            start = variant.trial.changed(seed=TUNING_SEED)
            metric = partial(Result.metric, name=study.metric)
            descents.append(
                Descent(start, study.tuning.axes, study.tuning.trials, budgeted, metric).plan()
            )
        for variant, tuned in zip(variants, engine.run(descents), strict=True):
            variant.tuned, variant.trial = tuned, tuned.trial
    seeds = range(1, study.seeds + 1)
    cells = [(variant, budget) for budget in budgets for variant in variants]
    wanted = [
        [with_budget(study, engine, v.trial.changed(seed=s), amount=b) for s in seeds]
        for v, b in cells
    ]
    trials = [own[i] for i in range(study.seeds) for own in wanted]  # all variants of a seed first
    [found] = engine.run([grid(trials)])
    by_trial = dict(zip(map(engine.identify, trials), found, strict=True))
    for (variant, budget), own in zip(cells, wanted, strict=True):
        variant.results[budget] = [by_trial[engine.identify(trial)] for trial in own]
    return Comparison(study, variants, engine.failed)


def first_trial(study: StudyFile, name: str) -> Trial:
    """Returns a variant's trial, with the settings that its recipe trains with. Raises `ValueError`, with the variant's name,
    for settings that the recipe refuses, or with which a run cannot be compared."""
    own = study.variants[name]
    changes = {**study.settings, **own}
    if "warmup_steps" in own:
        changes.pop(WARMUP, None)
    share = changes.pop(WARMUP, None)
    try:
        empty = Trial(study.recipe, changes, {})
        resolved = settings_of(study.recipe, empty.arguments(Path("runs/study")))
        changes = {n: resolved.get(n, v) for n, v in changes.items()}
        trial = Trial(study.recipe, changes, resolved)
        if share is not None:
            trial = trial.changed(**{WARMUP: as_number(share)})
        check_trial(trial)
    except ValueError as error:
        raise ValueError(f"{study.path}, variant {name}: {error}") from error
    return trial


def check_trial(trial: Trial) -> None:
    """Raises `ValueError` if a trial's model is not possible, or its run would have no loss or end before its budget."""
    assert trial.flops_per_token
    trial.config.batch_schedule(processes=1)
    if not trial.config.eval_every:
        raise ValueError("eval_every is 0, so a run has no val/loss: set it above 0")
    for name in ENDING:
        if trial.resolved.get(name):
            raise ValueError(
                f"the recipe sets {name}, which ends a run before its budget: set it to 0"
            )


def check_on_axes(study: StudyFile, variant: Variant) -> None:
    """Raises `ValueError` if a variant's value of a tuned setting is not on its axis, or a value on it is not possible."""
    for name, values in study.tuning.axes.items() if study.tuning else ():
        where = f"{study.path}, tune: {name} of the variant {variant.name}"
        value = variant.trial.resolved.get(name)
        if value not in values:
            raise ValueError(
                f"{where} is {value}, which is not on its axis: add it, or set {name} to one of its values"
            )
        for other in values:
            try:
                check_trial(variant.trial.changed(**{name: other}))
            except ValueError as error:
                raise ValueError(f"{where} cannot be {other}: {error}") from error


def check_different(study: StudyFile, engine: Engine, variants: Sequence[Variant]) -> None:
    """Raises `ValueError` if two variants have the same runs, or a variant the same run for two budgets."""
    seen: dict[str, str] = {}
    for variant in variants:
        for amount in list(study.budgets) or [None]:
            id = engine.identify(with_budget(study, engine, variant.trial, amount=amount))
            if (other := seen.get(id)) is not None:
                raise ValueError(
                    f"{study.path}: the variant {variant.name} has the same settings as {other}: change what changes numbers"
                    if other != variant.name
                    else f"{study.path}: two budgets are the same number of updates of the variant {other}: leave one out"
                )
            seen[id] = variant.name


def with_budget(study: StudyFile, engine: Engine, trial: Trial, *, amount: float | None) -> Trial:
    """Returns the trial with the updates that an amount of `study.unit` pays for, at least one."""
    if amount is None:
        return trial.lasting(trial.config.max_steps)
    tokens = amount
    if study.unit == "flops":
        tokens = amount / trial.flops_per_token
    elif study.unit == "minutes":
        tokens = amount * 60 * speed(engine, trial)
    return trial.lasting(max(1, round(tokens / trial.config.total_batch_size)))

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

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from gpt2_accel.config import TrainConfig, load_yaml
from gpt2_accel.files import read_json_lines, write_json
from gpt2_accel.options import suggestion
from gpt2_accel.study.children import Child, settings_of
from gpt2_accel.study.claims import claim
from gpt2_accel.study.engine import LOG, Engine, Trial, grid, last_line
from gpt2_accel.study.intervals import Verdict, interval, judge
from gpt2_accel.study.table import Result
from gpt2_accel.study.tune import Axes, Descent, Tuned

METRICS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
BUDGETS = ("tokens", "flops", "minutes")
PARTS = ("recipe", "settings", "variants", "baseline", "budget", "seeds", "metric", "tune")
WARMUP = "warmup_share"
OWN = ("output_dir", "resume_from", "seed", "max_steps")  # which the study sets
TUNING_SEED = 0
PROBE = 60  # updates that measure the speed of training, without an evaluation
# Settings that do not change the speed.
SPEEDLESS = {
    *(
        "learning_rate",
        "lr_schedule",
        "decay_share",
        "warmup_steps",
        WARMUP,
        "min_lr_ratio",
        "seed",
    ),
    *("weight_decay", "beta1", "beta2", "max_grad_norm", "max_steps"),
}


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
    variants = {str(name): own or {} for name, own in variants.items()}
    for where, own in (("settings", settings), *variants.items()):
        if not isinstance(own, dict):
            raise wrong(f"{where} is {own!r}, expected {describe[dict]}")
        for name in OWN:
            if name in own:
                raise wrong(f"{where} sets {name}, which the study sets: leave it out")
    if not variants:
        raise wrong("variants is empty: name at least one, such as `as_it_is: {}`")
    baseline = str(values.get("baseline", next(iter(variants))))
    if baseline not in variants:
        raise wrong(f"baseline {baseline!r} is none of the variants {', '.join(variants)}")
    budget = part("budget", dict, {})
    if len(budget) > 1 or not budget.keys() <= set(BUDGETS):
        raise wrong(f"budget has {', '.join(map(str, budget))}: give one of {', '.join(BUDGETS)}")
    [(unit, amounts)] = budget.items() or [(None, [])]
    budgets = [
        as_number(amount) for amount in (amounts if isinstance(amounts, list) else [amounts])
    ]
    if not all(amount > 0 for amount in budgets):
        raise wrong(f"budget is {amounts!r}: give numbers above 0")
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
        sorted(budgets),
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
    for name, own in axes.items():
        fields = {*TrainConfig.__dataclass_fields__, WARMUP} - {*OWN}
        if name not in fields:
            raise wrong(f"tune: unknown setting {name!r}{suggestion(str(name), fields, '')}")
        if not isinstance(own, list) or len(own) < 2:
            raise wrong(f"tune: {name} needs a list of at least two values")
    return Tuning({name: [as_value(v) for v in own] for name, own in axes.items()}, trials)


def as_value(value: Any) -> Any:
    """Returns a YAML value; one such as 6e-4, which YAML reads as a text, as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def as_number(value: Any) -> float:
    """Returns a YAML value as a number, NaN if it is none."""
    value = as_value(value)
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    )


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

        A variant is worse if more of its runs diverged, and better if fewer did.
        """
        values, base = self.values(variant, budget), self.values(self.baseline, budget)
        pairs = [(a, b) for a, b in zip(values, base, strict=True) if not math.isnan(a + b)]
        if variant is self.baseline or not pairs:
            return None
        more = sum(map(math.isinf, values)) - sum(map(math.isinf, base))
        if more:
            return Verdict(math.inf, math.inf, "worse" if more > 0 else "better")
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
    variants = [Variant(name, first_trial(study, name)) for name in study.variants]
    budgets = list(study.budgets) or [None]
    if study.tuning is not None:
        if engine.part != (0, 1):
            raise ValueError(
                "--part divides a grid, and tuning goes step by step: leave out --part"
            )
        descents = []
        for variant in variants:
            check_on_axes(variant, study.tuning.axes)
            budgeted = partial(with_budget, study, engine, amount=budgets[-1])
            start = variant.trial.changed(seed=TUNING_SEED)
            metric = partial(Result.metric, name=study.metric)
            descents.append(
                Descent(start, study.tuning.axes, study.tuning.trials, budgeted, metric).plan()
            )
        total = study.tuning.trials and study.tuning.trials * len(variants)
        for variant, tuned in zip(variants, engine.run(descents, total), strict=True):
            variant.tuned, variant.trial = tuned, tuned.trial
    seeds = range(1, study.seeds + 1)
    cells = [(variant, budget) for budget in budgets for variant in variants]
    wanted = [
        [with_budget(study, engine, v.trial.changed(seed=s), amount=b) for s in seeds]
        for v, b in cells
    ]
    trials = [own[i] for i in range(study.seeds) for own in wanted]  # all variants of a seed first
    [found] = engine.run([grid(trials)], engine.missing(trials))
    by_trial = dict(zip(map(engine.identify, trials), found, strict=True))
    for (variant, budget), own in zip(cells, wanted, strict=True):
        variant.results[budget] = [by_trial[engine.identify(trial)] for trial in own]
    return Comparison(study, variants, engine.failed)


def first_trial(study: StudyFile, name: str) -> Trial:
    """Returns a variant's trial, with the settings that its recipe trains with."""
    changes = {n: as_value(v) for n, v in {**study.settings, **study.variants[name]}.items()}
    share = changes.pop(WARMUP, None)
    empty = Trial(study.recipe, changes, {})
    try:
        resolved = settings_of(study.recipe, empty.arguments(Path("runs/study")))
    except ValueError as error:
        raise ValueError(f"{study.path}, variant {name}: {error}") from error
    trial = Trial(study.recipe, changes, resolved)
    return trial if share is None else trial.changed(**{WARMUP: share})


def check_on_axes(variant: Variant, axes: Axes) -> None:
    """Raises `ValueError` if a variant's value of a tuned setting is not on its axis, or a value is out of its range."""
    for name, values in axes.items():
        value = variant.trial.resolved.get(name)
        if value not in values:
            raise ValueError(
                f"tune: {name} of the variant {variant.name} is {value}, which is not on its axis: add it, or set {name} to "
                "one of its values"
            )
        for other in values:
            variant.trial.changed(**{name: other})


def with_budget(study: StudyFile, engine: Engine, trial: Trial, *, amount: float | None) -> Trial:
    """Returns the trial with the updates that an amount of `study.unit` pays for, at least one."""
    config, changes, resolved = trial.config, dict(trial.changes), dict(trial.resolved)
    updates = config.max_steps
    if amount is not None:
        tokens = amount
        if study.unit == "flops":
            tokens = amount / trial.flops_per_token
        elif study.unit == "minutes":
            tokens = amount * 60 * speed(engine, trial)
        updates = max(1, round(tokens / config.total_batch_size))
        changes["max_steps"] = resolved["max_steps"] = updates
    if WARMUP in resolved:
        changes.pop(WARMUP, None)
        changes["warmup_steps"] = resolved["warmup_steps"] = round(resolved.pop(WARMUP) * updates)
    return Trial(trial.recipe, changes, resolved)


def speed(engine: Engine, trial: Trial) -> float:
    """Returns the tokens per second of training a trial, measured once with a run in each slot at the same time, and stored
    beside the table of runs. Of several processes one measures, and the others wait.

    Raises `ValueError` if the measurement fails."""
    path = engine.table.with_name(f"{engine.table.stem}-speeds.json")
    plain = {name: v for name, v in trial.resolved.items() if name not in SPEEDLESS}
    id = Trial(trial.recipe, {}, plain).id(engine.precision)
    folder = engine.folder / "probes" / id
    while id not in (known := read_speeds(path)):
        if (own := claim(folder)) is None:
            time.sleep(1)
            continue
        try:
            write_json(path, known | {id: measure(engine, trial, folder)})
        finally:
            own.release()
    return known[id]


def read_speeds(path: Path) -> dict[str, float]:
    """Returns the measured speeds by the id of what was measured."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def measure(engine: Engine, trial: Trial, folder: Path) -> float:
    """Returns the median of the tokens per second in the second half of `PROBE` updates, over a run in each slot."""
    changes = {name: value for name, value in trial.changes.items() if name != WARMUP}
    off = {"eval_every": 0, "sample_every": 0, "save_every": 0, "patience": 0, "keep_best": False}
    probe = Trial(trial.recipe, {**changes, **off, "log_every": 5, "max_steps": PROBE}, {})
    folders = [folder / str(number) for number in range(len(engine.slots))]
    children = [
        Child(trial.recipe, probe.arguments(place), slot, engine.env, place / LOG)
        for place, slot in zip(folders, engine.slots, strict=True)
    ]
    found = []
    for child, place in zip(children, folders, strict=True):
        if child.wait():
            raise ValueError(f"the speed was not measured: {last_line(place / LOG)}")
        lines = read_json_lines(place / "metrics.jsonl")
        speeds = [v for line in lines if (v := line.get("train/tokens_per_second"))]
        found += speeds[len(speeds) // 2 :]
    return median(found)

"""Compares variants of a recipe: paired seeds, equal budgets, optionally tuned; differences to the baseline with intervals."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gpt2_accel.evals.results import markdown
from gpt2_accel.tools.report.figures import short_number
from gpt2_accel.tools.study.engine import Engine
from gpt2_accel.tools.study.intervals import LEVEL, Verdict, fisher, holm, judge, reached
from gpt2_accel.tools.study.study_file import StudyFile
from gpt2_accel.tools.study.trials import WARMUP, Result, Trial, read_trial

TUNING_SEED = 0
ENDING = ("max_hours", "patience")  # settings that end a run before its budget


@dataclass
class Comparison:
    """The outcome of a study.

    `results` has the result of each seed by variant and budget, None for a run that failed; `tuned` the trial that tuning
    chose for each variant.
    """

    study: StudyFile
    results: Mapping[tuple[str, float | None], Sequence[Result | None]]
    tuned: Mapping[str, Trial] = field(default_factory=dict)

    def values(self, variant: str, budget: float | None) -> list[float]:
        """Returns the metric of each seed, NaN for a run that failed."""
        results = self.results[variant, budget]
        return [math.nan if r is None else r.metric(self.study.metric) for r in results]

    def diverged(self, variant: str, budget: float | None) -> tuple[int, int]:
        """Returns how many runs diverged, and how many did not."""
        values = self.values(variant, budget)
        return values.count(math.inf), sum(map(math.isfinite, values))

    @cached_property
    def divergence(self) -> dict[tuple[str, float | None], float]:
        """The p-values of `fisher` against the baseline by variant and budget, corrected by `holm`."""
        base = self.study.baseline
        others = [(name, budget) for name, budget in self.results if name != base]
        return holm({at: fisher(self.diverged(*at), self.diverged(base, at[1])) for at in others})

    def verdict(self, variant: str, budget: float | None) -> Verdict:
        """Returns the verdict on a variant, or that it is the baseline.

        It is that the variant diverged more or less often, if the test says so, and else by the
        pairs in which no run diverged. If the numbers of runs that diverged differ, and there are
        too few runs to test this, it is these numbers.
        """
        if variant == self.study.baseline:
            return Verdict("baseline")
        own, base = (self.diverged(name, budget) for name in (variant, self.study.baseline))
        more = own[0] * base[1] - base[0] * own[1]  # the sign of the difference of the shares
        if self.divergence[variant, budget] <= LEVEL:
            return Verdict(f"diverged {'more' if more > 0 else 'less'} often")
        runs, others = sum(own), sum(base)
        all_against_none = fisher((runs, 0), (0, others))
        if more and len(self.divergence) * all_against_none > LEVEL:
            return Verdict(
                f"{own[0]} of {runs} diverged, {base[0]} of {others} of the baseline: too few seeds "
                "for a test"
            )
        # Not finite if a run of a pair diverged or is missing.
        both = (self.values(name, budget) for name in (variant, self.study.baseline))
        return judge([*filter(math.isfinite, (a - b for a, b in zip(*both, strict=True)))])

    def token_share(self, variant: str) -> str | None:
        """Returns the share of the baseline's tokens, in the largest budget, with which a variant reaches the baseline's
        metric, as `reached` describes it. None for the baseline, with one budget, or if a run is missing."""
        budgets, base = self.study.budgets, self.study.baseline
        losses = np.array([self.values(variant, budget) for budget in budgets])
        goals = np.array(self.values(base, budgets[-1]))
        if variant == base or len(budgets) < 2 or np.isnan(losses.sum() + goals.sum()):
            return None
        tokens = np.array([self.results[variant, budget][0].tokens for budget in budgets])
        return reached(goals, losses, tokens / self.results[base, budgets[-1]][0].tokens)


def compare(study: StudyFile, engine: Engine) -> Comparison:
    """Trains what a study needs and returns its outcome. Raises `ValueError` for settings that a recipe refuses."""
    trials = first_trials(study, engine)
    tuned = tune(study, trials, engine) if study.tune else {}
    runs = runs_of(study, {**trials, **tuned})
    engine.run([trial for own in zip(*runs.values(), strict=True) for trial in own])
    results = {at: [engine.results.get(trial.id) for trial in own] for at, own in runs.items()}
    return Comparison(study, results, tuned)


def tune(study: StudyFile, trials: Mapping[str, Trial], engine: Engine) -> dict[str, Trial]:
    """Trains each variant with all combinations of the values to tune, and returns the trials with the lowest metric."""
    points = {name: points_of(study, name, trial) for name, trial in trials.items()}
    engine.run([run for own in points.values() for run, _ in own])

    def metric(point: tuple[Trial, Trial]) -> float:
        result = engine.results.get(point[0].id)
        return result.metric(study.metric) if result else math.inf

    return {name: min(own, key=metric)[1] for name, own in points.items()}


def points_of(study: StudyFile, name: str, trial: Trial) -> list[tuple[Trial, Trial]]:
    """Returns the runs that tune a variant, in the largest budget, each with the trial that it would choose; none without
    values to tune."""
    values = itertools.product(*study.tune.values()) if study.tune else ()
    points = [trial.changed(**dict(zip(study.tune, point, strict=True))) for point in values]
    return [(run_of(study, name, p, TUNING_SEED, study.budgets[-1]), p) for p in points]


def runs_of(
    study: StudyFile, trials: Mapping[str, Trial]
) -> dict[tuple[str, float | None], list[Trial]]:
    """Returns the runs by variant and budget, for each seed. `trials` are the variants."""
    return {
        (name, budget): [
            run_of(study, name, trial, seed, budget) for seed in range(1, study.seeds + 1)
        ]
        for budget in study.budgets
        for name, trial in trials.items()
    }


def first_trials(study: StudyFile, engine: Engine) -> dict[str, Trial]:
    """Returns the variants' trials, with the settings that the recipe trains with. Raises `ValueError`, with the variant's
    name, for settings that the recipe refuses, or with which a run cannot be compared."""
    found = {}
    for name, own in study.variants.items():
        changes = {**study.settings, **own}
        warmup = changes.pop(WARMUP, None)
        try:
            trial = read_trial(study.recipe, changes, engine.precision)
            if warmup is not None and "warmup_steps" not in own:
                trial = trial.changed(**{WARMUP: float(warmup)})
            assert trial.flops_per_token  # raises for a model that is not possible
            if not trial.config.eval_every:
                raise ValueError("eval_every is 0, so a run has no val/loss: set it above 0")
            for ending in filter(trial.resolved.get, ENDING):
                raise ValueError(f"{ending} ends a run before its budget: set it to 0")
        except ValueError as error:
            raise ValueError(f"variant {name}: {error}") from error
        found[name] = trial
    return found


def run_of(study: StudyFile, name: str, trial: Trial, seed: int, budget: float | None) -> Trial:
    """Returns the run of a variant with a seed, and with the updates that a budget pays for, at least one."""
    batch = trial.config.total_batch_size
    if study.unit == "flops":
        batch *= trial.flops_per_token
    updates = max(1, round(budget / batch)) if budget else trial.config.max_steps
    return trial.lasting(updates).changed(label=f"{name}-seed{seed}", seed=seed)


def dry_run(study: StudyFile, engine: Engine) -> str:
    """Returns the runs of a study as a table, and the time of those that are not recorded. Trains nothing else."""
    trials, rows = first_trials(study, engine), {}
    runs = runs_of(study, trials)
    planned = [run for own in runs.values() for run in own]
    planned += [run for name, trial in trials.items() for run, _ in points_of(study, name, trial)]
    for (name, _), (first, *more) in runs.items():
        title = f"{name}, {short_number(first.tokens)} tokens"
        rows[title] = [f"{len(more) + 1}", f"{first.config.max_steps:,}", f"{first.flops:.3g}"]
    heads = ["variant", "runs", "updates of each", "FLOPs of each"]
    first = runs[study.baseline, study.budgets[-1]][0]
    left = [run for run in planned if not engine.knows(run)]
    return f"{markdown(heads, rows)}\n\n{engine.forecast(left, first)}"

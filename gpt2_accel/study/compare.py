"""Compares variants of a recipe: paired seeds, equal budgets, optionally tuned; differences to the baseline with intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpt2_accel.estimate.flops import duration
from gpt2_accel.report.figures import short_number
from gpt2_accel.report.page import markdown
from gpt2_accel.study.engine import Engine
from gpt2_accel.study.intervals import Verdict, interval, judge
from gpt2_accel.study.study_file import StudyFile, share
from gpt2_accel.study.trials import WARMUP, Result, Trial, read_trial
from gpt2_accel.study.tune import Tuning, pruner_of

TUNING_SEED = 0
ENDING = ("max_hours", "patience")  # settings that end a run before its budget


@dataclass
class Comparison:
    """The outcome of a study: the results by variant and budget, of each seed, None for a run that failed; the tuning by
    variant; the reasons of failures by run."""

    study: StudyFile
    results: Mapping[tuple[str, float | None], Sequence[Result | None]]
    tuned: Mapping[str, Tuning] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def values(self, variant: str, budget: float | None) -> list[float]:
        """Returns the metric of each seed, NaN for a run that failed."""
        results = self.results[variant, budget]
        return [math.nan if r is None else r.metric(self.study.metric) for r in results]

    def pairs(self, variant: str, budget: float | None) -> list[tuple[float, float]]:
        """Returns the metric of a variant and of the baseline for each seed that both have."""
        both = (self.values(name, budget) for name in (variant, self.study.baseline))
        return [pair for pair in zip(*both, strict=True) if not math.isnan(sum(pair))]

    def differences(self, variant: str, budget: float | None) -> list[float]:
        """Returns the difference of a variant to the baseline for each seed with which neither diverged."""
        return [a - b for a, b in self.pairs(variant, budget) if math.isfinite(a - b)]

    def verdict(self, variant: str, budget: float | None) -> Verdict | None:
        """Returns the verdict on a variant; None for the baseline, or if no pair of runs is there.

        If more or fewer of its runs diverged than of the baseline's, the verdict says that, not better or worse.
        """
        if variant == self.study.baseline:
            return None
        more = sum(math.isinf(a) - math.isinf(b) for a, b in self.pairs(variant, budget))
        if more:
            return Verdict(math.inf, math.inf, f"diverged {'more' if more > 0 else 'less'} often")
        differences = self.differences(variant, budget)
        return judge(differences) if differences else None

    def token_share(self, variant: str) -> str | None:
        """Returns the share of the baseline's tokens, in the largest budget, with which a variant reaches the baseline's
        metric, as text: mean over the seeds and half the width of the 95% interval, or a bound if a seed reaches it outside
        of the budgets. Interpolates over the logarithm of the tokens. None with one budget, or if a run is missing."""
        budgets, name = self.study.budgets, self.study.metric
        goals = self.results[self.study.baseline, budgets[-1]]
        rows = [*zip(*(self.results[variant, budget] for budget in budgets), strict=True)]
        if variant == self.study.baseline or len(budgets) < 2 or None in {*goals, *sum(rows, ())}:
            return None
        shares, bound = [], ""
        for goal, row in zip(goals, rows, strict=True):
            losses = np.minimum.accumulate([result.metric(name) for result in row])
            tokens = [math.log(result.tokens / goal.tokens) for result in row]
            if goal.metric(name) < losses[-1]:
                return f"> {math.exp(tokens[-1]):.0%}"
            bound = "< " if goal.metric(name) > losses[0] else bound
            shares.append(math.exp(np.interp(-goal.metric(name), -losses, tokens)))
        mean, half = interval(shares)
        return f"{bound}{mean:.0%}" if bound else f"{mean:.1%} ± {half:.1%}"


def compare(study: StudyFile, engine: Engine) -> Comparison:
    """Trains what a study needs and returns its outcome. Raises `ValueError` for settings that a recipe refuses."""
    trials, tuned = first_trials(study, engine), {}

    def loss(trial: Trial) -> float | None:
        id = with_budget(study, trial, study.budgets[-1]).id
        found = engine.results.get(id)
        if found is not None:
            return found.metric(study.metric)
        return math.inf if id in engine.failed else engine.pruned.get(id)

    for name in trials if study.axes else []:
        start = seeded(name, trials[name], TUNING_SEED)
        tuned[name] = tuning = Tuning(start, study.axes, study.trials, loss)
        while points := [t for t in tuning.tried() if loss(t) is None]:
            left = [with_budget(study, trial, study.budgets[-1]) for trial in points]
            engine.run(left, f"tune {name}", pruner_of(study.pruner))
        trials[name] = tuning.best()
    runs = runs_of(study, trials)
    engine.run([trial for own in zip(*runs.values(), strict=True) for trial in own])
    results = {at: [engine.results.get(trial.id) for trial in own] for at, own in runs.items()}
    return Comparison(study, results, tuned, engine.failed)


def seeded(name: str, trial: Trial, seed: int) -> Trial:
    """Returns the trial of a variant with a seed."""
    return trial.changed(label=f"{name}-seed{seed}", seed=seed)


def runs_of(
    study: StudyFile, trials: Mapping[str, Trial]
) -> dict[tuple[str, float | None], list[Trial]]:
    """Returns the runs by variant and budget, for each seed. `trials` are the variants."""
    return {
        (name, budget): [
            with_budget(study, seeded(name, trial, seed), budget)
            for seed in range(1, study.seeds + 1)
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
        if "warmup_steps" in own:
            changes.pop(WARMUP, None)
        warmup = changes.pop(WARMUP, None)
        try:
            found[name] = trial = read_trial(study.recipe, changes, engine.precision)
            if warmup is not None:
                found[name] = trial.changed(**{WARMUP: share(warmup)})
            assert trial.flops_per_token  # raises for a model that is not possible
            if not trial.config.eval_every:
                raise ValueError("eval_every is 0, so a run has no val/loss: set it above 0")
            for ending in filter(trial.resolved.get, ENDING):
                raise ValueError(f"{ending} ends a run before its budget: set it to 0")
        except ValueError as error:
            raise ValueError(f"variant {name}: {error}") from error
    return found


def with_budget(study: StudyFile, trial: Trial, budget: float | None) -> Trial:
    """Returns the trial with the updates that a budget pays for, at least one."""
    batch = trial.config.total_batch_size
    if study.unit == "flops":
        batch *= trial.flops_per_token
    return trial.lasting(max(1, round(budget / batch)) if budget else trial.config.max_steps)


def dry_run(study: StudyFile, engine: Engine) -> str:
    """Returns the runs of a study as a table, and the time of those that are not recorded by the measured speed of the
    baseline. Trains nothing else."""
    runs, rows, left = runs_of(study, first_trials(study, engine)), {}, []
    for (name, budget), own in runs.items():
        tuning = [own[0]] * study.trials if budget == study.budgets[-1] else []
        left += tuning + [trial for trial in own if not engine.knows(trial)]
        rows[f"{name}, {short_number(own[0].tokens)} tokens"] = [
            f"{len(own)}" + f" and {len(tuning)} to tune" * bool(tuning),
            f"{own[0].config.max_steps:,}",
            f"{own[0].flops:.3g}",
        ]
    table = markdown(["variant", "runs", "updates of each", "FLOPs of each"], rows)
    if not left:
        return f"{table}\n\nall runs are recorded"
    first, total = runs[study.baseline, study.budgets[-1]][0], sum(trial.flops for trial in left)
    speed = engine.tokens_per_second(first) * first.flops_per_token * len(engine.slots)
    return (
        f"{table}\n\n{len(left)} runs are not recorded: {total:.3g} FLOPs, {duration(total / speed)} with {len(engine.slots)} at a "
        "time, by the measured speed of a run alone, without evaluations"
    )

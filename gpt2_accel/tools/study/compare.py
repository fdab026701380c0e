"""Compares variants of a recipe: paired seeds, equal budgets, optionally tuned; differences to the baseline with intervals."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from gpt2_accel.evals.results import markdown
from gpt2_accel.hf.loss_plot import short_number
from gpt2_accel.tools.study.engine import Engine
from gpt2_accel.tools.study.intervals import LEVEL, fisher, holm, judge, plus_minus, reached
from gpt2_accel.tools.study.study_file import METRICS, WARMUP, StudyFile
from gpt2_accel.tools.study.trials import Trial, read_trial

TUNING_SEED = 0
ENDING = ("max_hours", "patience")  # settings that end a run before its budget
HEADS = ("variant", "verdict", "difference to the baseline")

At = tuple[str, float | None]  # a variant and a budget


@dataclass
class Comparison:
    """The outcome of a study.

    `values` has the metric of each seed by variant and budget: NaN for a run that failed, infinite for one that diverged.
    `tokens` are those of each of these runs. `diverged` has how many of them diverged and how many did not, `divergence` the
    p-values of `fisher` against the baseline, corrected by `holm`.
    """

    study: StudyFile
    values: Mapping[At, Sequence[float]]
    tokens: Mapping[At, int]

    def __post_init__(self) -> None:
        self.diverged = {at: counts(own) for at, own in self.values.items()}
        base = self.study.baseline
        others = [(name, budget) for name, budget in self.values if name != base]
        self.divergence = holm(
            {at: fisher(self.diverged[at], self.diverged[base, at[1]]) for at in others}
        )

    def verdict(self, variant: str, budget: float | None) -> tuple[str, str]:
        """Returns the verdict on a variant, or that it is the baseline, and the difference to the baseline with its interval,
        empty if it does not count.

        It is that the variant diverged more or less often, if the test says so, and else by the
        pairs in which no run diverged. If the numbers of runs that diverged differ, and there are
        too few runs to test this, it is these numbers.
        """
        base = self.study.baseline
        if variant == base:
            return "baseline", ""
        own = self.diverged[variant, budget]
        other = self.diverged[base, budget]
        more = own[0] * other[1] - other[0] * own[1]  # the sign of the difference of the shares
        if self.divergence[variant, budget] <= LEVEL:
            return f"diverged {'more' if more > 0 else 'less'} often", ""
        all_against_none = fisher((sum(own), 0), (0, sum(other)))
        if more and len(self.divergence) * all_against_none > LEVEL:
            return (
                f"{own[0]} of {sum(own)} diverged, {other[0]} of {sum(other)} of the baseline: too few seeds "
                "for a test"
            ), ""
        pairs = zip(self.values[variant, budget], self.values[base, budget], strict=True)
        # Not finite if a run of a pair diverged or is missing.
        differences = [a - b for a, b in pairs if math.isfinite(a - b)]
        return judge(differences), plus_minus(differences, "+.4f") if differences else ""

    def token_share(self, variant: str) -> str | None:
        """Returns the share of the baseline's tokens, in the largest budget, with which a variant reaches the baseline's
        metric, as `reached` describes it. None for the baseline, with one budget, or if a run is missing."""
        budgets, base = self.study.budgets, self.study.baseline
        losses = np.array([self.values[variant, budget] for budget in budgets])
        goals = np.array(self.values[base, budgets[-1]])
        if variant == base or len(budgets) < 2 or np.isnan(losses.sum() + goals.sum()):
            return None
        tokens = np.array([self.tokens[variant, budget] for budget in budgets])
        return reached(goals, losses, tokens / self.tokens[base, budgets[-1]])

    def row(self, variant: str, budget: float | None) -> list[str]:
        """Returns the cells of a table: verdict, difference to the baseline, metric, tokens."""
        values = self.values[variant, budget]
        finite = [value for value in values if math.isfinite(value)]
        metric = [plus_minus(finite) if finite else "none"]
        for what, test in (("diverged", math.isinf), ("missing", math.isnan)):
            count = sum(map(test, values))
            if count:
                metric.append(f"{count} {what}")
        tokens = short_number(self.tokens[variant, budget])
        return [*self.verdict(variant, budget), ", ".join(metric), tokens]

    def text(self, remarks: Iterable[str]) -> str:
        """Returns the outcome as Markdown: a table for each budget, the shares of tokens, and other remarks."""
        study = self.study
        parts = []
        for budget in study.budgets:
            parts.append(f"{study.unit}: {short_number(budget)}" if budget else "Verdict")
            rows = {name: self.row(name, budget) for name in study.variants}
            parts.append(markdown((*HEADS, METRICS[study.metric], "tokens"), rows))
        shares = {name: self.token_share(name) for name in study.variants}
        lines = [
            f"- {name} reaches the {study.metric} of {study.baseline} with {share} of its tokens"
            for name, share in shares.items()
            if share
        ]
        lines += [f"- {line}" for line in remarks]
        if lines:
            parts += ["Remarks", "\n".join(lines)]
        return "\n\n".join(parts)


def counts(values: Sequence[float]) -> tuple[int, int]:
    """Returns how many runs diverged, and how many did not, by their metrics."""
    return values.count(math.inf), sum(map(math.isfinite, values))


def compare(study: StudyFile, engine: Engine) -> str:
    """Trains what a study needs and returns its outcome as Markdown. Raises `ValueError` for settings that a recipe refuses."""
    tuned, remarks = tune(study, engine) if study.tune else ({}, [])
    runs = runs_of(study, tuned)
    planned = [*chain.from_iterable(zip(*runs.values(), strict=True))]  # seed by seed
    engine.run(planned)
    values = {}
    for at, own in runs.items():
        values[at] = [engine.metric(run, study.metric, math.nan) for run in own]
    tokens = {at: own[0].tokens for at, own in runs.items()}
    return Comparison(study, values, tokens).text(remarks + engine.caveats(planned))


def tune(study: StudyFile, engine: Engine) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Trains the tuning points of each variant. Returns the settings of the one with the lowest metric by variant, and remarks
    on them."""
    points = tuning_points(study)
    engine.run(run for _, _, run in points)

    tuned = {}
    remarks = []
    for name in study.variants:
        own = [point for point in points if point[0] == name]
        _, tuned[name], _ = min(own, key=lambda point: engine.metric(point[2], study.metric))
        remarks += tuning_remarks(name, tuned[name], [tried for _, tried, _ in own])
    return tuned, remarks


def tuning_remarks(
    name: str, best: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Returns what tuning chose for a variant, and which of it is at an end of its axis beyond which there may be more: not at 0,
    and no text."""
    values = ", ".join(f"{axis} {value}" for axis, value in best.items())
    lines = [f"{name}: {len(tried)} trials chose {values}"]
    for axis, value in best.items():
        if type(value) in (int, float) and value != 0:
            along = [point[axis] for point in tried]
            if value in (min(along), max(along)):
                lines.append(f"{name}: the best {axis} is at the end of its axis: extend it")
    return lines


def tuning_points(study: StudyFile) -> list[tuple[str, dict[str, Any], Trial]]:
    """Returns each variant with each combination of the values to tune, and its run in the largest budget."""
    points = []
    for name, values in itertools.product(study.variants, itertools.product(*study.tune.values())):
        own = dict(zip(study.tune, values, strict=True))
        run = run_of(study, name, own, TUNING_SEED, study.budgets[-1])
        typed = {axis: run.resolved.get(axis, value) for axis, value in own.items()}
        points.append((name, typed, run))
    return points


def runs_of(study: StudyFile, tuned: Mapping[str, Mapping[str, Any]]) -> dict[At, list[Trial]]:
    """Returns the runs by variant and budget, for each seed. `tuned` has the settings that tuning chose by variant."""
    runs: dict[At, list[Trial]] = {}
    for budget, name in itertools.product(study.budgets, study.variants):
        seeds = range(1, study.seeds + 1)
        own = tuned.get(name, {})
        runs[name, budget] = [run_of(study, name, own, seed, budget) for seed in seeds]
    return runs


def run_of(
    study: StudyFile, name: str, tuned: Mapping[str, Any], seed: int, budget: float | None
) -> Trial:
    """Returns the run of a variant with a seed, and with the updates that a budget pays for, at least one.

    Raises `ValueError`, with the variant's name, for settings that the recipe refuses, or with which a run cannot be compared.
    """
    try:
        changes = study.changes(name, tuned)
        share = changes.pop(WARMUP, None)
        trial = read_trial(study.recipe, changes)
        batch = trial.config.total_batch_size
        flops = batch * trial.flops_per_token  # raises for a model that is not possible
        each = flops if study.unit == "flops" else batch
        updates = max(1, round(budget / each)) if budget else trial.config.max_steps
        changes["max_steps"] = updates
        if share is not None:
            changes["warmup_steps"] = round(share * updates)
        trial = read_trial(study.recipe, changes)
        if not trial.config.eval_every:
            raise ValueError("eval_every is 0, so a run has no val/loss: set it above 0")
        for ending in filter(trial.resolved.get, ENDING):
            raise ValueError(f"{ending} ends a run before its budget: set it to 0")
    except ValueError as error:
        raise ValueError(f"variant {name}: {error}") from error
    return trial.changed(f"{name}-seed{seed}", seed=seed)


def dry_run(study: StudyFile, engine: Engine) -> str:
    """Returns the runs of a study as a table, and the time of those that are not recorded. Trains nothing else."""
    runs = runs_of(study, {})
    planned = [*chain.from_iterable(runs.values())]
    sample = planned[-1]  # of the largest budget
    if study.tune:
        planned += [run for _, _, run in tuning_points(study)]
    return engine.forecast(planned, sample)

"""Coordinate descent over settings: walks along one setting at a time, as long as the loss falls."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpt2_accel.study.engine import Plan, Trial
from gpt2_accel.study.table import Result

Axes = Mapping[str, Sequence[Any]]
LONG_AXIS = 8  # values; the first pass takes two steps at once along longer axes


@dataclass
class Tuned:
    """The outcome of a descent: the best trial, its metric, the number of trials, and the settings whose best value is at
    an end of its axis. `converged` says that no single step helped any more."""

    trial: Trial
    loss: float
    trials: int
    converged: bool
    at_end: list[str] = field(default_factory=list)


@dataclass
class Descent:
    """Tunes `start` over `axes`. `budgeted` gives a trial its number of updates, `metric` the number to lower.

    Values that are no numbers have no order: all others are tried. It ends after `budget` trials; without a budget when a
    pass of single steps changes nothing. When `total_batch_size` changes, `learning_rate` changes by the square root of its
    ratio, to the nearest value of its axis, if it has one (Malladi et al., 2022, arXiv:2205.10287). A run that failed or
    diverged has an infinite loss.
    """

    start: Trial
    axes: Axes
    budget: int | None
    budgeted: Callable[[Trial], Trial]
    metric: Callable[[Result], float]

    def plan(self) -> Plan[Tuned]:
        """The plan of the descent; returns `Tuned`."""
        self.losses: dict[str, float] = {}
        self.best = self.start
        yield from self._losses([self.start])
        stride, converged = 2, False
        while not (converged or self._spent()):
            before = self.best
            for name, values in self.axes.items():
                yield from self._walk(name, values, stride if len(values) > LONG_AXIS else 1)
            converged = stride == 1 and self.best is before
            stride = 1
        ends = [name for name, values in self.axes.items() if self._is_at_end(name, values)]
        loss = self.losses[self._key(self.best)]
        return Tuned(self.best, loss, len(self.losses), converged, ends)

    def _spent(self) -> bool:
        return self.budget is not None and len(self.losses) >= self.budget

    def _walk(self, name: str, values: Sequence[Any], stride: int) -> Plan[None]:
        """Tries both neighbours of the current value and continues in the better direction while the loss falls. If the values
        have no order, it tries all of them."""
        at = self._at(name, values)
        steps = (
            [-stride, stride]
            if ordered(values)
            else [i - at for i in range(len(values)) if i != at]
        )
        while steps and not self._spent():
            at = self._at(name, values)
            near = {step: values[at + step] for step in steps if 0 <= at + step < len(values)}
            trials = {step: self._changed(name, value) for step, value in near.items()}
            if self.budget is not None:
                new = [
                    step for step, trial in trials.items() if self._key(trial) not in self.losses
                ]
                left = self.budget - len(self.losses)
                trials = {s: t for s, t in trials.items() if s not in new or new.index(s) < left}
            if not trials:
                return
            losses = yield from self._losses(list(trials.values()))
            loss, step = min(zip(losses, trials, strict=True))
            if loss >= self.losses[self._key(self.best)]:
                return
            self.best, steps = trials[step], [step] if ordered(values) else []

    def _losses(self, trials: Sequence[Trial]) -> Plan[list[float]]:
        """Returns the losses of trials."""
        results = yield [self.budgeted(trial) for trial in trials]
        for trial, result in zip(trials, results, strict=True):
            loss = math.inf if result is None else self.metric(result)
            self.losses[self._key(trial)] = loss
        return [self.losses[self._key(trial)] for trial in trials]

    def _at(self, name: str, values: Sequence[Any]) -> int:
        """Returns the index of the best trial's value on an axis."""
        return list(values).index(self.best.resolved[name])

    def _is_at_end(self, name: str, values: Sequence[Any]) -> bool:
        """Whether the best value is at an end of its axis beyond which there are values: not at 0, or one sequence."""
        value = self.best.resolved[name]
        last = 0 if name != "total_batch_size" else self.best.config.tokens_per_sequence
        at_end = self._at(name, values) in (0, len(values) - 1)
        return ordered(values) and at_end and value != last

    def _changed(self, name: str, value: Any) -> Trial:
        """Returns the best trial with another value, and a learning rate that fits another batch."""
        changes = {name: value}
        rates = [rate for rate in self.axes.get("learning_rate", []) if rate > 0]
        rate = self.best.resolved["learning_rate"]
        if name == "total_batch_size" and rates and rate > 0:
            rate *= math.sqrt(value / self.best.resolved[name])
            changes["learning_rate"] = min(rates, key=lambda other: abs(math.log(other / rate)))
        return self.best.changed(**changes)

    def _key(self, trial: Trial) -> str:
        """Returns what tells the trials of this descent apart."""
        return repr([trial.resolved[name] for name in self.axes])


def ordered(values: Sequence[Any]) -> bool:
    """Whether the values of an axis are numbers."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)

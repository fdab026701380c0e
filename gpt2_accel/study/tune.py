"""Tunes a trial: all combinations of values if they are few, else those that Optuna's TPE sampler suggests.

The suggestions follow from the losses of the trials before, so several drivers, and a study that goes on after a kill, train
the same.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt2_accel.study.engine import PARTS
from gpt2_accel.study.study_file import ordered
from gpt2_accel.study.trials import Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner

AT_ONCE = 8  # trials that the sampler suggests together


@dataclass
class Tuning:
    """The tuning of `start`, a trial without a budget, over `axes` (values by setting) with a number of `trials`.

    `loss` returns the loss of a trial, infinite if it failed, and None as long as it is not known.
    """

    start: Trial
    axes: Mapping[str, Sequence[Any]]
    trials: int
    loss: Callable[[Trial], float | None]

    def tried(self) -> list[Trial]:
        """Returns the trials to train, without a budget, as far as the losses of the first tell the next."""
        if math.prod(map(len, self.axes.values())) <= self.trials:
            return [self._at(point) for point in itertools.product(*self.axes.values())]
        import optuna

        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
        ranges = {name: places(values) for name, values in self.axes.items()}
        draw, found = random.Random(0), {}
        with suppress(ValueError):  # the variant's own values may not be on the axes
            study.enqueue_trial({n: v.index(self.start.resolved[n]) for n, v in self.axes.items()})
        while len(found) < self.trials:
            batch = {}
            while len(batch) < min(AT_ONCE, self.trials - len(found)):
                asked = study.ask(ranges)
                point = tuple(values[asked.params[name]] for name, values in self.axes.items())
                if point in found or point in batch:
                    study.tell(asked, state=optuna.trial.TrialState.FAIL)
                    study.enqueue_trial({n: draw.randrange(len(v)) for n, v in self.axes.items()})
                else:
                    batch[point] = asked
            found |= {point: self._at(point) for point in batch}
            losses = [self.loss(found[point]) for point in batch]
            if None in losses:
                break
            for asked, loss in zip(batch.values(), losses, strict=True):
                study.tell(asked, loss)
        return [*found.values()]

    def best(self) -> Trial:
        """Returns the trial with the lowest loss, without a budget."""
        return min(self.tried(), key=self.loss)

    def at_end(self) -> list[str]:
        """Returns the settings whose best value is at an end of its axis beyond which there may be others: not at 0."""
        best = self.best().resolved
        return [
            name
            for name, values in self.axes.items()
            if ordered(values) and best[name] in (values[0], values[-1]) and best[name] != 0
        ]

    def _at(self, point: tuple) -> Trial:
        return self.start.changed(**dict(zip(self.axes, point, strict=True)))


def pruner_of(name: str) -> "BasePruner | None":
    """Returns Optuna's pruner of that name. Earlier than half of a run, the median drops later winners."""
    import optuna

    return optuna.pruners.MedianPruner(n_warmup_steps=PARTS // 2) if name == "median" else None


def places(values: Sequence[Any]) -> "BaseDistribution":
    """Returns Optuna's distribution of the places on an axis: numbers have an order."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    last = len(values) - 1
    return IntDistribution(0, last) if ordered(values) else CategoricalDistribution(range(last + 1))

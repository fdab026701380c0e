"""What Optuna's pruners would have saved and lost on trials that were trained to their end: docs/studies.md has the result.

    python benchmarks/pruning.py

`results/cpu/pruning.csv` has the val/loss of each trial after each tenth of it: AdamW, 2 layers of 64, 200 updates of 768 tokens of
the quickstart's text, seed 0, settings by TPE out of 12 rates, 4 schedules, 4 decays, 5 values of beta2 and 4 warmups. A replay
takes 20 trials in a random order, one after the other, and asks the pruner after each tenth.
"""

import csv
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner

from gpt2_accel.study.engine import PARTS
from gpt2_accel.study.tune import pruner_of

TABLE = Path(__file__).parent / "results/cpu/pruning.csv"
TRIALS, REPLAYS = 20, 200
PRUNERS = {
    "the median in the second half (`pruner: median`)": lambda: pruner_of("median"),
    "the median from the first tenth on": MedianPruner,
    "Hyperband": lambda: HyperbandPruner(1, PARTS),
}

Curves = Sequence[Mapping[int, float]]  # of each trial, the loss by tenth


def read_curves(path: Path = TABLE) -> dict[str, Curves]:
    """Returns the curves of the trials by variant."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            own = found.setdefault(row["variant"], {}).setdefault(row["trial"], {})
            own[int(row["tenth"])] = float(row["loss"])
    return {variant: [*own.values()] for variant, own in found.items()}


def replay(curves: Curves, pruner: BasePruner) -> tuple[float, bool, float]:
    """Returns the share of the compute that a pruner saves on trials in this order, whether it ends the best one, and by how
    many nats the best trial that is left is worse."""
    study, paid, left = optuna.create_study(pruner=pruner), 0, []
    for curve in curves:
        trial = study.ask()
        for tenth, loss in sorted(curve.items()):
            paid += 1
            if tenth == PARTS:
                study.tell(trial, loss)
                left.append(loss)
                break
            trial.report(loss, tenth)
            if trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
    best = min(curve[PARTS] for curve in curves)
    return 1 - paid / sum(map(len, curves)), best not in left, min(left) - best


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for variant, curves in read_curves().items():
        for name, pruner in PRUNERS.items():
            draw = random.Random(0)
            found = [replay(draw.sample(curves, TRIALS), pruner()) for _ in range(REPLAYS)]
            saved, lost, worse = zip(*found, strict=True)
            print(
                f"{variant}, {name}: saves {fmean(saved):.0%}, loses the best trial in {fmean(lost):.1%} of {REPLAYS} replays, "
                f"at most {max(worse):.3f} nats"
            )


if __name__ == "__main__":
    main()

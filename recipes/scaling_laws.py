"""Find the best size and number of tokens for a compute budget on your own data: a scaling law, fitted to small runs.

    python recipes/scaling_laws.py --data_dir data/mine --budgets 1e12 3e12 1e13 --target_flops 1e14

For each budget in FLOPs, sizes of one architecture train with as many tokens as the budget pays for, until at least two sizes
lie on each side of the lowest loss; docs/scaling.md describes it. One run per GPU, or per CPU core, trains at a time; the same
command continues what was killed. `--dry_run true` prints the runs, their time, memory and epochs first.
Writes into runs/scaling_laws: `runs.csv` records the runs, and a run in it is done; `law.json` is the law, for `--law`;
`scaling.html` shows it; `best.yaml` has the settings of the best run with `--target_flops`, or with `--target_hours` on this
machine or the GPU of `--device`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import ARCHITECTURES, check_ranges, parse_config, required, setting
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.device import GPUS
from gpt2_accel.estimate.law import MAX_EPOCHS, Rules
from gpt2_accel.study.engine import require_study
from gpt2_accel.study.options import EngineOptions
from gpt2_accel.study.scaling import Grid, flops_per_second, train_grid
from gpt2_accel.study.scaling_outcome import as_text, grid_as_text, write_best, write_page
from gpt2_accel.study.trials import read_trial

RECIPE = Path(__file__).with_name("quickstart.py")
NEVER = 10**9  # updates: only the last is evaluated
FARTHEST = 100_000  # a target, as a multiple of the largest budget


@dataclass(kw_only=True)
class ScalingLaws(EngineOptions):
    data_dir: str = required("folder of token shards that `prepare_data` wrote")
    budgets: list[float] = required("FLOPs of a run, several numbers")
    architecture: str = setting("gpt2", f"one of {', '.join(ARCHITECTURES)}")
    n_positions: int = setting(128, "tokens per sequence")
    learning_rate: float = setting(
        Rules.learning_rate, "Muon's peak rate for a width of 64 and 2,048 tokens per update"
    )
    weight_decay: float = setting(Rules.weight_decay, "decay of a run of 2M tokens")
    eval_tokens: int = setting(262_144, "validation tokens of the last evaluation, at most")
    max_epochs: float = setting(MAX_EPOCHS, "refuse a run that reads the data more often")
    target_flops: float | None = setting(None, "FLOPs of the run for which best.yaml is written")
    target_hours: float | None = setting(None, "its hours, in place of its FLOPs")
    device: str | None = setting(None, "GPU of target_hours and dry_run; default this machine")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self,
            positive="n_positions eval_tokens",
            not_negative="learning_rate weight_decay",
            above_zero="max_epochs target_flops target_hours",
        )
        if not self.budgets or not all(0 < budget < float("inf") for budget in self.budgets):
            raise ValueError(f"budgets must be above 0, got {self.budgets}")
        self.budgets.sort()
        if any(high < 1.1 * low for low, high in pairwise(self.budgets)):
            raise ValueError(f"budgets must differ by a tenth, got {self.budgets}")
        if self.target_flops and self.target_hours:
            raise ValueError("--target_flops and --target_hours say the same: give one")
        if self.device not in (None, *GPUS):
            raise ValueError(f"device must be one of {', '.join(GPUS)}, got {self.device!r}")

    def grid(self, precision: Mapping[str, str]) -> Grid:
        """Returns the grid of runs with this precision."""
        if "val" not in read_manifest(self.data_dir)["splits"]:
            raise ValueError(f"{self.data_dir} has no validation data: prepare it with some")
        names = ("data_dir", "architecture", "n_positions", "eval_tokens")
        settings = {name: getattr(self, name) for name in names}
        settings |= {"eval_every": NEVER, "sample_every": 0}
        base = read_trial(RECIPE, settings, precision)
        rules = Rules(self.learning_rate, self.weight_decay)
        return Grid(base, self.budgets, rules, self.max_epochs)


def main() -> None:
    config = parse_config(ScalingLaws)
    engine = config.engine(Path("runs/scaling_laws"))
    grid = config.grid(engine.precision)
    if config.dry_run:
        for budget in grid.budgets:
            grid.first(budget)  # raises before the speed is measured
        print(grid_as_text(grid, engine, flops_per_second(grid, engine, config.device)))
        return
    require_study()
    target = config.target_flops
    if config.target_hours:
        target = 3600 * config.target_hours * flops_per_second(grid, engine, config.device)
    if target and target > FARTHEST * max(grid.budgets):
        raise ValueError(
            f"the target is {target:.3g} FLOPs: a law says nothing of more than {FARTHEST:,} times the largest budget"
        )
    outcome = train_grid(grid, engine)
    print(as_text(outcome, target))
    files = [*filter(Path.exists, [engine.table]), write_page(outcome, engine.folder, target)]
    if outcome.law is not None:
        outcome.law.save(path := engine.folder / "law.json")
        files += [path] + ([write_best(outcome, target, engine.folder)] if target else [])
    print("\n" + "\n".join(map(str, files)))
    if outcome.failed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)

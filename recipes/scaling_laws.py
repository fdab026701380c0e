"""Find the best size and number of tokens for a compute budget: a law fitted to small runs.

    python recipes/scaling_laws.py --data_dir data/mine --budgets 1e12 3e12 1e13 --target_flops 1e14

For each budget in FLOPs, models of several sizes train on as many tokens as the budget allows;
docs/scaling.md describes the method. One run trains at a time on each GPU, or on each CPU core.
After an interruption, the same command continues. `--dry_run` prints the runs and their FLOPs. The
recipe writes into runs/scaling_laws: `runs.csv` lists the finished runs, `law.json` has the law,
and `scaling.md` and `scaling.png` show it, with `--target_flops` also the command of the best run.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import ARCHITECTURES, check_ranges, parse_config, required, setting
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.hf.loss_plot import require_matplotlib, save_png
from gpt2_accel.runtime.files import write_file, write_json
from gpt2_accel.tools.study.runs import Queue, StudyOptions
from gpt2_accel.tools.study.scaling import LEARNING_RATE, MAX_EPOCHS, SIZES, Grid
from gpt2_accel.tools.study.trials import read_trials

RECIPE = Path(__file__).with_name("quickstart.py")


@dataclass(kw_only=True)
class ScalingLaws(StudyOptions):
    data_dir: str = required("folder of token shards that `prepare_data` wrote")
    budgets: list[float] = required("FLOPs of a run, several numbers")
    architecture: str = setting("gpt2", f"one of {', '.join(ARCHITECTURES)}")
    sizes: int = setting(SIZES, "model sizes per budget, around 20 tokens per parameter")
    n_positions: int = setting(128, "tokens per sequence")
    learning_rate: float = setting(
        LEARNING_RATE, "peak rate of Muon for a width of 64 and 2,048 tokens per update"
    )
    eval_tokens: int = setting(262_144, "validation tokens of the last evaluation, at most")
    max_epochs: float = setting(MAX_EPOCHS, "passes over the data in a run, at most")
    target_flops: float | None = setting(
        None, "FLOPs of a larger run, to predict its best size and loss"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self,
            positive="sizes n_positions eval_tokens",
            above_zero="learning_rate max_epochs target_flops",
        )
        if not all(0 < budget < float("inf") for budget in self.budgets):
            raise ValueError(f"budgets must be above 0, got {self.budgets}")
        self.budgets = sorted(set(self.budgets))

    def grid(self, queue: Queue) -> Grid:
        """Returns the grid of runs. Raises `ValueError` if there is no validation data."""
        if "val" not in read_manifest(self.data_dir)["splits"]:
            raise ValueError(f"{self.data_dir} has no validation data: prepare it with some")
        names = ("data_dir", "architecture", "n_positions", "eval_tokens")
        settings = {name: getattr(self, name) for name in names}
        [base] = read_trials(RECIPE, [("quickstart", settings)])
        return Grid(base, queue, self.budgets, self.sizes, self.learning_rate, self.max_epochs)


def main() -> None:
    config = parse_config(ScalingLaws)
    queue = config.queue("runs/scaling_laws")
    grid = config.grid(queue)
    if config.dry_run:
        print(queue.forecast(grid.runs))
        return
    require_matplotlib()
    law = grid.train()
    text = grid.text(law, config.target_flops)
    print(text)
    write_file(queue.folder / "scaling.md", text + "\n")
    save_png(grid.figure(law), queue.folder / "scaling.png")
    if law is not None:
        record = {
            "settings": grid.base.changes,
            "budgets": grid.budgets,
            "law": law.law,
            "spread": law.spread,
            "form": law.form,
        }
        write_json(queue.folder / "law.json", record)
    print(f"\nThe table of runs, the law and its picture are in {queue.folder}.")
    if queue.failed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)

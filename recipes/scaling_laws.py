"""Find the best size and number of tokens for a compute budget: a law fitted to small runs.

    python recipes/scaling_laws.py --data_dir data/mine --budgets 1e12 3e12 1e13 --target_flops 1e14

For each budget in FLOPs, models of several sizes train on as many tokens as the budget allows;
docs/scaling.md describes the method. The runs train one after the other; several of these commands
share them. After an interruption, the same command continues. `--dry_run` prints the runs and their
FLOPs. The recipe writes into runs/scaling_laws: `runs.csv` lists the finished runs, `law.json` has
the law, `scaling.md` what it says, with `--target_flops` also the command of the best run.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import ARCHITECTURES, check_ranges, parse_config, required, setting
from gpt2_accel.runtime.files import write_file, write_json
from gpt2_accel.tools.study import StudyOptions

RECIPE = Path(__file__).with_name("quickstart.py")


@dataclass(kw_only=True)
class ScalingLaws(StudyOptions):
    data_dir: str = required("folder of token shards that `prepare_data` wrote")
    budgets: list[float] = required("FLOPs of a run, two numbers or more")
    architecture: str = setting("gpt2", f"one of {', '.join(ARCHITECTURES)}")
    sizes: int = setting(7, "model sizes per budget, around 20 tokens per parameter")
    n_positions: int = setting(128, "tokens per sequence")
    learning_rate: float = setting(
        0.0165, "peak rate of Muon for a width of 64 and 2,048 tokens per update"
    )
    eval_tokens: int = setting(262_144, "validation tokens of the last evaluation, at most")
    # Data that is repeated more often is worth less (Muennighoff et al., 2023, arXiv:2305.16264).
    max_epochs: float = setting(4.0, "passes over the data in a run, at most")
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
        self.budgets = sorted(set(self.budgets))
        if not all(0 < budget < float("inf") for budget in self.budgets):
            raise ValueError(f"budgets must be above 0, got {self.budgets}")
        if len(self.budgets) < 2:
            raise ValueError("budgets needs two different numbers or more to fit a law")


def main() -> None:
    config = parse_config(ScalingLaws)
    from gpt2_accel.data.shards import read_manifest
    from gpt2_accel.tools.study import scaling
    from gpt2_accel.tools.study.runs import Runs, read_trial

    tokens = read_manifest(config.data_dir)["splits"]["train"]["tokens"]
    names = ("data_dir", "architecture", "n_positions", "eval_tokens")
    settings = {name: getattr(config, name) for name in names}
    sizes = []
    for width in scaling.WIDTHS:
        sizes.append(read_trial(RECIPE, f"width{width}", settings | scaling.size_of(width)))
    grid = scaling.grid(sizes, config.budgets, config.sizes, config.learning_rate)
    trials = [trial for trial, _ in grid]
    for trial in trials:
        if trial.tokens > config.max_epochs * tokens:
            raise ValueError(
                f"{trial}, more than {config.max_epochs:g} times the data: prepare more text, "
                "change --budgets or --sizes, or raise --max_epochs"
            )
    if config.dry_run:
        print(*trials, sep="\n")
        return
    runs = Runs(Path(config.output_dir or "runs/scaling_laws"))
    losses = runs.train(trials)
    law = scaling.fit_runs(grid, losses)
    values = dict(zip(scaling.NAMES, law.values.tolist(), strict=True))
    text = (
        "loss = E + A / parameters^alpha + B / tokens^beta: "
        f"{', '.join(f'{name} {value:.4g}' for name, value in values.items())}\n\n"
        f"Standard deviation of the residuals: {law.spread:.4f} nats. p = {law.form:.2g} that the "
        f"residuals of all budgets have the same mean: below {scaling.LEVEL} the law does not fit "
        "its own runs, so do not extrapolate it; add a larger budget and leave out the smallest."
    )
    if config.target_flops:
        text += "\n\n" + scaling.predict(law, sizes, config.target_flops, config.learning_rate)
    text = "\n\n".join([text] + runs.caveats(trials))
    write_file(runs.folder / "scaling.md", text + "\n")
    record = {"budgets": config.budgets, "law": values, "spread": law.spread, "form": law.form}
    write_json(runs.folder / "law.json", {"settings": settings} | record)
    print(f"\n{text}\n\nThe table of runs and the law are in {runs.folder}.")
    if not all(map(math.isfinite, losses)):
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)

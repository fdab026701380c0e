"""Compare variants of a recipe: paired seeds, equal budgets, intervals, and a verdict for each.

    python recipes/compare.py recipes/studies/learning_rate.yaml

The file names a recipe, the settings of each variant, a budget of tokens or FLOPs, and the number
of seeds; docs/studies.md describes it. The runs train one after the other. To train several at a
time, on several GPUs or machines, start the same command several times: they share the runs. Each
run has a folder in `runs/<name of the file>`; `runs.csv` there lists the finished runs. After an
interruption, the same command continues the study. `--dry_run` prints the runs and their FLOPs. The
recipe prints a table with a verdict for each variant, and writes it to `study.md`.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import parse_config, required
from gpt2_accel.runtime.files import write_file
from gpt2_accel.tools.study import StudyOptions


@dataclass(kw_only=True)
class Compare(StudyOptions):
    study: str = required("YAML file of the study")


def main() -> None:
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        words.insert(0, "--study")  # the file may be given without its option
    config = parse_config(Compare, words)
    from gpt2_accel.tools.study.compare import compare, read_study, seed_trials, tuning_trials
    from gpt2_accel.tools.study.runs import Runs

    path = Path(config.study)
    study = read_study(path, Path(__file__).parent)
    if config.dry_run:
        trials = tuning_trials(study)
        for budget in study.budgets:
            trials += seed_trials(study, {}, budget, range(1, study.seeds + 1))
        print(*trials, sep="\n")
        return
    runs = Runs(Path(config.output_dir or f"runs/{path.stem}"))
    text = compare(study, runs)
    written = runs.folder / "study.md"
    write_file(written, text + "\n")
    print(f"\n{text}\n\n{written}\n{runs.table}")
    if any(math.isnan(float(row["loss"])) for row in runs.rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)

"""Compare variants of a recipe: paired seeds, equal budgets, intervals, and a verdict for each.

    python recipes/compare.py recipes/studies/learning_rate.yaml

The file names a recipe, the settings of each variant, a budget of tokens or FLOPs, and the number
of seeds; docs/studies.md describes it. One run trains at a time on each GPU, or on each CPU core.
Each run has a folder in `runs/<name of the file>`; `runs.csv` there lists the finished runs. After
an interruption, the same command continues the study. `--dry_run` prints the runs and their FLOPs.
The recipe prints a table with a verdict for each variant, and writes it to `study.md`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import parse_config, required
from gpt2_accel.runtime.files import write_file
from gpt2_accel.tools.study.compare import compare, preview, read_study
from gpt2_accel.tools.study.runs import StudyOptions


@dataclass(kw_only=True)
class Compare(StudyOptions):
    study: str = required("YAML file of the study")


def main() -> None:
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        words.insert(0, "--study")  # the file may be given without its option
    config = parse_config(Compare, words)
    path = Path(config.study)
    queue = config.queue(f"runs/{path.stem}")
    study = read_study(path, Path(__file__).parent)
    if config.dry_run:
        print(preview(study, queue))
        return
    text = compare(study, queue)
    written = queue.folder / "study.md"
    write_file(written, text + "\n")
    print(f"{text}\n\n{written}\n{queue.table}")
    if queue.failed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)

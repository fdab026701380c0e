"""Compare variants of a recipe: paired seeds, equal budgets, an interval for each difference, and a verdict.

    python recipes/compare.py recipes/studies/learning_rate.yaml

The file names a recipe, the variants' settings, a budget of tokens, FLOPs or minutes, and the number of seeds;
docs/studies.md describes it. One run per GPU, or per CPU core, trains at a time, in a folder of its own in
`runs/<name of the file>`; the same command continues what was killed. `runs.csv` there records the runs: a run in it is done.
Prints a table with verdicts and writes it as a page, `study.html`.
"""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import check_ranges, parse_config, required, setting
from gpt2_accel.study.children import launch_environment, slots
from gpt2_accel.study.compare import compare, read_study
from gpt2_accel.study.engine import Engine
from gpt2_accel.study.outcome import agent_lines, as_text, write_page


@dataclass
class Compare:
    study: str = required("YAML file of the study")
    output_dir: str | None = setting(None, "folder of the study; default runs/<name of the file>")
    table: str | None = setting(
        None, "CSV file that records the runs; default runs.csv in the folder"
    )
    accelerate_config: str | None = setting(
        None, "Accelerate config for each run: its precision and compilation; one process"
    )
    processes: int | None = setting(None, "runs at a time; default one per GPU, or per CPU core")
    part: str | None = setting(
        None, "I/N: only every N-th run, from 0/N to N-1/N, without a shared disk"
    )
    tune: bool = setting(True, "tune each variant first, if the file has axes")
    keep_models: bool = setting(False, "keep the weights and checkpoints of recorded runs")

    def __post_init__(self) -> None:
        check_ranges(self, positive="processes")


def parse_part(text: str | None) -> tuple[int, int]:
    """Parses `--part`."""
    number, slash, count = (text or "0/1").partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"part must be I/N with I below N, such as 0/8, got {text!r}")
    return int(number), int(count)


def main() -> None:
    begun = time.monotonic()
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        words.insert(0, "--study")
    config = parse_config(Compare, words)
    study = read_study(config.study, Path(__file__).parent)
    if not config.tune:
        study = replace(study, tuning=None)
    folder = Path(config.output_dir or Path("runs") / study.path.stem)
    part = parse_part(config.part)
    table = Path(
        config.table
        or folder / ("runs.csv" if part == (0, 1) else f"runs-{part[0]}-of-{part[1]}.csv")
    )
    env, precision = launch_environment(config.accelerate_config)
    engine = Engine(
        folder, table, slots(config.processes, env), env, precision, config.keep_models, part
    )
    outcome = compare(study, engine)
    if part != (0, 1):
        print(
            f"part {config.part} is recorded in {table}: copy the tables of all parts into one folder"
        )
        sys.exit(1 if outcome.failed else 0)
    print(as_text(outcome))
    print(f"\n{write_page(outcome, engine)}\n{table}")
    print(agent_lines(outcome, engine, time.monotonic() - begun))
    if outcome.failed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)

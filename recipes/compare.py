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
from gpt2_accel.config import parse_config, required, setting
from gpt2_accel.report.figures import require_matplotlib
from gpt2_accel.study.compare import compare, read_study
from gpt2_accel.study.intervals import require_scipy
from gpt2_accel.study.options import EngineOptions
from gpt2_accel.study.outcome import agent_lines, as_text, write_page


@dataclass(kw_only=True)
class Compare(EngineOptions):
    study: str = required("YAML file of the study")
    part: str | None = setting(
        None, "I/N: only every N-th run, from 0/N to N-1/N, without a shared disk"
    )
    tune: bool = setting(True, "tune each variant first, if the file has axes")


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
    part = parse_part(config.part)
    if part == (0, 1):
        require_scipy()
        require_matplotlib()
    engine = config.engine(Path("runs") / study.path.stem, part)
    outcome = compare(study, engine)
    if part != (0, 1):
        print(
            f"part {config.part} is recorded in {engine.table}: copy the tables of all parts into one folder"
        )
        sys.exit(1 if outcome.failed else 0)
    print(as_text(outcome))
    print(f"\n{write_page(outcome, engine)}\n{engine.table}")
    print(agent_lines(outcome, engine, time.monotonic() - begun))
    if outcome.failed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)

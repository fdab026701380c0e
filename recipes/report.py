"""Draw a report of one or several runs: one HTML file that works offline, and PNGs.

    python recipes/report.py runs/quickstart
    python recipes/report.py runs/a runs/b --output_dir compared

The report shows curves over tokens, time and FLOPs, evaluations, samples and settings. It also
works for runs that are not finished. Needs matplotlib: pip install 'matplotlib>=3.9'.
"""

import argparse
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.runtime.options import Parser
from gpt2_accel.tools.report import RunFolder, write_report


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, its --output_dir")
    parser.add_argument(
        "--output_dir", help="folder of the report; default report/ in the first RUN"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    runs = [RunFolder(folder) for folder in options.runs]
    path = write_report(runs, options.output_dir or Path(options.runs[0]) / "report")
    print(f"{path} and {len(list(path.parent.glob('*.png')))} PNGs beside it")


if __name__ == "__main__":
    cli.run(main)

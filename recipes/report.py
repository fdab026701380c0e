"""Draw a report of one or several runs: one HTML file that works offline, and PNGs.

    python recipes/report.py runs/quickstart --open
    python recipes/report.py runs/a runs/b --output_dir compared

The report shows how the runs went: loss over tokens, time and FLOPs, evaluations, samples, settings
that differ. It also works for runs that are not finished: `--open` shows it in a browser, and keeps
it up to date while a run trains, until Ctrl-C.
"""

import argparse
import time
import webbrowser
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.runtime.options import Parser


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, its --output_dir")
    parser.add_argument(
        "--output_dir", help="folder of the report; default report/ in the first RUN"
    )
    parser.add_argument("--open", action="store_true", help="show it in a browser")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    from gpt2_accel.tools.report import RunFolder, write_report

    def write() -> bool:
        """Writes the report; returns whether a run trains."""
        runs = [RunFolder(name) for name in options.runs]
        write_report(runs, folder)
        return any(run.status.get("state") == "running" for run in runs)

    folder = Path(options.output_dir or Path(options.runs[0]) / "report")
    running = write()
    print(f"{folder}/report.html and PNGs beside it", flush=True)
    if options.open and webbrowser.open((folder / "report.html").resolve().as_uri()):
        while running:
            time.sleep(10)
            running = write()


if __name__ == "__main__":
    cli.run(main)

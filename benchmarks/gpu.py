"""Checks and measures the toolkit on a GPU, with the interpreter that is there: `make gpu PART=tests`.

    python benchmarks/gpu.py tests bench ladder

Each part takes at most 8 minutes. A part has steps: processes with a time limit each, and the next one starts if one
fails. A step for which no time is left is not started; a second call, with warm caches, has time for it. It needs
torch, transformers and accelerate, uses synthetic tokens, and downloads nothing. The outcomes of all parts are in
`gpu.json` in the folder of the device's results, beside those that the benchmarks write there.

Without a GPU every part runs, with tiny models, into runs/gpu.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from results import RESULTS, kind, read_results, write_result

HERE = Path(__file__).parent
LONGEST = 480  # seconds of a part
SHORTEST = 10  # seconds in which a step can do anything
# What compiles several models comes last: with cold caches it may not fit into the part.
CHECKS = ("attention", "resume", "train", "export", "evaluation", "generation")
CHECKS += ("fp16", "fsdp2", "qwen3", "deterministic", "document_mask", "auto_batch")
LINES = 12  # of a failed step's output
PARTS = ("tests", "bench", "ladder")


def steps(part: str, results: Path) -> dict[str, list[str]]:
    """Returns the commands of a part by the names of its steps, arguments of Python, with tiny models unless there is a GPU."""
    measure = f"{HERE}/measure.py --results {results}"
    ladder = f"{HERE.parent}/recipes/speed_ladder.py --output_dir {results}"
    if part == "tests":
        commands = {name: f"{HERE}/gpu_checks.py {name}" for name in CHECKS}
    elif kind() == "cuda":
        found = {"bench": f"{measure} gpt2", "ladder": ladder}
        commands = {part: found[part]}
    else:
        tiny = {"bench": f"{measure} --rounds 1 tiny"}
        tiny["ladder"] = f"{ladder} --size tiny --sequence_length 32 --steps 1"
        commands = {part: tiny[part]}
    return {name: command.split() for name, command in commands.items()}


def run(name: str, command: list[str], limit: float) -> dict:
    """Runs a step for at most `limit` seconds; returns its `outcome`, `seconds`, and if it failed the end of its output."""
    print(f"--- {name}, at most {limit:.0f} s", flush=True)
    begun = time.monotonic()
    path = os.pathsep.join((str(HERE.parent), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        start_new_session=True,  # so that its own processes end with it
    )
    try:
        output, _ = process.communicate(timeout=limit)
        outcome = "ok" if process.returncode == 0 else f"failed: exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        outcome = f"failed: took longer than {limit:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    print(output, flush=True)
    lines = output.strip().splitlines() or [""]
    if outcome == "ok" and lines[-1].startswith("skipped"):
        outcome = lines[-1]
    found = {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1)}
    return found | ({"output": lines[-LINES:]} if outcome.startswith("failed") else {})


def run_part(part: str, results: Path) -> dict[str, dict]:
    """Runs the steps of a part one after the other; returns what `run` returns by their names."""
    end, outcomes = time.monotonic() + LONGEST, {}
    longest = 90 if part == "tests" else LONGEST
    for name, command in steps(part, results).items():
        left = end - time.monotonic()
        if left < SHORTEST:
            outcomes[name] = {"outcome": f"not started: the part's {LONGEST} s are over"}
        else:
            outcomes[name] = run(name, command, min(longest, left))
        print(f"--- {name}: {outcomes[name]['outcome']}", flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--results", type=Path, help="folder of the results")
    options = parser.parse_args()
    default = RESULTS if kind() == "cuda" else HERE.parent / "runs" / "gpu"
    results = (options.results or default).resolve()
    parts = {part: run_part(part, results) for part in options.parts}
    earlier = [found["parts"] for found in read_results("gpu", results)]
    write_result("gpu", {"parts": (earlier[-1] if earlier else {}) | parts}, results)
    named = {name: found["outcome"] for part in parts.values() for name, found in part.items()}
    lines = [
        f"{word}: {', '.join(names)}"
        for word in ("failed", "not started")
        if (names := [name for name in named if named[name].startswith(word)])
    ]
    if lines:
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()

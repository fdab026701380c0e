"""Checks and measures the toolkit on a GPU, with the interpreter that is there: `make gpu PART=tests`.

    python benchmarks/gpu.py tests bench ladder generate profile

Each part takes at most 8 minutes. A part has steps: processes with a time limit each, and the next one starts if one
fails. A step for which no time is left is not started; a second call, with warm caches, has time for it. It needs
torch, transformers and accelerate, uses synthetic tokens, and downloads nothing. The results of all parts are in
`gpu.json` in the folder of the device's results, beside those that the benchmarks write there; `benchmarks/table.py`
shows the trainings, the ladder and generation in docs/.

Without a GPU every part runs, with tiny models, into runs/gpu.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from results import RESULTS, read_result, write_result

HERE = Path(__file__).parent
LONGEST = 480  # seconds of a part
SHORTEST = 10  # seconds in which a step can do anything
# What compiles several models comes last: with cold caches it may not fit into the part.
CHECKS = ("peak", "contexts", "attention", "resume", "train", "export", "evaluation", "generation")
CHECKS += ("fp16", "fsdp2", "qwen3", "deterministic", "document_mask", "auto_batch")
LINES = 12  # of a failed step's output
TINY_LADDER = "--size tiny --sequence_length 32 --steps 1 --accumulation 2 --attention 1 2 32 16"
TINY_TEXT = "--new_tokens 4 --rounds 1 --no_cache_tokens 0 --dtypes float32"
PARTS = ("tests", "bench", "ladder", "generate", "profile")


@dataclass
class Step:
    """A process: `command` are arguments of Python, `seconds` is its time limit."""

    name: str
    command: tuple[str, ...]
    seconds: int


def steps(part: str, cuda: bool, results: Path) -> list[Step]:
    """Returns the steps of a part, with tiny models unless there is a GPU."""

    def script(name: str, flags: str, *more: str) -> tuple[str, ...]:
        return (str(HERE / f"{name}.py"), *flags.split(), *more)

    into = ("--results", str(results))
    if part == "tests":
        return [Step(name, script("gpu_checks", name), 90) for name in CHECKS]
    if part == "bench":
        rounds = 5 if cuda else 1

        def training(size: str) -> tuple[str, ...]:
            return script("training", f"--size {size} --rounds {rounds}", *into)

        found = [
            Step("training", training("gpt2" if cuda else "tiny"), 220),
            Step("kernels", script("kernels", "", *into), 60),
        ]
        large = ("micro_batch", "switches") if cuda else ()
        return found + [Step(size, training(size), 100) for size in large]
    if part == "ladder":
        folder = ("--output_dir", str(results / ("cuda" if cuda else "cpu") / "ladder"))
        command = script("../recipes/speed_ladder", "" if cuda else TINY_LADDER, *folder)
    elif part == "generate":
        flags = f"--batch_sizes 1 8 {'' if cuda else TINY_TEXT}"
        command = script("generate", flags, *into)
    else:
        command = script("profile_updates", "", *into)
    return [Step(part, command, LONGEST)]


def run(step: Step, left: float) -> dict:
    """Runs a step, with its output shown; returns its `outcome`, `seconds`, and if it failed the end of its output.

    `left` are the seconds that the part has left. With less than `SHORTEST` the step is not started."""
    if left < SHORTEST:
        return {"outcome": f"not started: the part's {LONGEST} s are over", "seconds": 0.0}
    limit = min(step.seconds, round(left))
    print(f"--- {step.name}, at most {limit} s", flush=True)
    begun = time.monotonic()
    path = os.pathsep.join((str(HERE.parent), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        [sys.executable, *step.command],
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
        outcome = f"failed: took longer than {limit} s"
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    print(output, flush=True)
    found = {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1)}
    lines = output.strip().splitlines()
    if outcome != "ok":
        found["output"] = lines[-LINES:]
    elif lines and lines[-1].startswith("skipped"):
        found["outcome"] = lines[-1]
    print(f"--- {step.name}: {found['outcome']} in {found['seconds']} s", flush=True)
    return found


def has_gpu() -> bool:
    """Whether torch sees a CUDA GPU. Asks another process: importing torch here would count as memory of the steps."""
    code = "import torch; print(torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).stdout == b"True\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--results", type=Path, help="folder of the results")
    options = parser.parse_args()
    cuda = has_gpu()
    results = (options.results or (RESULTS if cuda else HERE.parent / "runs" / "gpu")).resolve()
    missing: dict[str, list[str]] = {"failed": [], "not started": []}
    for part in options.parts:
        end, outcomes = time.monotonic() + LONGEST, {}
        for step in steps(part, cuda, results):
            outcomes[step.name] = run(step, end - time.monotonic())
        for name, found in outcomes.items():
            for word, names in missing.items():
                if found["outcome"].startswith(word):
                    names.append(name)
        earlier = read_result("gpu", "cuda" if cuda else "cpu", results) or {"parts": {}}
        write_result("gpu", {"parts": earlier["parts"] | {part: outcomes}}, results)
    lines = [f"{word}: {', '.join(names)}" for word, names in missing.items() if names]
    if lines:
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()

"""Measures the speed and memory of whole updates: this toolkit, HF's Trainer and plain loops, in turns.

    python benchmarks/training.py --size gpt2

Each contestant (`contestants.py`) is a process. In each round every contestant makes its updates while the others
wait, so that all share the state of the machine. An update is forward, backward, clipping and step on random tokens.
The time excludes building, warmup and compilation. A ratio is the median of the rounds' ratios. Sizes:

- gpt2: 124M, sequences of 1,024 tokens, in bf16 (fp32 on a CPU that only emulates bf16), without dropout. HF's Trainer
  and the plain loop are compiled on a GPU only, the others always. The plain loop is in fp32 on a CPU. A second group
  compares the toolkit with HF's Trainer with the default dropout of `GPT2Config`, and with the bare loop, which has
  the toolkit's kernels but no Accelerate.
- baby: nanoGPT's small model for a CPU, all in fp32, uncompiled; a turn is 100 updates.
- qwen3: a Qwen3 of the same layers, heads and width as 124M, beside `Qwen3ForCausalLM` in HF's Trainer and GPT-2 here.
- alone: 124M on a GPU, the toolkit with a micro-batch of 64 x 1,024 tokens.
- switches: 124M on a GPU, the toolkit with the options of `SWITCHES`.
- tiny: to try this script.

MFU is relative to the product of two square matrices in the toolkit's precision, measured in each round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from results import RESULTS, ratios, summary, write_result

# Do not import torch before all contestants have ended: on Linux a process inherits the peak memory of its parent.

HERE = Path(__file__).parent
ALL = ("gpt2_accel", "HF Trainer", "plain loop", "matmul")
OVERHEAD = ("gpt2_accel", "bare loop")
# Options of inductor that the toolkit leaves off, as environment variables.
SWITCHES = {
    "gpt2_accel, reduce-overhead": {"ACCELERATE_DYNAMO_MODE": "reduce-overhead"},
    "gpt2_accel, max-autotune": {"ACCELERATE_DYNAMO_MODE": "max-autotune-no-cudagraphs"},
    "gpt2_accel, coordinate descent": {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"},
}
HF_DEFAULTS = "HF Trainer, its dropout"
OUR_QWEN3, HF_QWEN3 = "gpt2_accel, Qwen3", "HF Trainer, Qwen3"
# Contestant -> the one that it is compared with.
PAIRS = {
    "HF Trainer": "gpt2_accel",
    HF_DEFAULTS: "gpt2_accel",
    "plain loop": "gpt2_accel",
    HF_QWEN3: OUR_QWEN3,
    "gpt2_accel": OUR_QWEN3,
}
TOKENS = 2**20  # tokens of the data, more than any contestant reads


@dataclass(frozen=True)
class Size:
    """A model shape with its contestants.

    `batch_size` and `updates` of a turn are for a CPU and a GPU. The contestants of a group run at the same time.
    `fast` turns on bf16 and compilation, see `build_job`.
    """

    shape: dict
    batch_size: tuple[int, int]
    updates: tuple[int, int]
    fast: bool
    groups: tuple[tuple[str, ...], ...]


SMALL = {"vocab_size": 50257, "n_positions": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}
SIZES = {
    "gpt2": Size(
        SMALL,
        batch_size=(4, 16),  # on a GPU all contestants of a group share the memory
        updates=(1, 20),
        fast=True,
        groups=(ALL, (*OVERHEAD, HF_DEFAULTS)),
    ),
    "qwen3": Size(
        SMALL, (4, 16), (1, 20), fast=True, groups=(("gpt2_accel", OUR_QWEN3, HF_QWEN3),)
    ),
    "alone": Size(SMALL, (4, 64), (1, 20), fast=True, groups=(("gpt2_accel", "matmul"),)),
    "switches": Size(SMALL, (4, 16), (1, 20), fast=True, groups=(("gpt2_accel", *SWITCHES),)),
    "baby": Size(
        {"vocab_size": 65, "n_positions": 64, "n_layer": 4, "n_head": 4, "n_embd": 128, "bias": False},
        batch_size=(12, 12),
        updates=(100, 100),
        fast=False,
        groups=((*ALL[:3], "bare loop"),),
    ),
    "tiny": Size(
        {"vocab_size": 65, "n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 32},
        batch_size=(4, 4),
        updates=(5, 5),
        fast=False,
        groups=((*ALL, "bare loop", OUR_QWEN3, HF_QWEN3),),
    ),
}  # fmt: skip


class Process:
    """A contestant's process. `turn` makes updates; leaving the context kills the process.

    Raises `RuntimeError` with the end of its stderr if it exits by itself.
    """

    def __init__(self, job: dict, folder: Path):
        self.name, self.log = job["contestant"], folder / "log.txt"
        folder.mkdir(parents=True)
        command = [sys.executable, str(HERE / "contestants.py"), json.dumps(job)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=environment(job), stderr=log, **pipes)

    def turn(self, updates: int) -> dict:
        """Requests `updates` updates; returns their seconds and the process's peak memory."""
        self.process.stdin.write(f"{updates}\n")
        self.process.stdin.flush()
        return self.reply()

    def reply(self) -> dict:
        """Waits for the next reply; the first reply follows the warmup."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {self.log.read_text()[-2000:]}")
        return json.loads(line)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def environment(job: dict) -> dict[str, str]:
    """Returns the environment of a contestant: only the toolkit has Accelerate's variables."""
    found = {
        name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")
    }
    if job["contestant"].startswith("gpt2_accel"):
        found |= SWITCHES.get(job["contestant"], {})
        found["ACCELERATE_MIXED_PRECISION"] = "bf16" if job["bf16"] else "no"
        found["ACCELERATE_DYNAMO_BACKEND"] = "inductor" if job["compile"] else "no"
    return found


def compete(
    jobs: Collection[dict], rounds: int, updates: int, folder: Path
) -> dict[str, dict[str, list]]:
    """Runs all contestants in turn; returns contestant -> name of a value -> its values, one per round."""
    replies: dict[str, list[dict]] = {job["contestant"]: [] for job in jobs}
    with ExitStack() as stack:
        running = []
        for job in jobs:
            job["output_dir"] = str(folder / job["contestant"] / "run")
            running.append(stack.enter_context(Process(job, folder / job["contestant"])))
        for process in running:
            process.reply()
        for number in range(rounds):
            # Alternate the direction, so that a contestant does not always follow the same one.
            for process in running if number % 2 == 0 else reversed(running):
                reply = process.turn(1 if process.name == "matmul" else updates)
                replies[process.name].append(reply)
                print(f"round {number + 1}, {process.name}: {reply['seconds']:.3f} s", flush=True)
    return {
        name: {key: [reply[key] for reply in each] for key in each[0]}
        for name, each in replies.items()
    }


def build_job(
    contestant: str, size: Size, shape: dict, batch_size: int, data_dir: Path, facts: dict
) -> dict:
    """Returns the job of a contestant; `facts` is the result of `prepare`.

    With `size.fast`, HF's Trainer and the plain loop are compiled on a GPU only; the plain loop is in fp32 on a CPU.
    """
    own, cuda = contestant in (*OVERHEAD, *SWITCHES, OUR_QWEN3), facts["cuda"]
    return {
        "contestant": contestant,
        "architecture": "qwen3" if contestant in (OUR_QWEN3, HF_QWEN3) else "gpt2",
        "shape": shape,
        "batch_size": batch_size,
        "bf16": size.fast and facts["bf16"] and (cuda or contestant != "plain loop"),
        "compile": size.fast and (cuda or own),
        "data_dir": str(data_dir),
    }


def figures(runs: list[dict], jobs: dict[str, dict], tokens: int, flops_per_token: int) -> dict:
    """Computes the results from the rounds of each group; `tokens` is the number of tokens of one turn."""
    first, last = runs[0], runs[-1]
    own = first["gpt2_accel"]
    contestants = {}
    for name, job in jobs.items():
        if name == "matmul":
            continue
        found = first.get(name) or last[name]
        speeds = [tokens / seconds for seconds in found["seconds"]]
        contestants[name] = {
            "bf16": job["bf16"],
            "compile": job["compile"],
            "tokens_per_second": summary(speeds),
            "memory": found["memory"][-1],
            "seconds": found["seconds"],
        }
    rivals = {
        name: (run[name], run[other])
        for run in runs
        for name, other in PAIRS.items()
        if name in run and other in run
    }
    result = {
        "contestants": contestants,
        "speed": {
            name: summary(ratios(rival["seconds"], ours["seconds"]))
            for name, (rival, ours) in rivals.items()
        },
        "memory": {
            name: ours["memory"][-1] / rival["memory"][-1] for name, (rival, ours) in rivals.items()
        },
    }
    if "bare loop" in last:
        shares = ratios(last["gpt2_accel"]["seconds"], last["bare loop"]["seconds"])
        result["overhead"] = summary([r - 1 for r in shares])
    if "matmul" in first:
        flops = [tokens * flops_per_token / seconds for seconds in own["seconds"]]
        result["ceiling"] = summary(first["matmul"]["flops"])
        result["mfu"] = summary(ratios(flops, first["matmul"]["flops"]))
    return result


def prepare(shape: dict, folder: Path) -> dict:
    """Writes shards of random tokens in a new process; returns the facts that it prints."""
    command = [
        sys.executable,
        str(HERE / "synthetic_data.py"),
        json.dumps(shape),
        str(TOKENS),
        str(folder),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    size: Size,
    *,
    rounds: int,
    batch_size: int | None,
    sequence_length: int | None,
    updates: int | None,
) -> dict:
    """Measures all contestants of a size; None is the default of the size."""
    shape = size.shape | ({"n_positions": sequence_length} if sequence_length else {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        facts = prepare(shape, folder / "data")
        batch_size = batch_size or size.batch_size[facts["cuda"]]
        updates = updates or size.updates[facts["cuda"]]
        runs, jobs = [], {}
        for group in size.groups:
            group_jobs = {
                name: build_job(name, size, shape, batch_size, folder / "data", facts)
                for name in group
            }
            runs.append(compete(group_jobs.values(), rounds, updates, folder / str(len(runs))))
            jobs |= group_jobs
    tokens = batch_size * shape["n_positions"] * updates
    return {
        "shape": shape,
        "batch_size": batch_size,
        "updates_per_turn": updates,
        **figures(runs, jobs, tokens, facts["flops_per_token"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="gpt2")
    parser.add_argument("--batch_size", type=int, help="sequences; gpt2: 4, on a GPU 16")
    parser.add_argument("--sequence_length", type=int, help="default: the model's n_positions")
    parser.add_argument("--updates_per_turn", type=int, help="gpt2: 1, on a GPU 20; baby: 100")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    found = measure(
        SIZES[options.size],
        rounds=options.rounds,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        updates=options.updates_per_turn,
    )
    write_result(f"training-{options.size}", found, options.results)


if __name__ == "__main__":
    main()

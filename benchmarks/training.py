"""Measures the speed and memory of whole updates: this toolkit, HF's Trainer and plain loops, in turns.

    python benchmarks/training.py --size gpt2

Each contestant is a process (`worker.py`). In each round every contestant makes its updates while the others
wait, so that all share the state of the machine. An update is forward, backward, clipping and step on random tokens.
The time excludes building, warmup and compilation. A ratio is the median of the rounds' ratios. Sizes:

- gpt2: 124M, sequences of 1,024 tokens, in bf16 (fp32 on a CPU that only emulates bf16), without dropout. HF's Trainer
  and the plain loop are compiled on a GPU only, the others always. The plain loop is in fp32 on a CPU. A second group
  compares the toolkit with HF's Trainer with the default dropout of `GPT2Config`, and with the bare loop, which has
  the toolkit's kernels but no Accelerate.
- baby: nanoGPT's small model for a CPU, all in fp32, uncompiled; a turn is 100 updates.
- qwen3: a Qwen3 of the same layers, heads and width as 124M, beside `Qwen3ForCausalLM` in HF's Trainer and GPT-2 here.
- micro_batch: 124M on a GPU, the toolkit with updates of 64 x 1,024 tokens, as one micro-batch and as four.
- switches: 124M on a GPU, the toolkit with the options of `SWITCHES`.
- tiny: to try this script.

MFU is relative to the product of two square matrices in the toolkit's precision, measured in each round.
"""

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from processes import Job, Process, run_job
from results import RESULTS, ratios, summary, write_result

# Do not import torch before all contestants have ended: on Linux a process inherits the peak memory of its parent.

HF_DEFAULTS = "HF Trainer, its dropout"
FOUR = "gpt2_accel, four micro-batches"
OUR_QWEN3, HF_QWEN3 = "gpt2_accel, Qwen3", "HF Trainer, Qwen3"
# Options of inductor that the toolkit leaves off, as environment variables.
SWITCHES = {
    "gpt2_accel, reduce-overhead": {"ACCELERATE_DYNAMO_MODE": "reduce-overhead"},
    "gpt2_accel, max-autotune": {"ACCELERATE_DYNAMO_MODE": "max-autotune-no-cudagraphs"},
    "gpt2_accel, coordinate descent": {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"},
}
CONTESTANTS = {
    "gpt2_accel": Job("toolkit"),
    "HF Trainer": Job("hf_trainer"),
    "plain loop": Job("loop", tf32=True),
    "matmul": Job("matmul"),
    "bare loop": Job("loop", optimizer="toolkit", chunked_loss=True, tuned=True),
    HF_DEFAULTS: Job("hf_trainer", dropout=True),
    FOUR: Job("toolkit", accumulation=4),
    OUR_QWEN3: Job("toolkit", architecture="qwen3"),
    HF_QWEN3: Job("hf_trainer", architecture="qwen3"),
    **{name: Job("toolkit", environment=switch) for name, switch in SWITCHES.items()},
}
ALL = ("gpt2_accel", "HF Trainer", "plain loop", "matmul")
# Contestant -> the one that it is compared with.
PAIRS = {
    "HF Trainer": "gpt2_accel",
    HF_DEFAULTS: "gpt2_accel",
    "plain loop": "gpt2_accel",
    FOUR: "gpt2_accel",
    HF_QWEN3: OUR_QWEN3,
    "gpt2_accel": OUR_QWEN3,
}


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
TINY = {"vocab_size": 65, "n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
BABY = TINY | {"n_positions": 64, "n_layer": 4, "n_head": 4, "n_embd": 128, "bias": False}
QWEN3 = (OUR_QWEN3, HF_QWEN3)
# On a GPU all contestants of a group share the memory.
SIZES = {
    "gpt2": Size(SMALL, (4, 16), (1, 20), True, (ALL, ("gpt2_accel", "bare loop", HF_DEFAULTS))),
    "qwen3": Size(SMALL, (4, 16), (1, 20), True, (("gpt2_accel", *QWEN3),)),
    "micro_batch": Size(SMALL, (4, 64), (1, 20), True, (("gpt2_accel", FOUR, "matmul"),)),
    "switches": Size(SMALL, (4, 16), (1, 20), True, (("gpt2_accel", *SWITCHES),)),
    "baby": Size(BABY, (12, 12), (100, 100), False, ((*ALL[:3], "bare loop"),)),
    "tiny": Size(TINY, (4, 4), (5, 5), False, ((*ALL, FOUR, "bare loop", *QWEN3),)),
}


def compete(
    jobs: dict[str, Job], rounds: int, updates: int, folder: Path
) -> dict[str, dict[str, list]]:
    """Runs all contestants in turn; returns contestant -> name of a value -> its values, one per round."""
    replies: dict[str, list[dict]] = {name: [] for name in jobs}
    with ExitStack() as stack:
        running = []
        for name, job in jobs.items():
            job = replace(job, output_dir=str(folder / name / "run"))
            running.append(stack.enter_context(Process(name, job, folder / name)))
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


def build_job(name: str, fast: bool, shape: dict, batch_size: int, data: str, facts: dict) -> Job:
    """Returns the job of a contestant with updates of `batch_size` sequences; `facts` is the reply of `worker.data`.

    With `fast`, HF's Trainer and the plain loop are compiled on a GPU only; the plain loop is in fp32 on a CPU.
    """
    job, cuda, plain = CONTESTANTS[name], facts["cuda"], name == "plain loop"
    bf16 = fast and facts["bf16"] and (cuda or not plain)
    compiled = fast and (cuda or not (plain or job.kind == "hf_trainer"))
    environment = {}
    if job.kind == "toolkit":
        environment["ACCELERATE_MIXED_PRECISION"] = "bf16" if bf16 else "no"
        environment["ACCELERATE_DYNAMO_BACKEND"] = "inductor" if compiled else "no"
    if plain:  # nanoGPT's vocabulary includes the padding
        shape = shape | {"vocab_size": facts["padded_vocab_size"]}
    return replace(
        job,
        shape=shape,
        batch_size=batch_size // job.accumulation,
        precision="bf16" if bf16 else "no",
        compile=compiled,
        data_dir=data,
        environment=job.environment | environment,
    )


def figures(runs: list[dict], jobs: dict[str, Job], tokens: int, flops_per_token: int) -> dict:
    """Computes the results from the rounds of each group; `tokens` is the number of tokens of one turn."""
    found = {name: next(run[name] for run in runs if name in run) for name in jobs}
    pairs = {
        name: (run[name], run[other])
        for run in runs
        for name, other in PAIRS.items()
        if name in run and other in run
    }
    result = {
        "contestants": {
            name: {
                "bf16": job.precision == "bf16",
                "compile": job.compile,
                "tokens_per_second": summary([tokens / each for each in found[name]["seconds"]]),
                "memory": found[name]["memory"][-1],
                "seconds": found[name]["seconds"],
            }
            for name, job in jobs.items()
            if name != "matmul"
        },
        "speed": {
            name: summary(ratios(rival["seconds"], own["seconds"]))
            for name, (rival, own) in pairs.items()
        },
        # What each ratio divides by: a contestant of two groups has seconds in each.
        "own_seconds": {name: own["seconds"] for name, (_, own) in pairs.items()},
        "memory": {
            name: own["memory"][-1] / rival["memory"][-1] for name, (rival, own) in pairs.items()
        },
    }
    if "bare loop" in jobs:
        shares = ratios(runs[-1]["gpt2_accel"]["seconds"], found["bare loop"]["seconds"])
        result["overhead"] = summary([share - 1 for share in shares])
    if "matmul" in jobs:
        flops = [tokens * flops_per_token / each for each in found["gpt2_accel"]["seconds"]]
        result["ceiling"] = summary(found["matmul"]["flops"])
        result["mfu"] = summary(ratios(flops, found["matmul"]["flops"]))
    return result


def measure(size: Size, options: argparse.Namespace) -> dict:
    """Measures all contestants of a size; an option that is None has the default of the size."""
    length = options.sequence_length or size.shape["n_positions"]
    shape = size.shape | {"n_positions": length}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = str(folder / "data")
        facts = run_job(Job("data", shape, data_dir=data))
        if "problem" in facts:
            raise RuntimeError(f"the data cannot be written: {facts['problem']}")
        batch_size = options.batch_size or size.batch_size[facts["cuda"]]
        updates = options.updates_per_turn or size.updates[facts["cuda"]]
        runs, jobs = [], {}
        for group in size.groups:
            own = {
                name: build_job(name, size.fast, shape, batch_size, data, facts) for name in group
            }
            runs.append(compete(own, options.rounds, updates, folder / str(len(runs))))
            jobs |= own
    tokens = batch_size * length * updates
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
    found = measure(SIZES[options.size], options)
    write_result(f"training-{options.size}", found, options.results)


if __name__ == "__main__":
    main()

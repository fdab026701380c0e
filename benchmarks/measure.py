"""Compares the speed of training and generation with other programs.

    python benchmarks/measure.py gpt2 baby qwen3

Each program is a process (`worker.py`). In each round the programs take turns, one at a time,
so that all see the same state of the machine. Building, warmup and compilation do not count. A
ratio is the median of the rounds' ratios. An update is forward, backward, clipping and step on
random tokens.

- gpt2: 124M, sequences of 1,024 tokens, in bf16 (fp32 on a CPU that only emulates bf16),
  without dropout. HF's Trainer and nanoGPT's loop with this package's model are compiled on a GPU
  only, and the loop is in fp32 on a CPU. The share of the speed of matrix products is computed from
  this package's FLOPs. On a GPU an update accumulates GPT-3's batch of 524,288 tokens, as in the
  pretraining recipe, in micro-batches of 64 sequences, which is the fastest size for all programs.
  They run two at a time: together they do not fit into 80 GB.
- qwen3: GPT-2 and a Qwen3 with the same layers, heads and width, both by this package.
- baby: nanoGPT's small model for a CPU, in fp32, uncompiled; a turn is 100 updates.
- generation: GPT-2 124M writes 64 tokens after a prompt of 16, as does `generate` of transformers,
  in fp32 (bf16 on a GPU).
- tiny: to try this script.

`benchmarks/table.py` prints the results.
"""

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from processes import Job, Process
from results import RESULTS, ratios, summary, write_result

from gpt2_accel.data.prepare import prepare
from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.runtime.device import has_bf16, launch_device
from gpt2_accel.tokenizer import char_tokenizer

SMALL = {"vocab_size": 50257, "n_positions": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}
BABY = {"vocab_size": 65, "n_positions": 64, "n_layer": 4, "n_head": 4, "n_embd": 128}
BABY |= {"bias": False}
TINY = {"vocab_size": 65, "n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
FIRST = 0x10000  # the first of 65,536 code points without gaps


@dataclass
class Benchmark:
    """Programs that take turns; the first one is compared with the others."""

    title: str
    jobs: list[Job]
    updates: int = 1  # per turn
    at_once: int | None = None  # programs that run at a time; None for all


def training(name: str, batch_size: int | None) -> Benchmark:
    """Returns a training benchmark of `NAMES`. `batch_size` is the micro-batch in sequences, by
    default that of the benchmark and device."""
    cuda = launch_device().type == "cuda"
    small = name in ("baby", "tiny")
    on_gpu = cuda and name == "gpt2"
    shape = {"baby": BABY, "tiny": TINY}.get(name, SMALL)
    sizes = {"baby": 12, "tiny": 4, "gpt2": 64 if cuda else 4}
    batch_size = batch_size or sizes.get(name, 16 if cuda else 4)
    precision = "bf16" if has_bf16(launch_device()) and not small else "no"
    # On a GPU the batch of build-nanogpt and of the GPT-3 paper (arXiv:2005.14165, table 2.1).
    accumulation = 512 // batch_size if on_gpu else 1
    same = {"shape": shape, "batch_size": batch_size, "precision": precision}
    same |= {"accumulation": accumulation}
    ours = Job("gpt2_accel", "toolkit", **same, compile=not small)
    theirs = Job("HF Trainer", "hf_trainer", **same, compile=cuda and not small)
    # nanoGPT's vocabulary includes the padding.
    padded = shape | {"vocab_size": GPTConfig(**shape).padded_vocab_size}
    plain = Job("nanoGPT's loop", "loop", padded, batch_size, tf32=True, accumulation=accumulation)
    if cuda and not small:
        plain = replace(plain, precision=precision, compile=True)
    if name == "qwen3":
        qwen3 = replace(ours, name="gpt2_accel, Qwen3", architecture="qwen3")
        jobs = [qwen3, replace(ours, name="gpt2_accel, GPT-2")]
    else:
        jobs = [ours, theirs, plain]
        if on_gpu:
            ours32 = replace(ours, name="gpt2_accel, fp32 residual stream")
            jobs = [replace(ours, residual_dtype="bfloat16"), plain, ours32, theirs]
    if name in ("gpt2", "tiny"):
        jobs.append(Job("matrix products", "matmul", precision=precision, warmup=1))
    updates = {"baby": 100, "tiny": 5}.get(name, 1)
    if cuda and not small:
        updates = 2 if accumulation > 1 else 20
    models = {"gpt2": "GPT-2 124M", "baby": "nanoGPT's model for a CPU", "qwen3": "124M"}
    title = f"{models.get(name, 'a tiny model')}, {batch_size} x {shape['n_positions']:,} tokens"
    if accumulation > 1:
        title += f", accumulated {accumulation} times"
    return Benchmark(f"{title} per update", jobs, updates, at_once=2 if on_gpu else None)


def generation(rows: int) -> Benchmark:
    """Returns the benchmark that generates `rows` texts at once."""
    precision = "bf16" if launch_device().type == "cuda" else "no"
    same = {"shape": SMALL, "batch_size": rows, "precision": precision, "new_tokens": 64}
    jobs = [Job("gpt2_accel", "generate", **same)]
    jobs.append(Job("generate of transformers", "hf_generate", **same))
    return Benchmark("GPT-2 124M writes 64 tokens after a prompt of 16", jobs)


NAMES = ("gpt2", "qwen3", "baby", "generation", "tiny")


def random_shards(folder: Path, vocab_size: int) -> None:
    """Writes training shards of a million uniformly random tokens."""
    tokenizer = char_tokenizer("".join(map(chr, range(FIRST, FIRST + vocab_size))))
    numbers = np.random.default_rng(0).integers(vocab_size, size=2**20)
    text = (numbers + FIRST).astype("<u4").tobytes().decode("utf-32-le")
    prepare({"train": [text]}, tokenizer, folder, source="random characters")


def run_in_turns(jobs: list[Job], rounds: int, updates: int, folder: Path) -> list[list[dict]]:
    """Runs all programs in turns; returns the replies of each program, one per round."""
    replies: list[list[dict]] = [[] for _ in jobs]
    with ExitStack() as stack:
        running = []
        for number, job in enumerate(jobs):
            running.append(stack.enter_context(Process(job, folder / str(number))))
        for process in running:
            process.reply()
        for number in range(rounds):
            order = list(range(len(jobs)))
            if number % 2:  # alternate, so that a program does not always follow the same one
                order.reverse()
            for place in order:
                job = jobs[place]
                reply = running[place].turn(1 if job.kind == "matmul" else updates)
                replies[place].append(reply)
                where = f"round {number + 1}, {job.name}, {job.setting}"
                print(f"{where}: {reply['seconds']:.3f} s", flush=True)
    return replies


def rows(jobs: list[Job], replies: list[list[dict]], updates: int) -> list[dict]:
    """Returns a row of the table for each program except the matrix products; the first row has
    its share of their speed."""
    table: list[dict] = []
    for job, turns in zip(jobs, replies, strict=True):
        seconds = [reply["seconds"] for reply in turns]
        if job.kind == "matmul":
            speeds = [reply["flops"] for reply in turns]
            config = GPTConfig(**jobs[0].shape)
            flops = updates * jobs[0].tokens * flops_per_token(config, config.n_positions)
            table[0]["matmul_flops"] = summary(speeds)
            table[0]["mfu"] = ratios([flops / s for s in table[0]["seconds"]], speeds)
            continue
        row = {"name": job.name, "setting": job.setting, "seconds": seconds}
        row["tokens_per_second"] = summary([updates * job.tokens / s for s in seconds])
        if table:
            row["speed_up"] = ratios(seconds, table[0]["seconds"])
        if job.kind not in ("generate", "hf_generate"):  # their weights are built in fp32
            row["memory"] = turns[-1]["memory"]
            if table:
                row["memory_ratio"] = table[0]["memory"] / row["memory"]
        table.append(row)
    return table


def measure(chosen: Benchmark, rounds: int) -> dict:
    """Measures all programs of a benchmark; returns its title and rows."""
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        random_shards(data, chosen.jobs[0].shape["vocab_size"])
        jobs = [replace(job, data_dir=str(data)) for job in chosen.jobs]
        size = chosen.at_once or len(jobs)
        groups = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        replies = []
        for number, group in enumerate(groups):
            folder = Path(name, f"group-{number}")
            replies += run_in_turns(group, rounds, chosen.updates, folder)
    title = f"{chosen.title}, {rounds} rounds"
    return {"title": title, "rows": rows(jobs, replies, chosen.updates)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--batch_size", type=int, help="sequences; default that of the benchmark")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    for name in options.names:
        if name == "generation":
            result = measure(generation(1), options.rounds)
            result["rows"] += measure(generation(options.batch_size or 32), options.rounds)["rows"]
        else:
            result = measure(training(name, options.batch_size), options.rounds)
        if name == "gpt2" and not has_bf16(launch_device()):
            name = "gpt2_fp32"  # beside the figures of a device with bf16
        write_result(name, result, options.results)


if __name__ == "__main__":
    main()

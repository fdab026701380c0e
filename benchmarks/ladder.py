"""The speed ladder: measures how much each improvement speeds up GPT-2's training step here.

    python benchmarks/ladder.py
    python benchmarks/ladder.py --micro_batch_size 4                  # a GPU of 16 GB
    python benchmarks/ladder.py --size tiny --sequence_length 32      # a trial, one minute

The ladder has sixteen steps, from a textbook GPT-2 in fp32, eager, to the settings of this toolkit.
Each step keeps the improvements before it. A process of its own, `worker.py`, measures it on random
tokens, with empty caches and its own peak memory: forward, backward, gradient clipping to 1,
update. The table marks steps that the device does not support or that need too much memory; a
micro-batch that does not fit is not kept. The default is 16 x 1024 tokens on a GPU and 2 x 512 on a
CPU (about ten minutes on 2 idle cores).

Prints a table of tokens/s, peak memory, the speedup over the step before, and the A100 results that
LLMs-from-scratch and build-nanogpt have published, and writes it as `cpu/ladder.json` or
`cuda/ladder.json`.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from processes import Job, Process
from results import RESULTS, summary, write_result
from table import table

from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.runtime.device import compute_capability, has_bf16, inductor_problem, launch_device

# Hub name of OpenAI's models -> n_layer, n_head, n_embd.
SIZES: dict[str, tuple[int, int, int]] = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
# Out-of-memory errors of torch on CUDA, torch on a CPU, Python, and the system.
OUT_OF_MEMORY = ("OutOfMemoryError", "can't allocate memory", "MemoryError", "exit code -9")


@dataclass(frozen=True)
class Rung:
    """One improvement: its changes to the `Job`, and published results after it, on an A100.

    `llms_from_scratch` is in tokens/s, from Sebastian Raschka's chapter 5, section 10
    (github.com/rasbt/LLMs-from-scratch). `build_nanogpt` is in milliseconds for 16 x 1,024 tokens,
    from Andrej Karpathy's "Let's reproduce GPT-2 (124M)" (github.com/karpathy/build-nanogpt), in
    another order.
    """

    name: str
    changes: dict[str, object] = field(default_factory=dict)
    llms_from_scratch: int | None = None
    build_nanogpt: int | None = None


RUNGS = (
    Rung("fp32, eager, by hand", {}, 12_525, 1000),
    Rung("no stored mask", {"stored_mask": False}, 12_526),
    Rung("TF32", {"tf32": True}, 27_648, 333),
    Rung("fused AdamW", {"optimizer": "toolkit"}, 28_399, 90),
    Rung("pinned, prefetched data", {"prefetch": True}, 28_402),
    Rung("fp16", {"precision": "fp16"}),
    Rung("bf16", {"precision": "bf16"}, 45_486, 300),
    Rung("torch's LayerNorm, GELU", {"hand_norm_gelu": False}, 55_256),
    Rung("SDPA / flash", {"hand_attention": False}, 91_901, 96),
    Rung("compile", {"compile": True}, 112_046, 130),
    Rung("no biases", {"shape": {"bias": False}}),
    Rung("vocabulary 50,304", {"shape": {"vocab_size": 50304}}, 127_345, 93),
    Rung("gpt2_accel's loss and kernels", {"chunked_loss": True}),
    Rung("four times the micro-batch", {}, 142_156),
    Rung("accumulation", {}, None, 89),
    Rung("DDP over all devices", {"ddp": True}, 419_259),
)


def run_ladder(
    size: str = "gpt2",
    micro_batch_size: int | None = None,
    sequence_length: int | None = None,
    steps: int | None = None,
) -> dict:
    """Measures and prints all rungs; returns the result: a title, and a row per rung.

    Defaults: build-nanogpt's 16 x 1,024 tokens and 20 steps on a GPU, 2 x 512 tokens and 3 steps on
    a CPU.
    """
    device = launch_device()
    on_cpu = device.type == "cpu"
    micro_batch_size = micro_batch_size or (2 if on_cpu else 16)
    sequence_length = sequence_length or (512 if on_cpu else 1024)
    steps = steps or (3 if on_cpu else 20)
    accumulation = 4 if on_cpu else 8
    job = first_job(size, micro_batch_size, sequence_length, on_cpu)
    lacking = problems(device)
    rows: list[dict] = []
    for rung in RUNGS:
        row = {"name": rung.name}
        row |= {"llms_from_scratch": rung.llms_from_scratch, "build_nanogpt": rung.build_nanogpt}
        if rung.name in lacking:
            row["remark"] = f"lacking: {lacking[rung.name]}"
        else:
            job = changed(job, rung, accumulation)
            row |= measured(job, steps, torch.accelerator.device_count() if job.ddp else 1)
            if "remark" in row and job.batch_size > micro_batch_size:
                job = replace(job, batch_size=micro_batch_size)  # it needs too much memory
        before = [other["tokens_per_second"]["median"] for other in rows if "memory" in other]
        if before and "memory" in row:
            row["gain"] = row["tokens_per_second"]["median"] / before[-1]
        rows.append({name: value for name, value in row.items() if value is not None})
        outcome = row.get("remark")
        if "memory" in row:
            outcome = f"{row['tokens_per_second']['median']:,.0f} tokens/s"
        print(f"{rung.name}: {outcome}", flush=True)
    title = (
        f"{size}, {micro_batch_size} x {sequence_length:,} tokens, then four times as many "
        f"sequences, accumulated {accumulation} times"
    )
    return {"title": f"{title}, {steps} steps", "rows": rows}


def problems(device: torch.device) -> dict[str, str]:
    """Returns the rungs that the device cannot run, with the reasons, by name."""
    reasons = {"bf16": "" if has_bf16(device) else "only emulated"}
    reasons["compile"] = inductor_problem(device) or ""
    if device.type != "cuda":
        reasons |= dict.fromkeys(("TF32", "pinned, prefetched data", "fp16"), "CUDA only")
    elif compute_capability(device) < (8, 0):
        reasons["TF32"] = "needs compute capability 8.0"
    if device.type != "cuda" or torch.accelerator.device_count() == 1:
        reasons["DDP over all devices"] = "needs several GPUs"
    return {name: reason for name, reason in reasons.items() if reason}


def first_job(size: str, micro_batch_size: int, sequence_length: int, on_cpu: bool) -> Job:
    """Returns the job of the first rung."""
    config = GPTConfig(50257, sequence_length, n_layer=1, n_head=2, n_embd=32)
    if size != "tiny":
        config = GPTConfig(50257, sequence_length, *SIZES[size])
    job = Job("ladder", "loop", asdict(config), micro_batch_size, warmup=1 if on_cpu else 5)
    by_hand = dict.fromkeys(("hand_attention", "hand_norm_gelu", "stored_mask"), True)
    return replace(job, optimizer="slow", **by_hand)


def changed(job: Job, rung: Rung, accumulation: int) -> Job:
    """Returns `job` with the changes of a rung."""
    if rung.name == "four times the micro-batch":
        return replace(job, batch_size=4 * job.batch_size)
    if rung.name == "accumulation":
        return replace(job, accumulation=accumulation)
    shape = job.shape | rung.changes.get("shape", {})
    return replace(job, **rung.changes | {"shape": shape})


def measured(job: Job, steps: int, devices: int) -> dict:
    """Returns the columns of a rung, or the reason of a failure as `remark`."""
    try:
        with tempfile.TemporaryDirectory() as name, Process(job, Path(name), devices) as process:
            process.reply()
            replies = [process.turn(1) for _ in range(steps)]
    except RuntimeError as error:
        if any(sign in str(error) for sign in OUT_OF_MEMORY):
            return {"remark": "not enough memory"}
        print(error, file=sys.stderr)
        return {"remark": f"failed: {str(error).splitlines()[-1]}"}
    tokens = job.tokens * devices
    speed = summary([tokens / reply["seconds"] for reply in replies])
    columns = {name: replies[-1][name] for name in ("memory", "reserved") if name in replies[-1]}
    return {"tokens_per_second": speed} | columns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="gpt2", choices=[*SIZES, "tiny"])
    parser.add_argument("--micro_batch_size", type=int, help="sequences; default by device")
    parser.add_argument("--sequence_length", type=int, help="tokens; default by device")
    parser.add_argument("--steps", type=int, help="updates to measure per step; default by device")
    parser.add_argument("--results", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    result = run_ladder(
        options.size, options.micro_batch_size, options.sequence_length, options.steps
    )
    print(table(result))
    write_result("ladder", result, options.results)


if __name__ == "__main__":
    main()

"""The speed ladder: measures a training step of GPT-2 as improvements are added one by one.

`run_ladder` measures all `RUNGS` and writes the results; its command is `recipes/speed_ladder.py`. Each rung runs in
its own process, `rung.py`, so it has empty caches and its own peak memory, and a failure does not affect other rungs.
"""

import csv
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from rung import Variant, Workload, ladder_config

from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.files import atomic_files
from gpt2_accel.models.gpt2 import SIZES
from gpt2_accel.report.figures import COLOURS, INK, new_figure, set_title

LADDER_SIZES = (*SIZES, "tiny")


@dataclass(frozen=True)
class Rung:
    """One improvement: its changes to `Variant`, and the published results after it (see `PUBLISHED`)."""

    name: str
    changes: dict[str, object] = field(default_factory=dict)
    llms_from_scratch: int | None = None  # tokens/s
    build_nanogpt: int | None = None  # ms for 16 x 1024 tokens


PUBLISHED = """\
- LLMs-from-scratch: Sebastian Raschka's code, chapter 5, section 10 (github.com/rasbt/LLMs-from-scratch):
  124M, T = 1024, one A100, PyTorch 2.6; tokens/s. Its last figure is that of 4 A100.
- build-nanogpt: Andrej Karpathy's "Let's reproduce GPT-2 (124M)" (github.com/karpathy/build-nanogpt): 124M,
  B = 16, T = 1024, one A100; ms for 16,384 tokens. Its order is another: TF32, bf16, compile, flash,
  vocabulary, fused AdamW. On 8 GPUs it has about 1.5M tokens/s."""
NANOGPT_TOKENS = 16 * 1024  # tokens per step of build-nanogpt
DDP_GPUS = 4  # GPUs of LLMs-from-scratch's last result
# Milliseconds, from a tutorial, on a T4 in fp16: B = 32, H = 8, T = 2048, D = 64.
PUBLISHED_ATTENTION = {"standard": 106, "SDPA": 13.9}

RUNGS = (
    Rung("fp32, eager, by hand", {}, 12_525, 1000),
    Rung("no stored mask", {"stored_mask": False}, 12_526),
    Rung("TF32", {"tf32": True}, 27_648, 333),
    Rung("fused AdamW", {"fused": True}, 28_399, 90),
    Rung("pinned, prefetched data", {"prefetch": True}, 28_402),
    Rung("fp16", {"precision": "fp16"}),
    Rung("bf16", {"precision": "bf16"}, 45_486, 300),
    Rung("torch's LayerNorm, GELU", {"hand_norm_gelu": False}, 55_256),
    Rung("SDPA / flash", {"hand_attention": False}, 91_901, 96),
    Rung("compile", {"compile": True}, 112_046, 130),
    Rung("no biases", {"bias": False}),
    Rung("vocabulary 50,304", {"vocab_size": 50304}, 127_345, 93),
    Rung("chunked cross-entropy", {"chunked_loss": True}),
    Rung("larger micro-batch", {"large_batch": True}, 142_156),
    Rung("accumulation", {"accumulate": True}, None, 89),
    Rung("DDP over all devices", {"ddp": True}, 419_259),
)


def default_workload(device_type: str) -> Workload:
    """Returns build-nanogpt's workload for a GPU, and one of about ten minutes on 2 cores for a CPU."""
    if device_type == "cpu":
        return Workload("gpt2", 2, 8, 512, 4, steps=3, warmup=1, attention=[4, 8, 512, 64])
    return Workload("gpt2", 16, 64, 1024, 8, steps=20, warmup=5, attention=[32, 8, 2048, 64])


# Signs of a process that ran out of memory: of torch on CUDA, torch on a CPU, Python, and the system.
OUT_OF_MEMORY = ("OutOfMemoryError", "can't allocate memory", "MemoryError", "SIGKILL")


def run_job(job: dict, processes: int = 1) -> dict:
    """Runs a job in a new process, or with torchrun in several; returns its result, or {"problem": message}."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    script = str(Path(__file__).with_name("rung.py"))
    command = [sys.executable, *(launcher if processes > 1 else []), script, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode == -9 or any(sign in done.stderr for sign in OUT_OF_MEMORY):
        return {"problem": "not enough memory"}
    print(done.stderr, file=sys.stderr)
    last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return {"problem": f"failed: {last}"}


@dataclass
class Row:
    """The results of a rung. A value that was not measured is None, and `remark` gives the reason.

    `tokens_per_second` is the total of all `devices`. `gain` is its ratio to the previous measured rung. `mfu` is the
    share of the fastest matrix-product rate measured on the device.
    """

    step: int
    name: str
    ms: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    peak_memory_gb: float | None = None
    mfu: float | None = None
    gain: float | None = None
    loss: float | None = None
    devices: int = 1
    llms_from_scratch_tokens_per_second: int | None = None
    build_nanogpt_ms: int | None = None
    remark: str = ""


HEAD = (
    "| step | ms | tokens | tokens/s | memory, GB | MFU | x before | LLMs-from-scratch, tokens/s "
    "| build-nanogpt, ms | remark |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"
)


def run_ladder(output_dir: str | Path, **chosen: object) -> list[Row]:
    """Measures all rungs, prints each row, and writes the table to `output_dir` as Markdown, CSV and PNG.

    The files are written after each rung, in case the next one does not end. `chosen` are fields of `Workload`; None is
    the device's default. Without matplotlib there is no picture. Raises `RuntimeError` if the device cannot be
    described.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)  # fails before ten minutes of measurements
    device = run_job({})
    if "problem" in device:
        raise RuntimeError(f"the device cannot be described: {device['problem']}")
    workload = choose_workload(device["type"], chosen)
    title = describe(workload, device)
    print(f"{title}\n\n{HEAD}", flush=True)
    rows: list[Row] = []
    variant = Variant()
    for number, rung in enumerate(RUNGS, start=1):
        reason = device["lacking"].get(rung.name)
        variant = variant if reason else replace(variant, **rung.changes)
        rows.append(measure_rung(number, rung, reason, workload, variant, device, rows))
        print(markdown_row(rows[-1]), flush=True)
        write_results(Path(output_dir), title, rows, "")
        if rows[-1].remark and variant.large_batch:  # the only rung that needs more memory
            variant = replace(variant, large_batch=False)
    attention = attention_table(workload.attention)
    print(f"\n{attention}")
    write_results(Path(output_dir), title, rows, attention)
    print(
        f"\nwrote {', '.join(sorted(p.name for p in Path(output_dir).iterdir()))} in {output_dir}"
    )
    return rows


def choose_workload(device_type: str, chosen: dict[str, object]) -> Workload:
    """Returns the device's default workload with the `chosen` values."""
    chosen = {name: value for name, value in chosen.items() if value}
    if "micro_batch_size" in chosen:
        chosen.setdefault("large_micro_batch_size", 4 * chosen["micro_batch_size"])
    return replace(default_workload(device_type), **chosen)


def describe(workload: Workload, device: dict) -> str:
    """Returns the lines above the table: model, device, sizes, and the peak of the MFU."""
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in device["flops"].items())
    return (
        f"# Speed ladder: {workload.size} on {device['name']}\n\n"
        f"torch {torch.__version__}; {workload.micro_batch_size} x {workload.sequence_length} tokens, from "
        f"the larger micro-batch on {workload.large_micro_batch_size}, accumulated "
        f"{workload.accumulation} times; median of {workload.steps} steps after {workload.warmup}.\n"
        f"Matrix products measured here, in TFLOP/s: {rates}. MFU is the share of the fastest."
    )


def measure_rung(
    number: int,
    rung: Rung,
    reason: str | None,
    workload: Workload,
    variant: Variant,
    device: dict,
    before: list[Row],
) -> Row:
    """Measures one rung, unless there is a `reason` why the device cannot run it."""
    row = Row(number, rung.name, remark=f"lacking: {reason}" if reason else "")
    row.llms_from_scratch_tokens_per_second = rung.llms_from_scratch
    row.build_nanogpt_ms = rung.build_nanogpt
    if reason:
        return row
    row.devices = device["devices"] if variant.ddp else 1
    job = {"workload": asdict(workload), "variant": asdict(variant)}
    found = run_job(job, row.devices)
    if "problem" in found:
        row.remark = found["problem"]
        return row
    row.ms, row.tokens, row.loss = 1e3 * found["seconds"], found["tokens"], found["loss"]
    row.tokens_per_second = found["tokens"] / found["seconds"]
    row.peak_memory_gb = found["peak_memory"] / 1e9
    # All rungs use the FLOPs of the first rung's model, so that MFU is proportional to tokens/s.
    flops = flops_per_token(ladder_config(workload, Variant()), workload.sequence_length)
    row.mfu = row.tokens_per_second / row.devices * flops / max(device["flops"].values())
    speeds = [other.tokens_per_second for other in before if other.tokens_per_second]
    row.gain = row.tokens_per_second / speeds[-1] if speeds else None
    return row


def markdown_row(row: Row) -> str:
    """Formats a row of the table."""
    cells = (
        f"{row.step} {row.name}",
        shown(row.ms, ",.1f"),
        shown(row.tokens, ",d"),
        shown(row.tokens_per_second, ",.0f"),
        shown(row.peak_memory_gb, ".2f"),
        shown(row.mfu, ".1%"),
        shown(row.gain, ".2f"),
        shown(row.llms_from_scratch_tokens_per_second, ",d"),
        shown(row.build_nanogpt_ms, ",d"),
        row.remark,
    )
    return f"| {' | '.join(cells)} |"


def shown(value: float | None, form: str) -> str:
    """Formats a value; None becomes an empty string."""
    return "" if value is None else format(value, form)


def attention_table(shape: list[int]) -> str:
    """Measures standard attention and SDPA alone; returns a table with the published results."""
    found = {kind: run_job({"attention": shape, "kind": kind}) for kind in PUBLISHED_ATTENTION}
    dtype = next((one["dtype"] for one in found.values() if "dtype" in one), "")
    lines = [
        f"Causal attention alone, forward and backward, B, H, T, D = {', '.join(map(str, shape))}, {dtype}; "
        "published: a T4, fp16, 32, 8, 2048, 64.\n",
        "| attention | ms | memory, GB | x standard | published, ms | x standard |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    standard = found["standard"].get("seconds", math.nan)
    for kind, published in PUBLISHED_ATTENTION.items():
        one, gain = found[kind], PUBLISHED_ATTENTION["standard"] / published
        measured = f"{one.get('problem')} | | "
        if "seconds" in one:
            ratio = standard / one["seconds"]
            measured = f"{1e3 * one['seconds']:.2f} | {one['peak_memory'] / 1e9:.2f} | {ratio:.2f}"
        lines.append(f"| {kind} | {measured} | {published} | {gain:.2f} |")
    return "\n".join(lines)


def write_results(folder: Path, title: str, rows: list[Row], attention: str) -> None:
    """Writes speed_ladder.md and .csv, and with all rungs .png if matplotlib is there."""
    table = "\n".join([HEAD, *map(markdown_row, rows)])
    with atomic_files(folder) as scratch:
        text = f"{title}\n\n{table}\n\n{PUBLISHED}\n\n{attention}\n"
        (scratch / "speed_ladder.md").write_text(text, encoding="utf-8")
        with open(scratch / "speed_ladder.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [entry.name for entry in fields(Row)])
            writer.writeheader()
            writer.writerows(map(asdict, rows))
        if len(rows) == len(RUNGS) and find_spec("matplotlib"):
            heading = title.splitlines()[0].removeprefix("# Speed ladder: ")
            draw(rows, heading).savefig(scratch / "speed_ladder.png", facecolor="white")


def draw(rows: list[Row], title: str):
    """Draws tokens/s per device as bars, one line per rung: measured on the left, published on the right."""
    figure, [[own, published]] = new_figure(11, 0.36 * len(rows) + 1.2, columns=2)
    places = [row.step for row in rows]
    speeds = [(row.tokens_per_second or 0) / row.devices for row in rows]
    bars(own, places, speeds, 0.7, COLOURS[0])
    for row in rows:
        if row.remark:
            own.text(0, row.step, f" {row.remark}", va="center", fontsize=7, color=INK, alpha=0.6)
    own.set_yticks(places, [f"{row.step}  {row.name}" for row in rows])
    set_title(own, f"{title}: tokens/s per device")

    book = [row.llms_from_scratch_tokens_per_second or 0 for row in rows]
    book[-1] /= DDP_GPUS
    video = [1e3 * NANOGPT_TOKENS / ms if (ms := row.build_nanogpt_ms) else 0 for row in rows]
    bars(published, [place - 0.2 for place in places], book, 0.36, COLOURS[1], "LLMs-from-scratch")
    bars(published, [place + 0.2 for place in places], video, 0.36, COLOURS[2], "build-nanogpt*")
    published.set_yticks([])
    set_title(published, "published for an A100, tokens/s per device")
    published.set_xlabel("* in another order: TF32, bf16, compile, flash, vocabulary, fused AdamW")
    published.legend(frameon=False, loc="upper right", labelcolor=INK, fontsize=8)
    return figure


def bars(
    ax, places: list[float], values: list[float], height: float, colour: str, label: str = ""
) -> None:
    """Draws horizontal bars from the top down, each with its value; a value of 0 has no bar."""
    from matplotlib.ticker import MaxNLocator

    kept = [(place, value) for place, value in zip(places, values, strict=True) if value]
    drawn = ax.barh([p for p, _ in kept], [v for _, v in kept], height, color=colour, label=label)
    ax.bar_label(drawn, [f"{v:,.0f}" for _, v in kept], padding=3, fontsize=7, color=INK)
    ax.set_xlim(0, 1.15 * max((value for _, value in kept), default=1))
    ax.set_ylim(max(places) + 0.6, min(places) - 0.6)
    ax.grid(False)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_major_locator(MaxNLocator(5))

"""The speed ladder: measures a training step of GPT-2 as improvements are added one by one.

`run_ladder` measures all `RUNGS` and writes the results; its command is `recipes/speed_ladder.py`. Each rung runs in
its own process, `worker.py`, so it has empty caches and its own peak memory, and a failure does not affect other rungs.
"""

import csv
import math
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from processes import Job, run_job

from gpt2_accel.estimate.flops import flops_per_token
from gpt2_accel.files import atomic_files
from gpt2_accel.models.gpt2 import SIZES, GPTConfig
from gpt2_accel.report.figures import COLOURS, INK, new_figure, set_title

LADDER_SIZES = (*SIZES, "tiny")


@dataclass(frozen=True)
class Rung:
    """One improvement: its changes to the `Job`, and the published results after it (see `PUBLISHED`).

    The value None is the one that `run_ladder` gets.
    """

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
    Rung("fused AdamW", {"optimizer": "toolkit"}, 28_399, 90),
    Rung("pinned, prefetched data", {"prefetch": True}, 28_402),
    Rung("fp16", {"precision": "fp16"}),
    Rung("bf16", {"precision": "bf16"}, 45_486, 300),
    Rung("torch's LayerNorm, GELU", {"hand_norm_gelu": False}, 55_256),
    Rung("SDPA / flash", {"hand_attention": False}, 91_901, 96),
    Rung("compile", {"compile": True}, 112_046, 130),
    Rung("no biases", {"shape": {"bias": False}}),
    Rung("vocabulary 50,304", {"shape": {"vocab_size": 50304}}, 127_345, 93),
    Rung("chunked cross-entropy", {"chunked_loss": True}),
    Rung("larger micro-batch", {"batch_size": None}, 142_156),
    Rung("accumulation", {"accumulation": None}, None, 89),
    Rung("DDP over all devices", {"ddp": True}, 419_259),
)

# The values that `run_ladder` takes where it gets None: build-nanogpt's on a GPU, about ten minutes on 2 cores of a CPU.
DEFAULTS = {"size": "gpt2", "micro_batch_size": 16, "sequence_length": 1024, "accumulation": 8}
DEFAULTS |= {"steps": 20, "warmup": 5, "attention": [32, 8, 2048, 64]}
CPU_DEFAULTS = {"size": "gpt2", "micro_batch_size": 2, "sequence_length": 512, "accumulation": 4}
CPU_DEFAULTS |= {"steps": 3, "warmup": 1, "attention": [4, 8, 512, 64]}


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
FORMATS = {"ms": ",.1f", "tokens": ",d", "tokens_per_second": ",.0f", "peak_memory_gb": ".2f"}
FORMATS |= {"mfu": ".1%", "gain": ".2f"}
FORMATS |= {"llms_from_scratch_tokens_per_second": ",d", "build_nanogpt_ms": ",d"}


def run_ladder(output_dir: str | Path, **chosen: object) -> list[Row]:
    """Measures all rungs, prints each row, and writes the table to `output_dir` as Markdown, CSV and PNG.

    The files are written after each rung, in case the next one does not end. `chosen` are the settings of `DEFAULTS`
    and `large_micro_batch_size`, by default four times the other; None is the device's default. Without matplotlib
    there is no picture. Raises `RuntimeError` if the device cannot be described.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)  # fails before ten minutes of measurements
    device = run_job(Job("device"))
    if "problem" in device:
        raise RuntimeError(f"the device cannot be described: {device['problem']}")
    defaults = CPU_DEFAULTS if device["type"] == "cpu" else DEFAULTS
    chosen = defaults | {name: value for name, value in chosen.items() if value}
    job = first_job(chosen)
    small, large = job.batch_size, chosen.get("large_micro_batch_size", 4 * job.batch_size)
    late = {"batch_size": large, "accumulation": chosen["accumulation"]}
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in device["flops"].items())
    title = (
        f"# Speed ladder: {chosen['size']} on {device['name']}\n\n"
        f"torch {torch.__version__}; {small} x {chosen['sequence_length']} tokens, from the larger micro-batch on "
        f"{large}, accumulated {chosen['accumulation']} times; median of {chosen['steps']} steps after "
        f"{chosen['warmup']}.\nMatrix products measured here, in TFLOP/s: {rates}. MFU is the share of the fastest."
    )
    print(f"{title}\n\n{HEAD}", flush=True)
    rows: list[Row] = []
    # All rungs use the FLOPs of the first rung's model, so that MFU is proportional to tokens/s.
    flops = flops_per_token(GPTConfig(**job.shape), chosen["sequence_length"])
    share = flops / max(device["flops"].values())  # of the peak, of one token a second
    for number, rung in enumerate(RUNGS, start=1):
        row = Row(number, rung.name)
        row.llms_from_scratch_tokens_per_second = rung.llms_from_scratch
        row.build_nanogpt_ms = rung.build_nanogpt
        if reason := device["lacking"].get(rung.name):
            row.remark = f"lacking: {reason}"
        else:
            job = changed(job, rung, late)
            row.devices = device["devices"] if job.ddp else 1
            measure(row, job, share, rows)
            if row.remark:  # the only change that needs more memory
                job = replace(job, batch_size=small)
        rows.append(row)
        print(markdown_row(row), flush=True)
        write_results(Path(output_dir), title, rows, "")
    attention = attention_table(chosen["attention"], device)
    print(f"\n{attention}")
    write_results(Path(output_dir), title, rows, attention)
    written = sorted(path.name for path in Path(output_dir).iterdir())
    print(f"\nwrote {', '.join(written)} in {output_dir}")
    return rows


def first_job(chosen: dict) -> Job:
    """Returns the job of the first rung."""
    config = GPTConfig(50257, chosen["sequence_length"], n_layer=1, n_head=2, n_embd=32)
    if chosen["size"] != "tiny":
        config = GPTConfig.from_name(chosen["size"], n_positions=chosen["sequence_length"])
    slow = {
        "hand_attention": True,
        "hand_norm_gelu": True,
        "stored_mask": True,
        "optimizer": "slow",
    }
    times = {"warmup": chosen["warmup"], "turns": [1] * chosen["steps"]}
    return Job("loop", asdict(config), chosen["micro_batch_size"], **times, **slow)


def changed(job: Job, rung: Rung, late: dict[str, int]) -> Job:
    """Returns `job` with the changes of a rung; `late` has the values of those that are None."""
    changes = {name: late[name] if value is None else value for name, value in rung.changes.items()}
    return replace(job, **changes | {"shape": job.shape | changes.get("shape", {})})


def measure(row: Row, job: Job, share: float, before: list[Row]) -> None:
    """Measures a rung and fills its row. `share` is the MFU of one token per second on one device."""
    found = run_job(job, row.devices)
    if "problem" in found:
        row.remark = found["problem"]
        return
    seconds = median(found["seconds"])
    row.ms, row.loss, row.peak_memory_gb = 1e3 * seconds, found["loss"], found["memory"] / 1e9
    row.tokens = job.batch_size * job.shape["n_positions"] * job.accumulation * row.devices
    row.tokens_per_second = row.tokens / seconds
    row.mfu = row.tokens_per_second / row.devices * share
    speeds = [other.tokens_per_second for other in before if other.tokens_per_second]
    row.gain = row.tokens_per_second / speeds[-1] if speeds else None


def markdown_row(row: Row) -> str:
    """Formats a row of the table; None becomes an empty cell."""
    values = ((getattr(row, name), form) for name, form in FORMATS.items())
    cells = ("" if value is None else format(value, form) for value, form in values)
    return f"| {row.step} {row.name} | {' | '.join(cells)} | {row.remark} |"


def attention_table(shape: list[int], device: dict) -> str:
    """Measures standard attention and SDPA alone; returns a table with the published results.

    In fp16 on CUDA, otherwise in bf16, or in fp32 if the device only emulates bf16.
    """
    half = {"float16": "fp16", "bfloat16": "bf16", "float32": "no"}
    dtype = next(name for name in half if name in device["flops"])
    lines = [
        f"Causal attention alone, forward and backward, B, H, T, D = {', '.join(map(str, shape))}, {dtype}; "
        "published: a T4, fp16, 32, 8, 2048, 64.\n",
        "| attention | ms | memory, GB | x standard | published, ms | x standard |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    standard = math.nan
    for kind, published in PUBLISHED_ATTENTION.items():
        by_hand, gain = kind == "standard", PUBLISHED_ATTENTION["standard"] / published
        job = Job("attention", attention=shape, precision=half[dtype], hand_attention=by_hand)
        found = run_job(replace(job, turns=[1] * 10))
        measured = f"{found.get('problem')} | | "
        if "problem" not in found:
            seconds = median(found["seconds"])
            standard = seconds if by_hand else standard
            measured = (
                f"{1e3 * seconds:.2f} | {found['memory'] / 1e9:.2f} | {standard / seconds:.2f}"
            )
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

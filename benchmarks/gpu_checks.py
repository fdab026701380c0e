"""Plain checks of the toolkit on this machine's device, without pytest: `python benchmarks/gpu_checks.py [NAME ...]`.

A check trains small models on synthetic text and raises an error if something is wrong. It prints a line that begins
with "skipped" if the device cannot run it. All run without a name; one that fails does not end the others. They need torch,
transformers and accelerate, and download nothing.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState

from gpt2_accel.config import TrainConfig
from gpt2_accel.data.prepare import prepare
from gpt2_accel.runtime.device import launch_device
from gpt2_accel.runtime.files import read_json_lines
from gpt2_accel.tokenizer import byte_tokenizer
from gpt2_accel.train import train as run_training

ROOT = Path(__file__).parent.parent
DEVICE = launch_device()
CUDA = DEVICE.type == "cuda"
LENGTH, WIDTH = (256, 128) if CUDA else (32, 32)
UPDATES = 24


def run(folder: Path, name: str, *, precision: str = "bf16", compiled: bool = True, **changes):
    """Trains a small model, by default compiled in bf16; returns the lines of its metrics."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.compiler.reset()
    backend = ("INDUCTOR" if CUDA else "AOT_EAGER") if compiled else "NO"
    os.environ |= {"ACCELERATE_MIXED_PRECISION": precision, "ACCELERATE_DYNAMO_BACKEND": backend}
    run_training(TrainConfig(**settings(folder, name, **changes)))
    return read_json_lines(folder / name / "metrics.jsonl")


def settings(folder: Path, name: str, **changes) -> dict:
    """Returns the settings of a run in `folder`, on 30 documents that repeat a few words."""
    data = folder / "data"
    if not data.exists():
        text = [f"the cat {i % 7} sat on the mat. " * (20 + 9 * i) for i in range(30)]
        prepare({"train": text, "val": text[:6]}, byte_tokenizer(), data, source="synthetic")
    shape = {"n_layer": 2, "n_head": 2, "n_embd": WIDTH, "n_positions": LENGTH}
    batch = {"micro_batch_size": 4, "total_batch_size": 8 * LENGTH, "max_steps": UPDATES}
    rate = {"learning_rate": 5e-3, "warmup_steps": 2}
    every = {"log_every": 1, "eval_every": 0, "sample_every": 0, "save_every": 0}
    where = {"data_dir": str(data), "output_dir": str(folder / name)}
    return where | shape | batch | rate | every | changes


def losses(metrics: list[dict]) -> list[float]:
    """Returns the training losses."""
    return [entry["train/loss"] for entry in metrics if "train/loss" in entry]


def check_learned(metrics: list[dict]) -> None:
    """Raises `AssertionError` unless all updates were made and the loss fell by half."""
    found = losses(metrics)
    assert len(found) == UPDATES and all(map(math.isfinite, found)), found
    assert found[-1] < found[0] / 2, found


def check_close(found: list[float], expected: list[float], tolerance: float) -> None:
    """Raises `AssertionError` if values differ by more than `tolerance`."""
    assert len(found) == len(expected), (found, expected)
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    print(f"largest difference {apart:.2g}, at most {tolerance} is allowed")
    assert apart <= tolerance, (found, expected)


def train(folder: Path) -> None:
    """Trains compiled in bf16, uncompiled in bf16 and uncompiled in fp32; the losses agree."""
    compiled = run(folder, "compiled")
    check_learned(compiled)
    eager = run(folder, "eager", compiled=False)
    check_close(losses(compiled)[:5], losses(eager)[:5], 0.05)
    exact = run(folder, "fp32", precision="no", compiled=False)
    check_close(losses(eager)[:5], losses(exact)[:5], 0.1)


def qwen3(folder: Path) -> None:
    """A Qwen3, with grouped queries, has the same losses compiled and not."""
    compiled, eager = (
        run(folder, name, compiled=name == "compiled", architecture="qwen3")
        for name in ("compiled", "eager")
    )
    check_learned(compiled)
    check_close(losses(compiled)[:5], losses(eager)[:5], 0.05)


def resume(folder: Path) -> None:
    """A resumed run continues with the losses of an uninterrupted one."""
    whole = run(folder, "whole", save_every=12, compiled=False)
    checkpoint = str(folder / "whole" / "checkpoint-12")
    rest = run(folder, "resumed", resume_from=checkpoint, compiled=False)
    check_close(losses(rest), losses(whole)[12:], 0.02)


def deterministic(folder: Path) -> None:
    """Two runs with --deterministic have equal losses."""
    first, second = (run(folder, name, deterministic=True) for name in "ab")
    torch.use_deterministic_algorithms(False)
    check_close(losses(first), losses(second), 0.0)


def evaluation(folder: Path) -> None:
    """A compiled run evaluates and samples; a later evaluation of its model gives the same loss."""
    metrics = run(folder, "run", eval_every=12, sample_every=12, sample_tokens=24)
    found = [entry["val/loss"] for entry in metrics if "val/loss" in entry]
    assert len(found) == 2 and found[1] < found[0] < 6, found
    assert len(read_json_lines(folder / "run" / "samples.jsonl")) == 2
    again = run(folder, "again", init_from=str(folder / "run"), learning_rate=0.0, max_steps=1,
                eval_every=1, compiled=False, precision="no")  # fmt: skip
    check_close([again[-1]["val/loss"]], found[1:], 0.05)


def document_mask(folder: Path) -> None:
    """The block mask gives the losses of the dense mask, compiled and uncompiled."""
    names = ("blocks", "blocks_eager")
    compiled = [run(folder, name, document_mask=True, compiled=name == "blocks") for name in names]
    os.environ["GPT2_ACCEL_DEVICE"] = json.dumps({"has_block_masks": False})
    dense = run(folder, "dense", document_mask=True, compiled=False)
    del os.environ["GPT2_ACCEL_DEVICE"]
    check_learned(dense)
    for found in compiled:
        check_close(losses(found)[:5], losses(dense)[:5], 0.05)
    assert losses(run(folder, "crossing", compiled=False)) != losses(dense)


def attention(folder: Path) -> None:
    """Masked scoring takes no kernel of cuDNN, and grouped queries keep no scores in memory."""
    from gpt2_accel import kernels
    from gpt2_accel.models.parts import attend
    from gpt2_accel.runtime.device import attention_order

    length = 2048 if CUDA else 64

    def heads(number: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(2, number, tokens, 64, dtype=dtype, device=DEVICE, requires_grad=True)

    with kernels.chosen(sdpa_order=attention_order(DEVICE, deterministic=False)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            k, v = heads(6, length + 37, dtype), heads(6, length + 37, dtype)
            q = heads(12, length + 37, dtype)
            mask = torch.ones(2, 1, 1, length + 37, dtype=torch.bool, device=DEVICE)
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if CUDA else []
            with torch.no_grad(), torch.profiler.profile(activities=kinds) as profile:
                attend(q, k, v, mask)
            names = {event.key for event in profile.key_averages()}
            assert not [name for name in names if "cudnn" in name.lower()], names
            if not CUDA:
                continue
            q = heads(12, length, dtype)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            attend(q, heads(6, length, dtype), heads(6, length, dtype), None).sum().backward()
            used = torch.cuda.max_memory_allocated() - before
            scores = 2 * 12 * length * length * q.element_size()
            print(f"{dtype}: {used / 1e6:.0f} MB, all scores alone {scores / 1e6:.0f} MB")
            assert used < scores, dtype


def auto_batch(folder: Path) -> None:
    """--micro_batch_size auto catches real out-of-memory errors and trains with a smaller micro-batch."""
    sequences = 4096 if CUDA else 60
    if CUDA:  # the largest sizes do not fit into 2 GB
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(2e9 / total)
    else:
        os.environ["GPT2_ACCEL_DEVICE"] = json.dumps({"free_memory": 6_000_000})
    batch = {"micro_batch_size": 0, "total_batch_size": sequences * LENGTH}
    metrics = run(folder, "run", **batch, max_steps=2)
    assert all(map(math.isfinite, losses(metrics)))
    described = json.loads((folder / "run" / "run.json").read_text())["batch"]
    assert f"x {sequences} sequences" not in described, f"no error was caught: {described}"


def fp16(folder: Path) -> None:
    """fp16 with a gradient scaler learns as bf16 does."""
    if not CUDA:
        return print("skipped: fp16 needs a GPU")
    found = losses(run(folder, "run", precision="fp16", max_steps=2 * UPDATES))
    assert found[-1] < found[0] / 2, found


def fsdp2(folder: Path) -> None:
    """FSDP2 over NCCL on one rank gives the losses of one process, and its model opens."""
    if not CUDA:
        return print("skipped: FSDP2 needs a GPU")
    from gpt2_accel import from_pretrained

    options = settings(folder, "sharded", save_every=12, eval_every=12)
    flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--config_file"]
    config = ROOT / "accelerate_configs" / "8xa100_fsdp2.yaml"
    script = ROOT / "recipes" / "pretrain_124m.py"
    subprocess.run([sys.executable, *launch, str(config), str(script), *flags], check=True)
    sharded = read_json_lines(folder / "sharded" / "metrics.jsonl")
    check_close(losses(sharded)[:5], losses(run(folder, "plain"))[:5], 0.05)
    from_pretrained(folder / "sharded")


def generation(folder: Path) -> None:
    """Greedy text is the same in one row and several."""
    from gpt2_accel.generation.sampling import Sampling, load, tokens

    run(folder, "run")
    model, tokenizer = load(str(folder / "run"))
    prompts = [tokenizer.encode(text) for text in ("the cat 3 sat", "the", "on the mat. the cat 1")]
    greedy = Sampling(32, temperature=0)
    several = list(tokens(model, prompts, greedy))
    alone = list(tokens(model, prompts[:1], greedy))
    assert [ids[:1] for ids in several] == alone, (several, alone)
    print(tokenizer.decode([ids[0] for ids in alone]))


# What compiles several models comes last.
CHECKS = (attention, resume, train, evaluation, generation)
CHECKS += (fp16, fsdp2, qwen3, deterministic, document_mask, auto_batch)


def main(names: list[str]) -> None:
    """Runs the checks, each in a process; a single one in this process."""
    checks = {check.__name__: check for check in CHECKS}
    if len(names) == 1:
        with tempfile.TemporaryDirectory() as folder:
            return checks[names[0]](Path(folder))
    failed = []
    for name in names or checks:
        print(f"--- {name}", flush=True)
        if subprocess.run([sys.executable, __file__, name]).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])

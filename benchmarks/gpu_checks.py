"""Checks of this package on this machine's device, without pytest.

    python benchmarks/gpu_checks.py [NAME ...]

A check trains small models on synthetic text and raises an error if something is wrong; it returns
the reason if the device cannot run it. Without a name all checks run, also after a failure. The
record, with device, versions, commit, outcomes and figures, is written to `--output`, by default
`card.json` in `benchmarks/results/cuda` or `cpu`. The checks need torch, transformers and
accelerate, and download nothing.

`--record` writes `benchmarks/expected.json`, the reference of the check `updates`.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from contextlib import chdir
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import measure
import torch
from accelerate.state import AcceleratorState, GradientState
from cards import EXPECTED, difference
from results import RESULTS, kind, machine

from gpt2_accel.config import TrainConfig
from gpt2_accel.data.conversations import PADDING, prepare_conversations
from gpt2_accel.data.prepare import prepare
from gpt2_accel.estimate.memory import MARGIN
from gpt2_accel.hf.chat_template import BEGIN_TURN, CHATML, END_TURN
from gpt2_accel.hf.model_card import installed_versions
from gpt2_accel.runtime.device import has_bf16, launch_device, total_memory
from gpt2_accel.runtime.files import first_line, read_json_lines, write_json
from gpt2_accel.runtime.metadata import git_commit
from gpt2_accel.tokenizer import byte_tokenizer
from gpt2_accel.train import train as run_training

ROOT = Path(__file__).parent.parent
DEVICE = launch_device()
CUDA = DEVICE.type == "cuda"
HALF = "fp16" if CUDA and not has_bf16(DEVICE) else "bf16"  # the precision of the checks
LENGTH = 256 if CUDA else 32
WIDTH = 128 if CUDA else 32
UPDATES = 24
FIGURES: dict = {}  # what a check adds to the record


def run(folder: Path, name: str, *, precision: str = HALF, compiled: bool = True, **changes):
    """Trains a small model, by default compiled in half precision; returns the lines of its
    metrics."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.compiler.reset()
    backend = "INDUCTOR" if CUDA else "AOT_EAGER"
    if not compiled:
        backend = "NO"
    os.environ |= {"ACCELERATE_MIXED_PRECISION": precision, "ACCELERATE_DYNAMO_BACKEND": backend}
    run_training(TrainConfig(**settings(folder, name, **changes)))
    return read_json_lines(folder / name / "metrics.jsonl")


def settings(folder: Path, name: str, **changes) -> dict:
    """Returns the settings of a run in `folder`, with 30 documents that repeat a few words."""
    data = folder / "data"
    if "data_dir" not in changes and not data.exists():
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
    run_losses = losses(metrics)
    assert len(run_losses) == UPDATES, run_losses
    assert all(map(math.isfinite, run_losses)), run_losses
    assert run_losses[-1] < run_losses[0] / 2, run_losses


def check_close(actual: list[float], expected: list[float], tolerance: float) -> None:
    """Raises `AssertionError` if values differ by more than `tolerance`."""
    assert len(actual) == len(expected), (actual, expected)
    apart = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    print(f"largest difference {apart:.2g}, at most {tolerance} is allowed")
    assert apart <= tolerance, (actual, expected)


def train(folder: Path) -> None:
    """Trains compiled in half precision, uncompiled, and uncompiled in fp32; the losses agree."""
    compiled = run(folder, "compiled")
    check_learned(compiled)
    eager = run(folder, "eager", compiled=False)
    check_close(losses(compiled)[:5], losses(eager)[:5], 0.05)
    exact = run(folder, "fp32", precision="no", compiled=False)
    check_close(losses(eager)[:5], losses(exact)[:5], 0.1)


def qwen3(folder: Path) -> None:
    """A Qwen3, with grouped queries, has the same losses compiled and uncompiled."""
    compiled = run(folder, "compiled", architecture="qwen3")
    eager = run(folder, "eager", compiled=False, architecture="qwen3")
    check_learned(compiled)
    check_close(losses(compiled)[:5], losses(eager)[:5], 0.05)


def resume(folder: Path) -> None:
    """A resumed run continues with the losses of an uninterrupted one."""
    uninterrupted = run(folder, "whole", save_every=12, compiled=False)
    checkpoint = str(folder / "whole" / "checkpoint-12")
    rest = run(folder, "resumed", resume_from=checkpoint, compiled=False)
    check_close(losses(rest), losses(uninterrupted)[12:], 0.02)


def deterministic(folder: Path) -> None:
    """Two runs with --deterministic have equal losses."""
    first = run(folder, "a", deterministic=True)
    second = run(folder, "b", deterministic=True)
    torch.use_deterministic_algorithms(False)
    check_close(losses(first), losses(second), 0.0)


def evaluation(folder: Path) -> None:
    """A compiled run evaluates and samples; a later evaluation of its model gives the same loss."""
    metrics = run(folder, "run", eval_every=12, sample_every=12, sample_tokens=24)
    val_losses = [entry["val/loss"] for entry in metrics if "val/loss" in entry]
    assert len(val_losses) == 2, val_losses
    assert val_losses[1] < val_losses[0] < 6, val_losses
    assert len(read_json_lines(folder / "run" / "samples.jsonl")) == 2
    once = {"learning_rate": 0.0, "max_steps": 1, "eval_every": 1}
    exact = {"compiled": False, "precision": "no"}
    again = run(folder, "again", init_from=str(folder / "run"), **once, **exact)
    check_close([again[-1]["val/loss"]], val_losses[1:], 0.05)


def document_mask(folder: Path) -> None:
    """The block mask gives the losses of the dense mask, compiled and uncompiled."""
    blocks = [run(folder, "blocks", document_mask=True)]
    blocks.append(run(folder, "blocks_eager", document_mask=True, compiled=False))
    os.environ["GPT2_ACCEL_DEVICE"] = json.dumps({"has_block_masks": False})
    dense = run(folder, "dense", document_mask=True, compiled=False)
    del os.environ["GPT2_ACCEL_DEVICE"]
    check_learned(dense)
    for masked in blocks:
        check_close(losses(masked)[:5], losses(dense)[:5], 0.05)
    assert losses(run(folder, "crossing", compiled=False)) != losses(dense)


def attention(folder: Path) -> None:
    """Masked attention runs no cuDNN kernel, and grouped queries store no scores."""
    from gpt2_accel import kernels
    from gpt2_accel.models.parts import attend
    from gpt2_accel.runtime.device import attention_order

    length = 2048 if CUDA else 64

    def heads(number: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(2, number, tokens, 64, dtype=dtype, device=DEVICE, requires_grad=True)

    dtypes = [torch.float32, torch.float16]
    if HALF == "bf16":
        dtypes.append(torch.bfloat16)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if CUDA:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    kernels.choose(sdpa_order=attention_order(DEVICE, deterministic=False))
    for dtype in dtypes:
        k = heads(6, length + 37, dtype)
        v = heads(6, length + 37, dtype)
        q = heads(12, length + 37, dtype)
        mask = torch.ones(2, 1, 1, length + 37, dtype=torch.bool, device=DEVICE)
        with torch.no_grad(), torch.profiler.profile(activities=activities) as profile:
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
    """--micro_batch_size auto catches out-of-memory errors and takes a smaller micro-batch."""
    sequences = 4096 if CUDA else 60
    if CUDA:  # the largest sizes do not fit into 2 GB and the margin that a trial leaves free
        torch.cuda.set_per_process_memory_fraction(2e9 / total_memory(DEVICE) + MARGIN)
    else:
        os.environ["GPT2_ACCEL_DEVICE"] = json.dumps({"free_memory": 6_000_000})
    batch = {"micro_batch_size": 0, "total_batch_size": sequences * LENGTH}
    metrics = run(folder, "run", **batch, max_steps=2)
    assert all(map(math.isfinite, losses(metrics)))
    described = json.loads((folder / "run" / "run.json").read_text())["batch"]
    assert f"x {sequences} sequences" not in described, f"no error was caught: {described}"


def fp16(folder: Path) -> str | None:
    """fp16 with a gradient scaler learns as well as bf16."""
    if not CUDA:
        return "skipped: fp16 needs a GPU"
    run_losses = losses(run(folder, "run", precision="fp16", max_steps=2 * UPDATES))
    assert run_losses[-1] < run_losses[0] / 2, run_losses
    return None


def fsdp2(folder: Path) -> str | None:
    """FSDP2 over NCCL on one rank has the losses of one process, and its model opens."""
    if not CUDA or HALF == "fp16":
        return "skipped: the launch config of FSDP2 needs a GPU with bf16"
    from gpt2_accel import from_pretrained

    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / "8xa100_fsdp2.yaml")]
    command.append(str(ROOT / "recipes" / "pretrain_124m.py"))
    for name, value in settings(folder, "sharded", save_every=12, eval_every=12).items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True)
    sharded = read_json_lines(folder / "sharded" / "metrics.jsonl")
    check_close(losses(sharded)[:5], losses(run(folder, "plain"))[:5], 0.05)
    from_pretrained(folder / "sharded")
    return None


def generation(folder: Path) -> None:
    """Greedy text is the same alone and in a batch."""
    from gpt2_accel.generation.sampling import Sampling, load, tokens

    run(folder, "run")
    model, tokenizer = load(str(folder / "run"))
    prompts = [tokenizer.encode(text) for text in ("the cat 3 sat", "the", "on the mat. the cat 1")]
    greedy = Sampling(32, temperature=0)
    batched = list(tokens(model, prompts, greedy))
    alone = list(tokens(model, prompts[:1], greedy))
    assert [ids[:1] for ids in batched] == alone, (batched, alone)
    print(tokenizer.decode([ids[0] for ids in alone]))


def conversations(folder: Path) -> Path:
    """Writes packed conversations, in which only the answers count in the loss; returns the folder
    of the data."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.add_tokens([BEGIN_TURN, END_TURN, PADDING], special_tokens=True)
    tokenizer.eos_token = END_TURN
    tokenizer.pad_token = PADDING
    rows = []
    for number in range(160):
        first = number % 40
        count = 2 + number % 9
        answer = " ".join(str(first + i) for i in range(1, count))
        if number % 2:
            answer = "Who knows? " * (1 + count // 3)
        turns = {"user": f"Count from {first} to {first + count}.", "assistant": answer}
        messages = [{"role": role, "content": text} for role, text in turns.items()]
        rows.append(json.dumps({"messages": messages}))
    file = folder / "conversations.jsonl"
    data = folder / "conversations"
    file.write_text("\n".join(rows), encoding="utf-8")
    prepare_conversations(
        [str(file)], tokenizer, data, sequence_length=128, source="synthetic", model="none"
    )
    return data


def trajectory(folder: Path, precision: str) -> dict[str, list[float]]:
    """Trains 20 updates, uncompiled; returns their `losses` in nats and their `grad_norms` before
    clipping.

    An update has two micro-batches with different numbers of counted targets. The initial weights
    are drawn on the CPU.
    """
    data = folder / "conversations"
    if not data.exists():
        conversations(folder)
    shape = {"n_embd": 64, "n_positions": 128, "micro_batch_size": 2, "total_batch_size": 4 * 128}
    rate = {"learning_rate": 2e-3, "warmup_steps": 4, "max_steps": 20, "max_grad_norm": 1.0}
    changes = shape | rate | {"data_dir": str(data)}
    mixed = "no" if precision == "fp32" else precision
    os.environ["GPT2_ACCEL_DEVICE"] = json.dumps({"has_block_masks": False})
    lines = run(folder, precision, precision=mixed, compiled=False, **changes)
    del os.environ["GPT2_ACCEL_DEVICE"]
    lines = [line for line in lines if "train/loss" in line]
    norms = [line["train/grad_norm"] for line in lines]
    return {"losses": losses(lines), "grad_norms": norms}


def updates(folder: Path) -> None:
    """20 updates in each precision of the device have the losses and gradient norms of a CPU in
    fp32."""
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    precisions = ["fp32", HALF]
    if CUDA and HALF != "fp16":
        precisions.append("fp16")
    trajectories = {name: trajectory(folder, name) for name in precisions}
    FIGURES.update(updates=trajectories, expected=expected)
    problems = [difference(values, expected, name) for name, values in trajectories.items()]
    assert not any(problems), "; ".join(filter(None, problems))


def speed(folder: Path) -> None:
    """Measures GPT-2 124M, compiled in half precision; a tiny model on a CPU."""
    size = 16 if total_memory(DEVICE) > 20e9 else 4
    chosen = measure.training("gpt2" if CUDA else "tiny", size)
    precision = HALF if CUDA else chosen.jobs[0].precision  # a CPU may only emulate bf16
    ours, *_, products = chosen.jobs
    jobs = [replace(job, precision=precision) for job in (ours, products)]
    FIGURES.update(measure.measure(replace(chosen, jobs=jobs), rounds=3))


# Checks that compile several models come last.
CHECKS = (updates, attention, resume, train, evaluation, generation, speed)
CHECKS += (fp16, fsdp2, qwen3, deterministic, document_mask, auto_batch)


def commit() -> str | None:
    """Returns the commit of this clone, or the commit that pip installed; None if unknown."""
    if (ROOT / ".git").exists():
        with chdir(ROOT):
            return git_commit()
    for distribution in distributions(name="gpt2_accel"):
        about = json.loads(distribution.read_text("direct_url.json") or "{}")
        return about.get("vcs_info", {}).get("commit_id")
    return None


def run_check(name: str, output: Path) -> None:
    """Runs a check in this process, writes its outcome and figures, exits with 1 if it fails."""
    outcome = "passed"
    try:
        checks = {check.__name__: check for check in CHECKS}
        with tempfile.TemporaryDirectory() as folder:
            outcome = checks[name](Path(folder)) or outcome
    except Exception as error:
        traceback.print_exc()
        outcome = f"failed: {first_line(error)}"
    print(outcome)
    write_json(output, {"outcome": outcome} | FIGURES)
    sys.exit(outcome.startswith("failed"))


def run_checks(names: list[str], output: Path) -> None:
    """Runs each check in a process, and writes the record. Exits with a sentence if one fails."""
    record = {"machine": machine(), "versions": installed_versions(), "commit": commit()}
    record |= {"memory": total_memory(DEVICE), "checks": {}}
    failed = []
    for name in names or [check.__name__ for check in CHECKS]:
        print(f"--- {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "check.json")
            command = [sys.executable, __file__, name, "--inside", "--output", str(file)]
            code = subprocess.run(command).returncode
            # A process that was killed writes nothing.
            result = {"outcome": f"failed: exit code {code}"}
            if file.exists():
                result = json.loads(file.read_text(encoding="utf-8"))
        record["checks"][name] = result.pop("outcome")
        record |= result
        if code:
            failed.append(name)
    write_json(output, record)
    print(f"wrote {output}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="checks; by default all")
    parser.add_argument("--output", type=Path, default=RESULTS / kind() / "card.json")
    parser.add_argument("--inside", action="store_true", help="run one check in this process")
    parser.add_argument("--record", action="store_true", help="write benchmarks/expected.json")
    options = parser.parse_args()
    if options.record:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        with tempfile.TemporaryDirectory() as folder:
            write_json(EXPECTED, trajectory(Path(folder), "fp32"))
    elif options.inside:
        run_check(options.names[0], options.output)
    else:
        run_checks(options.names, options.output)


if __name__ == "__main__":
    main()

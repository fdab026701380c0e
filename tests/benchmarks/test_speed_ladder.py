"""The speed ladder: its hand-written models equal `GPT`, and its command writes all results."""

import csv
import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import load_recipe
from launching import ROOT, python

from gpt2_accel import GPT, GPTConfig

sys.path.append(str(ROOT / "benchmarks"))

import ladder
import processes
from processes import Job
from reference_model import PlainLoss, slow_gpt
from timing import peak_memory, seconds_each
from worker import build_model

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
TINY = ladder.first_job(
    {"size": "tiny", "micro_batch_size": 2, "sequence_length": 32, "steps": 2, "warmup": 1}
)
LATE = {"batch_size": 8, "accumulation": 2}
CPU = torch.device("cpu")


@pytest.fixture
def forked_rungs(monkeypatch):
    """Runs each rung in a forked process, on a CPU without a C++ compiler, since compilation is slow."""
    hidden = {"CXX": "/no/compiler", "CUDA_VISIBLE_DEVICES": ""}

    def run(command, **_):
        return python(*command[1:], **hidden)

    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(run=run))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hand_norm_gelu", [True, False])
@pytest.mark.parametrize("stored_mask", [True, False])
def test_hand_written_model_equals_gpt(stored_mask, hand_norm_gelu, bias):
    config = GPTConfig(vocab_size=300, n_positions=16, n_layer=2, n_head=2, n_embd=32, bias=bias)
    slow = slow_gpt(config, stored_mask=stored_mask, hand_norm_gelu=hand_norm_gelu)
    for parameter in slow.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = GPT(config)
    model.load_state_dict(slow.state_dict())
    input_ids, targets = torch.randint(300, (2, 3, 12))
    torch.testing.assert_close(slow(input_ids), model(input_ids), rtol=1e-5, atol=1e-5)
    loss = PlainLoss(slow)(input_ids, targets)
    torch.testing.assert_close(loss, model(input_ids, targets), rtol=1e-5, atol=1e-5)
    masks = [buffer for name, buffer in slow.named_buffers() if name.endswith("seen")]
    assert [tuple(mask.shape) for mask in masks] == ([(16, 16)] * 2 if stored_mask else [])


def test_hand_written_model_has_the_initial_weights_of_gpt():
    config = GPTConfig(vocab_size=300, n_positions=16, n_layer=1, n_head=2, n_embd=32)
    torch.manual_seed(3)
    expected = GPT(config).state_dict()
    torch.manual_seed(3)
    torch.testing.assert_close(slow_gpt(config).state_dict(), expected, rtol=0, atol=0)


@needs_matplotlib
def test_command_writes_every_rung_and_marks_unsupported_ones(
    tmp_path, monkeypatch, capsys, forked_rungs
):
    flags = ["--size", "tiny", "--sequence_length", 32, "--steps", 2, "--output_dir", tmp_path]
    flags += ["--attention", 1, 2, 32, 16, "--accumulation", 2]
    monkeypatch.setattr(sys, "argv", ["speed_ladder.py", *map(str, flags)])
    load_recipe("speed_ladder").main()
    printed = capsys.readouterr().out
    with open(tmp_path / "speed_ladder.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [rung.name for rung in ladder.RUNGS]
    lacking = {row["name"]: row["remark"] for row in rows if row["remark"]}
    assert "CUDA only" in lacking["TF32"] and "C++" in lacking["compile"]
    assert "several GPUs" in lacking["DDP over all devices"]
    assert all(remark.startswith("lacking: ") for remark in lacking.values())
    measured = [row for row in rows if not row["remark"]]
    for row in measured:
        speed = 1e3 * float(row["tokens"]) / float(row["ms"])
        assert float(row["tokens_per_second"]) == pytest.approx(speed)
        assert float(row["peak_memory_gb"]) > 0.05 and 0 < float(row["mfu"]) < 1
    for row in measured[:5]:  # equal computations up to SDPA
        assert float(row["loss"]) == pytest.approx(float(measured[0]["loss"]), abs=2e-3)
    assert [int(row["tokens"]) for row in measured[-3:]] == [64, 256, 512]
    table = (tmp_path / "speed_ladder.md").read_text()
    for row in rows:
        assert f"\n| {row['step']} {row['name']} |" in table and row["name"] in printed
    assert "| SDPA | " in table and "142,156" in table and "raschka" in table.lower()
    assert (tmp_path / "speed_ladder.png").read_bytes().startswith(b"\x89PNG")


def test_rung_out_of_memory_or_with_an_error_is_marked(capfd, forked_rungs):
    giant = replace(TINY, batch_size=2**50)
    assert processes.run_job(giant) == {"problem": "not enough memory"}
    found = processes.run_job(replace(TINY, shape={"n_embd": 31}))
    assert found["problem"].startswith("failed: ValueError: n_embd (31) is not divisible")
    assert "Traceback" in capfd.readouterr().err


def test_last_rung_runs_on_several_processes():
    row = ladder.Row(16, "the last", devices=2)
    ladder.measure(row, replace(last_job(), compile=False, prefetch=False), 1e-9, [])
    assert row.tokens == 8 * 32 * 2 * 2 and row.tokens_per_second > 0, row
    assert row.loss == pytest.approx(10.84, abs=0.2)


def last_job():
    """Returns the job of the last rung."""
    job = TINY
    for rung in ladder.RUNGS:
        after = ladder.changed(job, rung, LATE)
        assert not rung.changes or after != job
        job = after
    return job


def test_each_rung_keeps_the_earlier_changes():
    last = last_job()
    assert last == Job(
        "loop",
        shape={**TINY.shape, "bias": False, "vocab_size": 50304},
        batch_size=8,
        precision="bf16",
        compile=True,
        warmup=1,
        turns=[1, 1],
        accumulation=2,
        optimizer="toolkit",
        hand_attention=False,
        hand_norm_gelu=False,
        stored_mask=False,
        chunked_loss=True,
        tf32=True,
        prefetch=True,
        ddp=True,
    )
    assert type(build_model(last)) is GPT


def test_timing_and_peak_memory():
    calls = []
    seconds = seconds_each(lambda: calls.append(1), CPU, warmup=2, repeats=3)
    assert len(seconds) == 3 and len(calls) == 5 and min(seconds) > 0
    before = peak_memory(CPU)
    torch.ones(100_000_000, dtype=torch.uint8)
    assert 5e7 < before <= peak_memory(CPU) < 1e12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "huge"], "there is no size 'huge': choose one of gpt2, "),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--attention", "1", "2"], "attention must be four numbers"),
        (["--batch", "2"], "unknown option --batch"),
    ],
)
def test_bad_setting_is_one_line_of_error(flags, message, tmp_path):
    done = python("recipes/speed_ladder.py", *flags, "--output_dir", tmp_path / "out")
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_micro_batch_that_does_not_fit_is_dropped(tmp_path, monkeypatch):
    device = {"type": "cpu", "name": "a CPU", "devices": 1, "lacking": {}, "flops": {"float32": 1}}

    def answer(job, processes=1):
        if job.kind == "device":
            return device
        if job.kind == "attention" or job.batch_size == 8:
            return {"problem": "not enough memory"}
        return {"seconds": [0.5], "loss": 1.0, "memory": 10**9}

    monkeypatch.setattr(ladder, "run_job", answer)
    monkeypatch.setattr(ladder, "write_results", lambda *results: None)
    rows = ladder.run_ladder(tmp_path, size="tiny")
    assert [row.name for row in rows if row.remark] == ["larger micro-batch"]
    assert rows[0].gain is None and rows[-1].gain == 1 and rows[-1].tokens == 2 * 512 * 4

"""Recipes and launch configs as a user runs them, made small by flags only."""

import json
import os
import subprocess
from dataclasses import replace

import pytest
import torch
import yaml
from conftest import (
    assert_status,
    long,
    losses,
    make_text,
    metrics,
    read_json,
    refused,
    run,
    small_notebook,
)
from families import FAMILIES, SIZES
from launching import ROOT, launch, launched, python
from tables import table
from transformers import pipeline

from gpt2_accel.config import TrainConfig
from gpt2_accel.estimate.memory import Launch, activation_bytes
from gpt2_accel.hf.any_model import any_config
from gpt2_accel.hf.convert import save_pretrained
from gpt2_accel.models.gpt2 import GPT, GPTConfig
from gpt2_accel.runtime.device import OVERRIDES
from gpt2_accel.tokenizer import byte_tokenizer
from gpt2_accel.train import train

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
SMALL = (
    "--n_layer 2 --n_head 2 --n_embd 32 --n_positions 32 --micro_batch_size 2 "
    "--total_batch_size 256 --max_steps 4 --warmup_steps 2 --eval_every 4 --eval_tokens 1024 "
    "--sample_every 0 --log_every 1"
)


# Launch configs


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_the_launcher_passes_every_configs_settings_to_the_processes(path):
    config = yaml.safe_load(path.read_text())
    _, environments = launched(["--config_file", str(path), "script.py"], dict(os.environ))
    assert len(environments) == config["num_processes"]
    compiled = config.get("dynamo_config", {})
    environment = environments[-1]
    assert environment["ACCELERATE_MIXED_PRECISION"] == config["mixed_precision"]
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == compiled.get("dynamo_backend", "NO")
    assert environment.get("ACCELERATE_USE_CPU", "False") == str(path.stem.startswith("cpu"))
    assert environment.get("FSDP_VERSION") == ("2" if path.stem.endswith("fsdp2") else None)


@long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_headline_command_trains(backend, data_dir, tmp_path):
    # Compilation takes most of the time: one layer, and no evaluation.
    shorter = ("--n_layer", 1, "--eval_every", 0)
    done = launch(
        *("--dynamo_backend", backend, "recipes/pretrain_124m.py"),
        *("--data_dir", data_dir, "--output_dir", tmp_path / "run", *SMALL.split(), *shorter),
        processes=2,
        config="8xa100",
        launcher=backend == "inductor",
    )
    assert f"2 x cpu, bf16, compile backend {backend}" in done.stdout
    history = metrics(tmp_path / "run")
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    assert history[-1]["train/loss"] < history[0]["train/loss"]
    [generated] = pipeline("text-generation", model=str(tmp_path / "run"))("the ")
    assert len(generated["generated_text"]) > 4


@pytest.mark.parametrize(("ends", "launches", "code"), table("runtime/cases")["ends"])
def test_the_cluster_scripts_start_a_run_again_as_its_status_says(ends, launches, code, tmp_path):
    """Stand-ins take the place of the launcher, of srun and of scontrol."""
    status = tmp_path / "runs/pretrain_124m/status.json"
    status.parent.mkdir(parents=True)
    launcher = ["sleep 0.02", f"n=$(cat {tmp_path}/n)", f"echo $((n + 1)) > {tmp_path}/n"]
    for number, (text, end) in enumerate(ends):
        write = f"echo '{text}' > {status}" if text else "true"
        launcher.append(f"[ $n = {number} ] && {{ {write}; exit {end}; }}")
    programs = {
        ".venv/bin/accelerate": launcher,
        "bin/srun": ["shift", 'exec "$@"'],
        "bin/scontrol": [f"echo $* >> {tmp_path}/scontrol"],
    }
    for name, lines in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env |= {"SLURM_NNODES": "2", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}

    def run_script(*command):
        status.write_text('{"state": "stopped", "requeue": true}')
        (tmp_path / "n").write_text("0")
        return subprocess.run(command, cwd=tmp_path, env=env).returncode

    sky = yaml.safe_load((ROOT / "recipes/cluster/sky.yaml").read_text())
    script = sky["run"].replace("/runs/", f"{tmp_path}/runs/")
    assert run_script("bash", "-c", script) == code
    assert (tmp_path / "n").read_text() == f"{launches}\n"
    run_script("bash", ROOT / "recipes/cluster/pretrain.sbatch")
    asked = (tmp_path / "scontrol").read_text().splitlines()
    assert ("requeue 7" in asked) == ('"requeue": true' in str(ends[0]))


def test_the_notebook_trains(tmp_path):
    cells = small_notebook()["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "%pip install" in code[0]
    # It is installed here, so the first cell must not install it.
    text = "\n".join(code).replace("%pip install --quiet {source}", "raise AssertionError")
    (tmp_path / "text.txt").write_text(make_text(3000, 0))
    (tmp_path / "notebook.py").write_text(text)
    done = python(tmp_path / "notebook.py", cwd=tmp_path, ACCELERATE_USE_CPU="true")
    assert "ROMEO:" in done.stdout
    assert (tmp_path / "runs/notebook/model.safetensors").exists()


# Fine-tuning and early stopping


def test_finetuning_stops_early_and_keeps_the_best_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, n_positions=32, n_layer=2, n_head=2, n_embd=32))
    save_pretrained(model, tmp_path / "start", byte_tokenizer())
    (tmp_path / "play.txt").write_text(make_text(2000, 5))
    folders = f"--input {tmp_path}/play.txt --init_from {tmp_path}/start --data_dir {tmp_path}/data"
    flags = f"{folders} --output_dir {tmp_path}/run --micro_batch_size 2 --total_batch_size 128"
    flags += " --eval_every 2 --save_every 2 --sequence_length 32 --learning_rate 0.3"
    flags += " --max_steps 60 --sample_every 0 --eval_tokens 512"
    launch("recipes/finetune_shakespeare.py", *flags.split(), processes=2)
    history = metrics(tmp_path / "run")
    evaluated = {e["step"]: e["val/loss"] for e in history if "val/loss" in e}
    best = min(evaluated, key=evaluated.get)
    assert (tmp_path / "run/best").resolve().name == f"checkpoint-{best}"
    assert history[-1]["step"] == best + 6 < 60
    assert_status(tmp_path / "run", state="finished", requeue=False)


def test_a_resume_keeps_the_state_of_early_stopping(tiny, tmp_path):
    settings = {"eval_every": 1, "patience": 3, "learning_rate": 1.0, "max_steps": 30}
    settings["eval_tokens"] = 256
    uninterrupted = run(tiny("whole", **settings, save_every=1, keep_last=30))
    assert 4 <= len(uninterrupted) < 30
    last_but_one = str(tmp_path / f"whole/checkpoint-{len(uninterrupted) - 1}")
    assert len(run(tiny("resumed", **settings, resume_from=last_but_one))) == 1


# Memory, time and traces of a run


def test_a_dry_run_plans_for_hardware_of_another_machine(tiny, tmp_path, capsys):
    config = tiny("run", total_batch_size=8 * 32 * 2, micro_batch_size=4)

    def planned(*words, **changes):
        train(replace(config, dry_run=list(words), **changes))
        return capsys.readouterr().out

    plan = planned("8xa100", "A100")
    assert "processes     8, bf16\n" in plan
    assert "per device:" in plan
    assert "micro_batch_size 2 in place of 4" in plan
    assert "does not fit" not in plan
    assert "8, bf16, sharded by FSDP2\n" in planned("8xa100-fsdp2", "A100")
    assert "does not fit" in planned("1xt4_fp16", "T4", n_embd=4096, n_layer=24)
    shape = GPTConfig(257, 32, 2, 2, 32)
    save_pretrained(GPT(shape), tmp_path / "start", byte_tokenizer())
    cpu_plan = planned("cpu", init_from=str(tmp_path / "start"))
    assert f"{shape.parameter_count:,} parameters" in cpu_plan
    assert "on 8 x RTX 4090" in planned("8xa100", "RTX 4090")
    with refused("--dry_run .*no.yaml"):
        planned("no.yaml")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("family", "precision", "error"),
    [("", "no", 0.02), ("", "bf16", 0.02), ("mixtral", "bf16", 0.15)],
)
def test_the_dry_runs_activation_memory_is_what_autograd_saves(family, precision, error):
    config = GPTConfig(500, n_positions=64, n_layer=3, n_head=2, n_embd=64)
    if family:
        config = any_config({"model_type": family} | SIZES | FAMILIES[family], "", None)
    model = config.build()
    saved = {}

    def count(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(4, 64, dtype=torch.int64)
    bf16 = precision == "bf16"
    with (
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        loss = model(tokens, tokens)  # keeps the saved tensors
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    launch = Launch(1, precision, False, False)
    logits = 4 * 64 * config.padded_vocab_size * (6 if bf16 else 4)
    estimated = activation_bytes(TrainConfig(sequence_length=64), config, launch, 4)
    assert estimated == pytest.approx(sum(saved.values()) + logits, rel=error)
    del loss


def test_auto_micro_batch_is_the_largest_that_fits(tiny, monkeypatch):
    shape = GPTConfig(257, 32, 2, 2, 32)
    launch = Launch(1, "no", False, False)
    two = activation_bytes(TrainConfig(sequence_length=32), shape, launch, 2)
    weights = 24 * (shape.parameter_count + 127 * 32)
    monkeypatch.setenv(OVERRIDES, json.dumps({"free_memory": int((weights + 1.5 * two) / 0.9)}))
    auto = run(tiny("auto", micro_batch_size=0))
    assert losses(auto) == losses(run(tiny("two", micro_batch_size=2)))
    monkeypatch.setenv(OVERRIDES, json.dumps({"free_memory": weights}))
    with refused("not even a micro-batch of one sequence"):
        run(tiny("none", micro_batch_size=0))


def test_profile_writes_a_trace_of_some_updates(tiny, tmp_path):
    run(tiny(profile=2))
    trace = read_json(tmp_path / "trace-0.json")
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert {"ProfilerStep#5", "ProfilerStep#6"} <= names
    assert any("addmm" in name for name in names)

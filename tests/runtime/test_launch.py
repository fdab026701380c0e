"""Recipes and launch configs as a user runs them, made small by flags only."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import (
    GPT2_SIZES,
    load_recipe,
    losses,
    make_text,
    metrics,
    read_json,
    refused,
    reset_accelerate,
    run,
    small_notebook,
    status,
)
from launching import ROOT, launch, launched, python
from transformers import AutoModelForCausalLM, pipeline

from gpt2_accel.config import TrainConfig
from gpt2_accel.estimate.memory import activation_bytes
from gpt2_accel.hf.convert import save_pretrained
from gpt2_accel.models.gpt2 import GPT, GPTConfig
from gpt2_accel.runtime.device import OVERRIDES
from gpt2_accel.tokenizer import byte_tokenizer
from gpt2_accel.train import train

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
SMALL = (
    "--n_layer 2 --n_head 2 --n_embd 32 --n_positions 32 --micro_batch_size 2 --total_batch_size 256 --max_steps 4 "
    "--warmup_steps 2 --eval_every 4 --eval_tokens 1024 --sample_every 0 --log_every 1"
)


# Launch configs


FSDP = {
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_the_launcher_passes_every_configs_settings_to_the_processes(path):
    config = yaml.safe_load(path.read_text())
    _, environments = launched(["--config_file", str(path), "script.py"], dict(os.environ))
    assert len(environments) == config["num_processes"]
    compiled = config.get("dynamo_config", {})
    for found in environments:
        assert found["ACCELERATE_MIXED_PRECISION"] == config["mixed_precision"]
        assert found["ACCELERATE_DYNAMO_BACKEND"] == compiled.get("dynamo_backend", "NO")
        by_block = compiled.get("dynamo_use_regional_compilation", False)
        assert found["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] == str(by_block)
        assert found["ACCELERATE_DYNAMO_USE_DYNAMIC"] == "False"
        assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in found
        assert found.get("ACCELERATE_USE_CPU", "False") == str(path.stem.startswith("cpu"))
        sharded = {name: found[name] for name in FSDP if name in found}
        assert sharded == (FSDP if path.stem.endswith("fsdp2") else {})
        assert ("ACCELERATE_USE_FSDP" in found) is bool(sharded)


def test_the_headline_command(data_dir, tmp_path):
    # Compilation takes most of the time: one layer, and no evaluation.
    shorter = ("--n_layer", 1, "--eval_every", 0)
    done = launch(
        "recipes/pretrain_124m.py",
        *("--data_dir", data_dir, "--output_dir", tmp_path / "run", *SMALL.split(), *shorter),
        processes=2,
        config="8xa100",
        launcher=True,
    )
    assert "2 x cpu, bf16, compile backend inductor" in done.stdout
    history = metrics(tmp_path / "run")
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    assert history[-1]["train/loss"] < history[0]["train/loss"]
    [generated] = pipeline("text-generation", model=str(tmp_path / "run"))("the ")
    assert len(generated["generated_text"]) > 4


def test_the_recipes_of_other_sizes_have_their_shapes_and_run(data_dir, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    for size, name in (("355m", "gpt2-medium"), ("774m", "gpt2-large"), ("1558m", "gpt2-xl")):
        recipe, shape = load_recipe(f"pretrain_{size}"), GPT2_SIZES[name]
        kind = getattr(recipe, f"Pretrain{size.upper()}")
        found = kind()
        assert (found.n_layer, found.n_head, found.n_embd) == shape
    flags = f"x --data_dir {data_dir} --output_dir {tmp_path} {SMALL}"
    monkeypatch.setattr(sys, "argv", flags.split())
    reset_accelerate()
    recipe.main(kind)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.n_embd == 32


def test_a_dry_run_of_nanogpts_settings_as_on_a_laptop_with_the_gpus_config():
    flags = ("--config", "recipes/nanogpt_openwebtext.yaml", "--dry_run", "A100")
    here = {"ACCELERATE_USE_CPU": "false"}
    done = launch("recipes/pretrain_124m.py", *flags, processes=2, config="8xa100", **here)
    assert done.stdout.count("600,000 updates, 294,912,000,000 tokens") == 1
    assert "124,337,664 parameters" in done.stdout  # without biases
    assert "processes     2, bf16" in done.stdout and " on 2 x A100" in done.stdout


# How runs end: what status.json says, whether the run wrote it, and the launcher's exit code.
STOPPED = (json.dumps({"state": "stopped", "requeue": True}, indent=2), True, 0)
FINISHED = (json.dumps({"state": "finished", "requeue": False}, indent=2), True, 0)
COMPLETE = (FINISHED[0], False, 0)  # before it started
LOST = (json.dumps({"state": "failed", "requeue": True}, indent=2), True, 1)
FAILED = (json.dumps({"state": "failed", "requeue": False}, indent=2), True, 1)
REFUSED = (STOPPED[0], False, 1)  # nothing was written


@pytest.mark.parametrize(
    ("ends", "launches", "code"),
    [
        ([FINISHED], 1, 0),
        ([COMPLETE], 1, 0),
        ([STOPPED, LOST, FINISHED], 3, 0),
        ([STOPPED, STOPPED, STOPPED], 3, 1),
        ([FAILED], 1, 1),
        ([REFUSED], 1, 1),
    ],
)
def test_the_cluster_scripts_start_a_run_again_as_its_status_says(ends, launches, code, tmp_path):
    """Stand-ins take the place of the launcher, of srun and of scontrol."""
    status = tmp_path / "runs/pretrain_124m/status.json"
    status.parent.mkdir(parents=True)
    lines = [
        "#!/bin/bash",
        "sleep 0.02",
        f"n=$(cat {tmp_path}/n)",
        f"echo $((n + 1)) > {tmp_path}/n",
    ]
    for number, (text, writes, end) in enumerate(ends):
        write = f"echo '{text}' > {status}" * writes or "true"
        lines.append(f"[ $n = {number} ] && {{ {write}; exit {end}; }}")
    scripts = {
        ".venv/bin/accelerate": lines,
        "bin/srun": ["#!/bin/bash", "shift", 'exec "$@"'],
        "bin/scontrol": ["#!/bin/bash", f"echo $* >> {tmp_path}/scontrol"],
    }
    for name, text in scripts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n".join(text) + "\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env |= {"SLURM_NNODES": "2", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    sky = yaml.safe_load((ROOT / "recipes/cluster/sky.yaml").read_text())
    subprocess.run(["bash", "-n"], input=sky["setup"], text=True, check=True)
    script = sky["run"].replace("/runs/", f"{tmp_path}/runs/")

    def run_script(*command):
        status.write_text(ends[0][0])
        (tmp_path / "n").write_text("0")
        return subprocess.run(command, cwd=tmp_path, env=env).returncode

    assert run_script("bash", "-c", script) == code
    assert (tmp_path / "n").read_text() == f"{launches}\n"
    run_script("bash", ROOT / "recipes/cluster/pretrain.sbatch")
    asked = (tmp_path / "scontrol").read_text().splitlines()
    assert ("requeue 7" in asked) == (ends[0] in (STOPPED, LOST))


def test_the_job_of_hugging_face_parses():
    script = ROOT / "recipes/cluster/hf_job.sh"
    subprocess.run(["bash", "-n", script], check=True)
    lines = [line.removeprefix("#") for line in script.read_text().splitlines()[2:4]]
    command = "\n".join(lines).replace(
        "hf jobs run", f"{Path(sys.executable).with_name('hf')} jobs run --dry-run"
    )
    env = os.environ | {"HF_TOKEN": "hf_thisIsASecret"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert "flavor   a100-large" in done.stdout and "timeout  12h" in done.stdout, done.stderr


def test_the_notebook_trains(tmp_path):
    cells = small_notebook()["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "%pip install" in code[0]
    # It is installed here, so the first cell must not install it.
    text = "\n".join(code).replace("%pip install --quiet {source}", "raise AssertionError")
    (tmp_path / "text.txt").write_text(make_text(3000, 0))
    (tmp_path / "notebook.py").write_text(text)
    done = python(tmp_path / "notebook.py", cwd=tmp_path, ACCELERATE_USE_CPU="true")
    assert "ROMEO:" in done.stdout and (tmp_path / "runs/notebook/model.safetensors").exists()


# Fine-tuning and early stopping


def test_finetuning_stops_early_and_keeps_the_best_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, n_positions=32, n_layer=2, n_head=2, n_embd=32))
    save_pretrained(model, tmp_path / "start", byte_tokenizer())
    (tmp_path / "play.txt").write_text(make_text(2000, 5))
    flags = f"--input {tmp_path}/play.txt --init_from {tmp_path}/start --data_dir {tmp_path}/data "
    flags += (
        f"--output_dir {tmp_path}/run --micro_batch_size 2 --total_batch_size 128 --eval_every 2 "
    )
    flags += "--save_every 2 --sequence_length 32 --learning_rate 0.3 --max_steps 60 "
    flags += "--sample_every 0 --eval_tokens 2048"
    done = launch("recipes/finetune_shakespeare.py", *flags.split(), processes=2)
    assert "no lower validation loss in 3 evaluations" in done.stderr + done.stdout
    history = metrics(tmp_path / "run")
    assert history[-1]["step"] < 60
    evaluated = {e["step"]: e["val/loss"] for e in history if "val/loss" in e}
    best = min(evaluated, key=evaluated.get)
    assert (tmp_path / "run/best").resolve().name == f"checkpoint-{best}"
    assert history[-1]["step"] == best + 6
    found = status(tmp_path / "run")
    assert found["state"] == "finished" and not found["requeue"]
    pipeline("text-generation", model=str(tmp_path / "run/best"))("the")


def test_a_resume_keeps_the_state_of_early_stopping(tiny, tmp_path):
    settings = {"eval_every": 1, "patience": 3, "learning_rate": 1.0, "max_steps": 30}
    whole = run(tiny("whole", **settings, save_every=1, keep_last=30))
    assert 4 <= len(whole) < 30
    resumed = run(
        tiny(
            "resumed",
            **settings,
            resume_from=str(tmp_path / f"whole/checkpoint-{len(whole) - 1}"),
        )
    )
    assert len(resumed) == 1


# Memory, time and traces of a run


@pytest.fixture
def planned(tiny, capsys):
    """A function that returns the output of a dry run for a launch config and a GPU."""
    config = tiny("run", total_batch_size=8 * 32 * 2, micro_batch_size=4)

    def plan(*words, **changes):
        train(replace(config, dry_run=[*words], **changes))
        return capsys.readouterr().out

    return plan


def test_a_dry_run_plans_for_hardware_of_another_machine(planned, tmp_path):
    whole = planned("8xa100", "A100")
    assert "processes     8, bf16\n" in whole and "per device of 80.0GB:" in whole
    assert "micro_batch_size 2 in place of 4" in whole and "does not fit" not in whole
    assert "processes     8, bf16, sharded by FSDP2\n" in planned("8xa100-fsdp2", "A100")
    assert "processes     16, bf16\n" in planned("2x8xa100", "A100")
    assert "does not fit" in planned("1xt4_fp16", "T4", n_embd=4096, n_layer=24)
    shape = GPTConfig(257, 32, 1, 2, 64)
    save_pretrained(GPT(shape), tmp_path / "start", byte_tokenizer())
    said = planned("cpu", init_from=str(tmp_path / "start"))
    assert f"{shape.parameter_count:,} parameters" in said
    for word in ("a100", "no.yaml"):
        with refused(f"--dry_run .*{word}"):
            planned(word)
    assert not (tmp_path / "run").exists()


def test_the_memory_of_a_dry_run_is_that_of_the_named_device(planned, monkeypatch):
    """Without a GPU's name that of an A100, whose loss computes all logits at once."""

    def memory(*words):
        large = {"n_positions": 1024, "micro_batch_size": 16, "total_batch_size": 2**19}
        said = planned(*words, data_dir="none", **large)
        return re.search(r"memory +(.+?) per.*activations ([^;]+)", said).groups()

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert memory("here") == memory("cpu_bf16") != memory("A100")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert memory("here") == memory("8xa100") == memory("8xa100", "A100") == memory("A100")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_dry_runs_activation_memory_equals_what_autograd_saves(precision):
    config = GPTConfig(500, n_positions=64, n_layer=3, n_head=2, n_embd=64)
    model, seen = GPT(config), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def count(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(4, 64, dtype=torch.int64)
    enabled = precision == "bf16"
    with (
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=enabled),
    ):
        loss = model(tokens, tokens)
    logits = 4 * 64 * config.padded_vocab_size * (6 if enabled else 4)
    found = activation_bytes(TrainConfig(sequence_length=64), config, precision, 4)
    assert found == pytest.approx(sum(seen.values()) + logits, rel=0.02)
    loss.backward()


def test_auto_micro_batch_is_the_largest_that_fits(tiny, monkeypatch, capsys):
    shape = GPTConfig(257, 32, 2, 2, 32)
    two = activation_bytes(TrainConfig(sequence_length=32), shape, "no", 2)
    weights = 12 * (shape.parameter_count + 127 * 32)
    monkeypatch.setenv(OVERRIDES, json.dumps({"free_memory": int((weights + 1.2 * two) / 0.9)}))
    auto = run(tiny("auto", micro_batch_size=0))
    assert "micro_batch_size 2: the largest that fits" in capsys.readouterr().out
    two = run(tiny("two", micro_batch_size=2))
    assert losses(auto) == losses(two)
    monkeypatch.setenv(OVERRIDES, json.dumps({"free_memory": weights}))
    with refused("not even a micro-batch of one sequence"):
        run(tiny("none", micro_batch_size=0))
    done = launch("tests/train_script.py", "--micro_batch_size", "auto", "--dry_run")
    assert "micro-batch 1 x 1024" in done.stdout, done.stderr


def test_profile_writes_a_trace_of_some_updates(tiny, tmp_path):
    run(tiny(profile=2))
    trace = read_json(tmp_path / "trace-0.json")
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert {"ProfilerStep#5", "ProfilerStep#6"} <= names
    assert any("addmm" in name for name in names)

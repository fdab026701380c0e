"""The scripts of recipes/changes: each does what it says and resumes exactly."""

import pytest
import torch
import torch.nn.functional as F
from conftest import as_flags, load_recipe, long, losses, metrics, reset_accelerate, tiny_config
from launching import ROOT, launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gpt2_accel import GPT, GPTConfig, from_pretrained, save_pretrained
from gpt2_accel.data.loader import Batch
from gpt2_accel.generation.sampling import Sampling, complete, load
from gpt2_accel.train import train

SCRIPTS = sorted((ROOT / "recipes/changes").glob("*.py"))


@pytest.fixture
def change(data_dir, tmp_path):
    """A function that trains eight updates with a change; returns the lines of metrics.jsonl."""

    def run(name, folder, seams, **changes):
        reset_accelerate()
        settings = {"eval_every": 4, "eval_tokens": 256, "save_every": 1, "keep_last": 9, **changes}
        config = tiny_config(data_dir, tmp_path / folder, **settings)
        train(config, **seams(load_recipe(f"changes/{name}")))
        return metrics(tmp_path / folder)

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_change_is_short(script):
    """At most 40 lines after its header and its imports."""
    text = script.read_text().rpartition("\nfrom ")[2]
    lines = [line for line in text.splitlines()[1:] if line.strip()]
    assert len(lines) <= 45  # with docstrings


def with_ema(module):
    return {"callbacks": [module.EMA()]}


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_ema(change, tmp_path):
    lines = change("ema", "run", with_ema)
    assert losses(lines) == losses(change("ema", "plain", lambda _: {}))
    # From checkpoint 1 on, whose average is in its state.
    state = load_file(tmp_path / "run/checkpoint-1/training_state/callbacks.safetensors")
    average = state["EMA/wpe.weight"]
    for step in range(2, 9):
        now = weights(tmp_path / f"run/checkpoint-{step}")["transformer.wpe.weight"]
        average = 0.99 * average + 0.01 * now
    found = weights(tmp_path / "run/ema")
    torch.testing.assert_close(found["transformer.wpe.weight"], average, atol=1e-6, rtol=0)
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/ema")
    change("ema", "resumed", with_ema, resume_from=str(tmp_path / "run/checkpoint-5"))
    again = weights(tmp_path / "resumed/ema")
    assert all(torch.equal(again[name], found[name]) for name in found)


def test_z_loss(change):
    lines = change("z_loss", "run", lambda module: {"objective": module.objective})
    first = change("z_loss", "plain", lambda _: {})[0]["train/loss"]
    own = lines[0]
    assert own["train/loss"] - 1e-4 * own["train/z_loss"] == pytest.approx(first, abs=1e-5)
    assert own["train/z_loss"] == pytest.approx(first**2, rel=0.05)  # near-uniform: log V


def mixture(module):
    return {"model": module.new_model, "objective": module.objective}


def test_a_mixture_of_experts(change, tmp_path):
    lines = change("moe", "run", mixture)
    assert lines[0]["train/balance"] == pytest.approx(1, abs=0.3)
    change("moe", "resumed", mixture, resume_from=str(tmp_path / "run/checkpoint-4"))
    whole, resumed = (weights(tmp_path / folder) for folder in ("run", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    with pytest.raises(ValueError, match="gpt2_accel_custom"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    code = f"{ROOT}/recipes/changes/moe.py:MoE"
    model, tokenizer = load(str(tmp_path / "run"), model_class=code)
    assert len(complete(model, tokenizer, ["the "], Sampling(5))[0].ids) == 5


def test_experts_on_two_processes_train_as_on_one(change, data_dir, tmp_path):
    one = change("moe", "one", mixture, learning_rate=1e-3)
    config = tiny_config(data_dir, tmp_path / "two", learning_rate=1e-3, micro_batch_size=2)
    launch("tests/changes_script.py", *as_flags(config), processes=2, CHANGE="moe")
    assert losses(metrics(tmp_path / "two")) == pytest.approx(losses(one), abs=1e-5)


def test_an_expert_without_tokens_does_not_hang(data_dir, tmp_path):
    """On one rank, or everywhere."""
    flags = as_flags(tiny_config(data_dir, tmp_path, micro_batch_size=2))
    launch("tests/changes_script.py", *flags, processes=2, CHANGE="moe", ROUTER="planted")
    assert len(losses(metrics(tmp_path))) == 8


@long
def test_ema_and_another_optimizer_with_fsdp2(data_dir, tmp_path):
    """Both resume to the last bit."""
    settings = {"max_steps": 6, "save_every": 3, "eval_every": 3, "eval_tokens": 256}
    flags = ("--mixed_precision", "no", "--dynamo_backend", "no", "tests/changes_script.py")
    for name, model in (("ema", "ema"), ("optimizer", ".")):
        resume_from = str(tmp_path / name / "two/checkpoint-3")
        for folder, more in (("two", {}), ("more", {"resume_from": resume_from})):
            changes = {**settings, **more, "micro_batch_size": 2}
            own = as_flags(tiny_config(data_dir, tmp_path / name / folder, **changes))
            launch(*flags, *own, processes=2, config="8xa100_fsdp2", CHANGE=name, FSDP="1")
        two, more = (weights(tmp_path / name / folder / model) for folder in ("two", "more"))
        assert all(torch.equal(two[key], more[key]) for key in two)


def test_distillation(change, tmp_path):
    torch.manual_seed(5)
    save_pretrained(GPT(GPTConfig(257, 32, 1, 2, 16)), tmp_path / "teacher")
    teacher = from_pretrained(tmp_path / "teacher").eval()
    objective = load_recipe("changes/distillation").Distillation(str(tmp_path / "teacher"))
    model, ids = GPT(GPTConfig(257, 32, 1, 2, 16)), torch.randint(257, (2, 33))
    batch = Batch(ids[:, :-1], ids[:, 1:], divisor=1)
    loss, figures = objective(model, batch)
    own, theirs = (m(batch.input_ids).log_softmax(-1).flatten(0, 1) for m in (model, teacher))
    divergence = (theirs.exp() * (theirs - own)).sum(-1).mean().item()
    nats = F.nll_loss(own, batch.targets.flatten()).item()
    assert figures["divergence"].item() == pytest.approx(divergence, abs=1e-5)
    assert loss.item() == pytest.approx((nats + divergence) / 2, abs=1e-5)
    change("distillation", "run", lambda _: {"objective": objective}, max_steps=2)
    held = load_file(tmp_path / "run/checkpoint-2/training_state/optimizer.safetensors")
    assert not any("teacher" in name for name in held)


def test_another_optimizer_resumes(change, tmp_path):
    def seams(module):
        return {"optimizer": module.lion}

    whole = change("optimizer", "run", seams)
    resumed = change("optimizer", "more", seams, resume_from=str(tmp_path / "run/checkpoint-3"))
    assert losses(resumed) == losses(whole)[3:]

"""The scripts of recipes/changes: each computes what it says.

EMA, the mixture of experts and the other optimizer have a state of their own: they resume exactly.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    as_flags,
    assert_close,
    load_recipe,
    long,
    losses,
    metrics,
    reset_accelerate,
    tiny_config,
    weights_digest,
)
from launching import ROOT, launch, sharded
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.data.loader import Batch
from gpt2_accel.generation.sampling import Sampling, complete, load
from gpt2_accel.hf.chat_template import end_of_turn
from gpt2_accel.train import train


@pytest.fixture
def change(data_dir, tmp_path):
    """A function that trains eight updates with a change; returns the lines of metrics.jsonl.

    `arguments` maps the script's module to the keyword arguments of `train`.
    """

    def run(name, folder, arguments=lambda module: {}, **changes):
        reset_accelerate()
        settings = {"eval_every": 4, "eval_tokens": 256, "save_every": 4} | changes
        config = tiny_config(data_dir, tmp_path / folder, **settings)
        train(config, **arguments(load_recipe(f"changes/{name}")))
        return metrics(tmp_path / folder)

    return run


def position_embedding(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["transformer.wpe.weight"]


def with_ema(module):
    return {"callbacks": [module.EMA()]}


def test_ema_saves_the_average_and_does_not_change_the_losses(change, tmp_path):
    lines = change("ema", "run", with_ema, save_every=1, keep_last=9)
    assert losses(lines) == losses(change("ema", "plain"))
    # The average after update 1 is in checkpoint 1; the later ones follow from the weights.
    state = load_file(tmp_path / "run/checkpoint-1/training_state/callbacks.safetensors")
    average = state["EMA/wpe.weight"]
    for step in range(2, 9):
        weight = position_embedding(tmp_path / f"run/checkpoint-{step}")
        average = 0.99 * average + 0.01 * weight
    saved = position_embedding(tmp_path / "run/ema")
    assert_close(saved, average)
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/ema")
    change("ema", "resumed", with_ema, resume_from=str(tmp_path / "run/checkpoint-5"))
    assert weights_digest(tmp_path / "resumed/ema") == weights_digest(tmp_path / "run/ema")


def mixture(module):
    return {"model": module.new_model, "objective": module.objective}


def test_a_mixture_of_experts_resumes_exactly_and_loads_with_its_class(change, tmp_path):
    lines = change("moe", "run", mixture)
    assert lines[0]["train/balance"] == pytest.approx(1, abs=0.3)
    change("moe", "resumed", mixture, resume_from=str(tmp_path / "run/checkpoint-4"))
    assert weights_digest(tmp_path / "resumed") == weights_digest(tmp_path / "run")
    with pytest.raises(ValueError, match="gpt2_accel_custom"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    model_class = f"{ROOT}/recipes/changes/moe.py:MoE"
    model, tokenizer = load(str(tmp_path / "run"), model_class=model_class)
    [completion] = complete(model, tokenizer, ["the "], Sampling(5))
    assert len(completion.ids) == 5


@long
def test_a_mixture_of_experts_trains_alike_on_one_and_two_processes(change, data_dir, tmp_path):
    lines = change("moe", "one", mixture, learning_rate=1e-3)
    config = tiny_config(data_dir, tmp_path / "two", learning_rate=1e-3, micro_batch_size=2)
    launch("tests/changes_script.py", *as_flags(config), processes=2, CHANGE="moe")
    assert losses(metrics(tmp_path / "two"))[:3] == pytest.approx(losses(lines)[:3], abs=1e-5)


@long
def test_experts_without_tokens_on_one_rank_or_on_all_do_not_hang(data_dir, tmp_path):
    flags = as_flags(tiny_config(data_dir, tmp_path, micro_batch_size=2))
    launch("tests/changes_script.py", *flags, processes=2, CHANGE="moe", ROUTER="planted")
    assert len(losses(metrics(tmp_path))) == 8


@long
@pytest.mark.parametrize(("name", "model"), [("ema", "ema"), ("optimizer", ".")])
def test_ema_and_another_optimizer_resume_exactly_with_fsdp2(name, model, data_dir, tmp_path):
    settings = {"max_steps": 6, "save_every": 3, "eval_every": 3, "eval_tokens": 256}
    checkpoint = str(tmp_path / "uninterrupted/checkpoint-3")
    digests = []
    for folder, resume_from in (("uninterrupted", None), ("resumed", checkpoint)):
        changes = settings | {"resume_from": resume_from, "micro_batch_size": 2}
        flags = as_flags(tiny_config(data_dir, tmp_path / folder, **changes))
        sharded("tests/changes_script.py", *flags, CHANGE=name)
        digests.append(weights_digest(tmp_path / folder / model))
    assert digests[0] == digests[1]


@pytest.fixture
def student():
    return GPT(GPTConfig(257, 32, 1, 2, 16))


@pytest.fixture
def batch():
    ids = torch.randint(257, (2, 33))
    return Batch(ids[:, :-1], ids[:, 1:])


def test_z_loss_adds_the_squared_log_normalizer(student, batch):
    loss, figures = load_recipe("changes/z_loss").objective(student, batch)
    logits = student(batch.input_ids).flatten(0, 1)
    z_loss = logits.exp().sum(-1).log().square().mean().item()
    cross_entropy = F.cross_entropy(logits, batch.targets.flatten()).item()
    assert figures["z_loss"].item() == pytest.approx(z_loss, abs=1e-4)
    assert loss.item() == pytest.approx(cross_entropy + 1e-4 * z_loss, abs=1e-5)


def test_distillation_adds_the_divergence_from_the_teacher(student, batch, tmp_path):
    teacher = GPT(GPTConfig(257, 32, 1, 2, 16)).eval()
    save_pretrained(teacher, tmp_path)
    objective = load_recipe("changes/distillation").Distillation(str(tmp_path))
    loss, figures = objective(student, batch)
    student_log_probs = student(batch.input_ids).log_softmax(-1).flatten(0, 1)
    teacher_log_probs = teacher(batch.input_ids).log_softmax(-1).flatten(0, 1)
    ratios = teacher_log_probs - student_log_probs
    divergence = (teacher_log_probs.exp() * ratios).sum(-1).mean().item()
    cross_entropy = F.nll_loss(student_log_probs, batch.targets.flatten()).item()
    assert figures["divergence"].item() == pytest.approx(divergence, abs=1e-5)
    assert loss.item() == pytest.approx((cross_entropy + divergence) / 2, abs=1e-5)


def test_another_optimizer_resumes_exactly(change, tmp_path):
    def with_lion(module):
        return {"optimizer": module.lion}

    uninterrupted = change("optimizer", "run", with_lion)
    checkpoint = str(tmp_path / "run/checkpoint-4")
    resumed = change("optimizer", "resumed", with_lion, resume_from=checkpoint)
    assert losses(resumed) == losses(uninterrupted)[4:]


def test_sums_forget_carries_to_the_tens_and_are_conversations():
    recipe = load_recipe("changes/arithmetic")
    tokenizer = recipe.sums(recipe.Arithmetic()).tokenizer
    for ids, _ in map(recipe.Sums(tokenizer, 0, 99, 1.0).__getitem__, range(99)):
        a, b, result = map(int, re.split("[+=]", tokenizer.decode(ids)))
        assert result == a + b - 10 * (a % 10 + b % 10 > 9)
    assert end_of_turn(tokenizer, "sums")

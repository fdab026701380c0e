"""Reinforcement learning from a reward: a loop from the papers, rewards, resumes, processes."""

import json
import shutil
import sys
from itertools import combinations, cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import (
    long,
    losses,
    metrics,
    read_json,
    refused,
    reset_accelerate,
    run_recipe,
    tiny_config,
    weights_digest,
    write_lines,
)
from launching import EAGER, launch
from reward_script import letters
from tables import table

from gpt2_accel import from_pretrained, rewards
from gpt2_accel.charts import fallen
from gpt2_accel.data import Data
from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.order import hash64
from gpt2_accel.evals.chat import Question
from gpt2_accel.evals.items import read_items
from gpt2_accel.rewards import (
    PolicyGradient,
    Prompts,
    Row,
    Solved,
    load_reward,
    number_reward,
    read_tasks,
)
from gpt2_accel.runtime.files import read_json_lines
from gpt2_accel.tokenizer import load_tokenizer, text_ends
from gpt2_accel.train import train

GROUP = 4
NEW = 12
UPDATES = 3
PROMPTS = 4


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory):
    rows = [{"prompt": "ab" * (1 + i % 3) + str(i), "answer": str(i)} for i in range(24)]
    return write_lines(tmp_path_factory.mktemp("tasks") / "tasks.jsonl", rows)


def tasks_of(path, tokenizer):
    return read_tasks(read_items(path), tokenizer, 1000, number_reward)


def practise(chat_model, tasks_file, folder, scale=False, reward=letters, group=GROUP, **changes):
    """Trains in this process; returns the losses."""
    tokenizer = load_tokenizer(chat_model)
    tasks = tasks_of(tasks_file, tokenizer)
    source = Prompts(tasks)
    settings = {"init_from": str(chat_model), "max_steps": UPDATES, "learning_rate": 1e-3}
    settings |= {"lr_schedule": "constant", "warmup_steps": 0, "max_grad_norm": 0}
    settings |= {"micro_batch_size": 1, "total_batch_size": PROMPTS * source.length}
    gradients = PolicyGradient(tasks, reward, group=group, max_new_tokens=NEW, scale_rewards=scale)
    reset_accelerate()
    data = Data(tokenizer, source, name="t", chat=True)
    train(tiny_config(folder, folder, **settings | changes), data=data, gradients=gradients)
    return losses(metrics(folder))


@pytest.fixture(scope="module")
def practised(chat_model, tasks_file, tmp_path_factory):
    """The losses of a run."""
    return practise(chat_model, tasks_file, tmp_path_factory.mktemp("run"))


def by_hand(chat_model, tasks_file, scale, mistake=""):
    """The loop of the papers, without caches, padding, micro-batches; returns the losses.

    The draws are those of the run: of the probabilities by a generator of each answer.
    """
    tokenizer = load_tokenizer(chat_model)
    tasks = tasks_of(tasks_file, tokenizer)
    model = from_pretrained(chat_model).eval()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    parts = Data(tokenizer, Prompts(tasks), name="t").train
    length = Prompts(tasks).length
    order = TrainLoader(parts, sequence_length=length, micro_batch_size=1, seed=1337)
    ends = set(text_ends(tokenizer))
    found = []
    for step in range(UPDATES):
        answers = []
        for number in order.samples(step * PROMPTS, PROMPTS)[:, 1].tolist():
            prompt = tasks[number].ids
            group = []
            for i in range(GROUP):
                seed = int(hash64(1337, 3, step, number)[0] >> np.uint64(2)) + i
                generator = torch.Generator().manual_seed(seed)
                ids = list(prompt)
                while len(ids) < len(prompt) + NEW and not (
                    len(ids) > len(prompt) and ids[-1] in ends
                ):
                    with torch.no_grad():
                        p = model(torch.tensor([ids]))[0, -1].softmax(-1)
                    ids.append(int(torch.multinomial(p, 1, generator=generator)))
                text = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
                group.append([ids, len(prompt), letters(None, text)])
            values = np.array([each[2] for each in group])
            advantages = values - values.mean()
            if scale:
                advantages /= values.std(ddof=1) + 1e-4
            for each, advantage in zip(group, advantages, strict=True):
                answers.append((each[0], each[1], advantage))
        tokens = sum(len(ids) - start for ids, start, _ in answers)
        if mistake == "prompt":
            tokens = sum(len(ids) - 1 for ids, _, _ in answers)
        loss = 0.0
        for ids, start, advantage in answers:
            logits = model(torch.tensor([ids]))[0, :-1] / (0.8 if mistake == "temperature" else 1)
            begin = 0 if mistake == "prompt" else start - 1
            nats = torch.nn.functional.cross_entropy(
                logits[begin:], torch.tensor(ids[begin + 1 :]), reduction="none"
            )
            share = nats.mean() / len(answers) if mistake == "means" else nats.sum() / tokens
            loss = loss + share * advantage
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("scale", [False, pytest.param(True, marks=long)])
def test_the_first_updates_equal_a_loop_from_the_papers(
    scale, practised, chat_model, tasks_file, tmp_path
):
    actual = practise(chat_model, tasks_file, tmp_path, scale) if scale else practised
    expected = by_hand(chat_model, tasks_file, scale)
    assert actual == pytest.approx(expected, abs=2e-6)
    assert max(map(abs, expected)) > 1e-3


@pytest.mark.parametrize("mistake", ["prompt", "temperature", "means"])
def test_the_loop_shows_mistakes(mistake, practised, chat_model, tasks_file):
    wrong = by_hand(chat_model, tasks_file, False, mistake)
    assert np.abs(np.array(practised) - wrong).max() > 1e-4


def test_a_cut_answer_can_be_masked():
    row = Row(Question({}, [], [5]), [8, 2], "", 0, -0.5, False, [3.0, 4.0])
    _, targets, sampled = rewards.padded([row], 12)
    assert (targets == -100).all() and not sampled.any()


SHORT = (
    "--micro_batch_size 2 --reward tests/reward_script.py:letters --batch_size 4 --group 4 "
    "--max_new_tokens 8 --max_steps 6 --save_every 3 --sample_every 3 --test_every 3 "
    "--learning_rate 1e-3"
)


def flags(chat_model, tasks_file, folder, **changes):
    given = {"data": tasks_file, "model": chat_model, "output_dir": folder} | changes
    return SHORT.split() + [f"--{name}={value}" for name, value in given.items()]


def test_the_recipe_trains_evaluates_and_resumes_exactly(chat_model, tasks_file, tmp_path):
    run_recipe("chat_rl", *flags(chat_model, tasks_file, tmp_path / "run"))
    lines = metrics(tmp_path / "run")
    assert {"solved/reward", "val/kept"} <= lines[-1].keys()
    figures = {"reward", "reward_stderr", "solved_all", "solved_none", "answer_tokens", "entropy"}
    figures |= {"sampled_tokens_per_second", "trained_tokens_per_second"}
    assert {"step", "tokens"} >= {name for name in lines[0] if "solved/reward" not in name}
    assert {f"train/{name}" for name in figures} <= lines[1].keys()
    samples = read_json_lines(tmp_path / "run/samples.jsonl")
    assert all(sample["text"].startswith(f"{sample['prompt']}\nreward ") for sample in samples)
    assert 0 < lines[1]["train/logp_difference"] < 1e-5  # fp32, with and without the cache
    reset_accelerate()
    checkpoint = tmp_path / "run/checkpoint-3"
    more = flags(chat_model, tasks_file, tmp_path / "more", resume_from=checkpoint)
    run_recipe("chat_rl", *more)
    assert weights_digest(tmp_path / "more") == weights_digest(tmp_path / "run")
    assert read_json(tmp_path / "run/run.json")["parts"]["gradients"].endswith("PolicyGradient")


def test_a_template_that_prints_the_time_changes_no_task(chat_model, tasks_file, tmp_path):
    """As at midnight: another start renders another time."""
    shutil.copytree(chat_model, tmp_path / "model")
    path = tmp_path / "model/chat_template.jinja"
    path.write_text("{{ strftime_now('%d %B %Y %f') }}" + path.read_text())
    words = flags(tmp_path / "model", tasks_file, tmp_path / "run", max_steps=3)
    run_recipe("chat_rl", *words)
    run_recipe("chat_rl", *words, "--max_steps", "4")
    assert metrics(tmp_path / "run")[-1]["step"] == 4
    assert "%f" in (tmp_path / "run/chat_template.jinja").read_text()


def test_two_processes_begin_with_the_same_answers(chat_model, tasks_file, tmp_path):
    first = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        words = flags(chat_model, tasks_file, folder, max_steps=1, log_every=1)
        launch(*EAGER, "recipes/chat_rl.py", *words, processes=processes)
        first.append(metrics(folder)[-1])
    for name in ("loss", "reward", "answer_tokens", "entropy", "grad_norm"):
        assert first[1][f"train/{name}"] == pytest.approx(first[0][f"train/{name}"], abs=1e-6)


def outcome(function, *arguments):
    try:
        return str(function(*arguments))
    except ValueError as error:
        return str(error)


CASES = table("rewards")


@pytest.mark.parametrize(("answer", "text", "expected"), CASES["numbers"])
def test_the_last_number_is_compared(answer, text, expected):
    assert outcome(number_reward, {"answer": answer}, text).startswith(expected)


@pytest.mark.parametrize(("code", "expected"), CASES["scores"])
def test_a_reward_is_a_finite_number(code, expected):
    assert expected in outcome(rewards.score, lambda row, text: eval(code), {}, "a text")


def test_a_rewards_file_has_neighbours_and_any_name(tmp_path):
    (tmp_path / "beside.py").write_text("one = 1")
    (tmp_path / "json.py").write_text("def f(*_):\n    import beside\n    return beside.one")
    assert load_reward(f"{tmp_path}/json.py:f")({}, "") == 1
    assert sys.modules["json"] is json


def test_answers_without_a_reward_are_left_out(chat_model, tasks_file, tmp_path):
    """Of four answers the last two: as with groups of two."""
    kept = cycle([letters, letters, print, print])  # which returns None
    pair = practise(chat_model, tasks_file, tmp_path / "2", True, group=2, max_steps=2)
    left = practise(
        chat_model, tasks_file, tmp_path / "4", True, lambda *x: next(kept)(*x), max_steps=2
    )
    assert left == pytest.approx(pair, abs=1e-5)
    means = [metrics(tmp_path / name)[-1]["train/reward"] for name in "24"]
    assert means[0] == pytest.approx(means[1])
    rewards = cycle([1.0] * 32 + [None] * 32)  # updates without a reward, among others
    practise(chat_model, tasks_file, tmp_path, False, lambda *_: next(rewards), max_steps=24)
    values = [line.get("train/reward") for line in metrics(tmp_path) if "train/loss" in line]
    assert {*values} <= {1.0, None} and None in values


def test_a_reward_that_fails_on_one_rank_ends_all(chat_model, tasks_file, tmp_path):
    words = flags(chat_model, tasks_file, tmp_path, reward="tests/reward_script.py:first_only")
    done = launch(*EAGER, "recipes/chat_rl.py", *words, processes=2, fails=True)
    assert done.stderr.count("chat_rl.py: the reward raises ZeroDivisionError") == 2


def test_pass_at_k_is_the_share_of_all_choices_of_k_answers(chat_model, tasks_file, tmp_path):
    """Against the definition: all choices of k of the answers, counted."""
    tokenizer = load_tokenizer(chat_model)
    tasks = tasks_of(tasks_file, tokenizer)
    seen = []

    def reward(row, text):
        seen.append((0, 0, 1, 0, None)[len(seen) % 5])  # None is left out
        return seen[-1]

    task = Solved(tasks, reward, tokenizer, 3, samples=4)
    reset_accelerate()
    model = from_pretrained(chat_model)
    results = task(Accelerator(), model)
    groups = [[x for x in seen[i : i + 4] if x is not None] for i in range(0, len(seen), 4)]
    for k in (1, 2, 4):
        shares = [np.mean(list(map(any, combinations(own, k)))) for own in groups if own[k - 1 :]]
        assert results[f"solved/pass@{k}"] == pytest.approx(np.mean(shares))
    assert results["solved/reward"] == pytest.approx(results["solved/pass@1"])
    with refused("the reward is None for all answers"):
        Solved(tasks, lambda row, text: None, tokenizer, 3)(Accelerator(), model)
    words = ["--model", chat_model, "--tasks", "rl", "--data", tasks_file, "--samples", "2"]
    words += ["--reward", "tests/reward_script.py:letters", "--limit", "3"]
    run_recipe("evaluate", *map(str, words), "--output", str(tmp_path / "results.json"))
    [entry] = read_json(tmp_path / "results.json").values()
    assert {"solved/reward", "solved/pass@1", "solved/pass@2"} <= entry["results"].keys()


def test_prompts_that_are_too_long_are_left_out(chat_model, tmp_path, capsys):
    rows = [{"prompt": "a" * n, "answer": 0} for n in (1, 1000)]
    path = write_lines(tmp_path / "tasks.jsonl", rows)
    [task] = tasks_of(path, load_tokenizer(chat_model))
    assert task.row == rows[0]
    assert "left out 1 task " in capsys.readouterr().out


def test_equal_rewards_are_said_once(chat_model, tasks_file, tmp_path, capsys):
    practise(chat_model, tasks_file, tmp_path, reward=lambda row, text: 1.0, max_steps=13)
    assert capsys.readouterr().out.count("equal rewards, from which nothing is learnt") == 1


def test_gradients_equal_trl(chat_model, tmp_path):
    """Of hand-made answers of unequal lengths and advantages, with TRL's normalisation of DAPO."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    theirs = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32).eval()
    args = GRPOConfig(
        str(tmp_path),
        loss_type="dapo",
        beta=0.0,
        scale_rewards="none",
        num_generations=4,
        per_device_train_batch_size=8,
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        theirs,
        lambda **_: [0.0],
        args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=load_tokenizer(chat_model),
    )
    generator = torch.Generator().manual_seed(0)
    answers = [torch.randint(257, (n,), generator=generator).tolist() for n in (3, 9, 1, 6) * 2]
    prompts = torch.randint(257, (2, 5), generator=generator).repeat_interleave(4, 0)
    advantages = torch.tensor([0.5, -0.5, 1.0, -1.0, 0.25, 0.0, 0.0, -0.25])
    ids = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, answers)), batch_first=True)
    mask = torch.tensor([[1] * len(a) + [0] * (9 - len(a)) for a in answers])
    inputs = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts)}
    inputs |= {"completion_ids": ids, "completion_mask": mask, "advantages": advantages}
    inputs["num_items_in_batch"] = mask.sum()
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model
    trainer._compute_loss(model, inputs).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    own = from_pretrained(chat_model).eval()
    rows = [
        Row(Question({}, [], p), a, "", 0.0, float(x), True, [0.0] * 9)
        for p, a, x in zip(prompts.tolist(), answers, advantages, strict=True)
    ]
    loader = SimpleNamespace(micro_batch_size=1)
    accelerator = Accelerator()
    run = SimpleNamespace(model=own, accelerator=accelerator, train_loader=loader)
    run.backward = lambda loss, last: loss.backward()
    PolicyGradient([], None, group=4).train(run, rows, float(mask.sum()))
    named = dict(own.named_parameters())
    for name in ("wpe.weight", "ln_f.weight", "h.0.attn.c_attn.bias", "h.1.mlp.c_proj.bias"):
        theirs = expected[f"transformer.{name}"]
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(named[name].grad, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("fall", "low", "high"), [(0, 0, 0.05), (0.2, 0.95, 1)])
def test_a_falling_reward_is_said_and_noise_is_not(fall, low, high):
    """Of runs of 100 updates, judged at a half, at three quarters and at the end."""
    runs = np.random.default_rng(0).normal(0.5, 0.1, (1000, 100)) - np.linspace(0, fall, 100)
    lines = [[{"train/reward": x, "train/reward_stderr": 0.1} for x in row] for row in runs]
    assert low <= np.mean([any(fallen(row[:n]) for n in (50, 75, 100)) for row in lines]) <= high


def test_a_run_whose_reward_falls_says_so_also_after_a_resume(
    chat_model, tasks_file, tmp_path, capsys
):
    left = iter(range(10**4, 0, -1))
    changes = {"reward": lambda row, text: next(left), "max_steps": 28, "resume_from": "latest"}
    for hours in (1e-9, None):
        practise(chat_model, tasks_file, tmp_path, max_hours=hours, **changes)
    lines = [line for line in capsys.readouterr().out.splitlines() if "reward has fallen" in line]
    assert [line[:7] for line in lines] == ["step 21", "step 28"]
    assert lines[1][9:] in (tmp_path / "README.md").read_text()

"""Preference training: the same numbers as TRL, the reference, resuming, and what does not belong together."""

import math
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    chat_rows,
    contents,
    losses,
    make_text,
    metrics,
    refused,
    run_recipe,
    write_lines,
)
from launching import ROOT, launch, python
from safetensors.torch import load_file

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.data.conversations import prepare_conversations
from gpt2_accel.data.loader import Batch, TrainLoader, open_split
from gpt2_accel.data.shards import COUNTS, TOKEN_ID, TokenStream
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.preferences import Preferences, answer_log_probabilities
from gpt2_accel.runtime import files
from gpt2_accel.runtime.files import digest, lock_folder
from gpt2_accel.tokenizer import load_tokenizer

RECIPE = "recipes/chat_dpo.py"
SHAPES = [(1, 1), (1, 4), (2, 2)]  # processes, pairs per backward pass
BETA = 0.5


def pair_rows(number):
    """Returns pairs whose answers have different lengths."""
    rows = []
    for i, (asked, answer) in enumerate(row["messages"] for row in chat_rows(number)):
        worse = make_text(1 + i % 5, i).strip()
        rows.append({"prompt": asked["content"], "chosen": answer["content"], "rejected": worse})
    return rows


@pytest.fixture(scope="module")
def start(chat_model, tmp_path_factory):
    """A chat model with larger random weights than a new one's."""
    torch.manual_seed(1)
    folder, model = tmp_path_factory.mktemp("start") / "model", from_pretrained(chat_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
        model.head_weight[model.config.vocab_size :] = 0
    save_pretrained(model, folder, load_tokenizer(chat_model))
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("file") / "pairs.jsonl", pair_rows(60))


@pytest.fixture(scope="module")
def pairs(start, file, tmp_path_factory):
    """The shards of 60 pairs, of which some are for validation."""
    folder = tmp_path_factory.mktemp("pairs") / "pairs"
    prepare_conversations(
        [str(file)], chat_tokenizer(start), folder, pairs=True, sequence_length=128,
        shorten=True, source="made up", model=str(start),
    )  # fmt: skip
    return folder


def settings(start, folder, **changes):
    """Returns the flags of a short run."""
    values = {
        "model": start,
        "output_dir": folder,
        "batch_size": 4,
        "micro_batch_size": 4,
        "max_steps": 8,
        "log_every": 1,
        "eval_every": 4,
        "sample_every": 0,
        "save_every": 2,
        "keep_best": False,
        "learning_rate": 1e-3,
        "beta": BETA,
        **changes,
    }
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


# The numbers of TRL

PARITY = {"max_steps": 20, "eval_every": 0, "save_every": 0, "learning_rate": 3e-4}
PARITY |= {"lr_schedule": "constant", "warmup_steps": 0, "beta2": 0.95, "max_grad_norm": 1.0}
# ChatML whose last turn has no line break after it, which TRL would train on.
TEMPLATE = """\
{%- for message in messages -%}
    {{- '\\n' if not loop.first -}}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\\n<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def by_trl(trl, start, rows, loss_type, folder):
    """Trains 20 updates of 4 pairs by TRL, in the order of `rows`; returns the figures of each update."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class Recording(trl.DPOTrainer):
        found: ClassVar[list[float]] = []

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.found.append(loss.item())
            return loss

    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.chat_template = TEMPLATE
    model, reference = (
        AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32) for _ in range(2)
    )
    options = trl.DPOConfig(
        str(folder), beta=BETA, loss_type=[loss_type], learning_rate=3e-4,
        lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        max_steps=20, per_device_train_batch_size=4, max_length=None, bf16=False,
        gradient_checkpointing=False, logging_steps=1, report_to=[], use_cpu=True,
        train_sampling_strategy="sequential", save_strategy="no",
    )  # fmt: skip
    messages = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{
                name: [{"role": "assistant", "content": row[name]}]
                for name in ("chosen", "rejected")
            },
        }
        for row in rows
    ]
    trainer = Recording(
        model, reference, options, train_dataset=Dataset.from_list(messages), processing_class=tokenizer
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "grad_norm" in line]
    return [
        {
            "loss": loss,
            "grad_norm": float(line["grad_norm"]),
            "reward_chosen": line["rewards/chosen"],
            "reward_rejected": line["rewards/rejected"],
            "margin": line["rewards/margins"],
            "reward_accuracy": line["rewards/accuracies"],
        }
        for loss, line in zip(Recording.found, lines, strict=True)
    ]


def in_order(pairs, rows):
    """Returns the rows of the first 20 updates of 4 pairs, in the order of training."""
    loader = TrainLoader(
        open_split(pairs, "train"), micro_batch_size=4, seed=1337,
        sequence_length=TokenStream(pairs, "train").sequence_length,
    )  # fmt: skip
    tokenizer, by_text = load_tokenizer(pairs / "tokenizer"), {}
    for row in rows:
        by_text[row["prompt"], row["chosen"]] = row
    found = []
    for step in range(20):
        for batch in loader.update(4 * step, 4):
            for ids in batch.input_ids:
                _, asked, answer, *_ = tokenizer.decode(ids).split("<|im_start|>")
                texts = (text.split("\n", 1)[1].split("<|im_end|>")[0] for text in (asked, answer))
                found.append(by_text[tuple(texts)])
    return found


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm"])
def test_twenty_updates_are_those_of_trl(pairs, start, loss_type, tmp_path):
    trl = pytest.importorskip("trl")
    expected = by_trl(trl, start, in_order(pairs, pair_rows(60)), loss_type, tmp_path / "trl")
    assert len(expected) == 20 and expected[0]["loss"] == pytest.approx(math.log(2))
    assert min(figures["loss"] for figures in expected) < 0.65
    for processes, size in SHAPES:
        folder = tmp_path / f"{processes}-{size}"
        changes = {"data_dir": pairs, "micro_batch_size": size, "loss_type": loss_type, **PARITY}
        flags = settings(start, folder, **changes)
        if processes == 1:
            run_recipe("chat_dpo", *flags)
        else:
            launch(RECIPE, *flags, processes=processes)
        lines = [line for line in metrics(folder) if "train/loss" in line]
        assert len(lines) == 20
        for step, (line, theirs) in enumerate(zip(lines, expected, strict=True)):
            for name, value in theirs.items():
                if step == 0 and name == "reward_accuracy":  # equal rewards, up to rounding
                    continue
                found = line[f"train/{name}"]
                assert found == pytest.approx(value, rel=1e-5, abs=1e-5), (step, name)


def log_probabilities(model, ids, counted):
    """Returns the sum of the log-probabilities of the counted tokens, by transformers."""
    with torch.no_grad():
        logs = model(torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
    picked = logs[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:])]
    return picked[torch.from_numpy(counted[1:])].sum().item()


def test_the_validation_loss_is_that_of_the_held_out_pairs(pairs, start, tmp_path):
    from transformers import AutoModelForCausalLM

    run_recipe("chat_dpo", *settings(start, tmp_path / "run", data_dir=pairs))
    models = [AutoModelForCausalLM.from_pretrained(d).eval() for d in (tmp_path / "run", start)]
    stream = TokenStream(pairs, "val")
    margins = []
    for window in stream.read(0, stream.tokens).reshape(-1, 2, stream.sequence_length // 2):
        rewards = []
        for tokens in window:
            own, theirs = (
                log_probabilities(m, tokens & int(TOKEN_ID), tokens & int(COUNTS) != 0)
                for m in models
            )
            rewards.append(BETA * (own - theirs))
        margins.append(rewards[0] - rewards[1])
    margins = torch.tensor(margins)
    last = metrics(tmp_path / "run")[-1]
    assert last["val/loss"] == pytest.approx(-F.logsigmoid(margins).mean().item(), rel=1e-4)
    assert last["val/margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert last["val/reward_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert "val/perplexity" not in last and "val/bits_per_byte" not in last


def test_a_mixture_of_experts_adds_its_balancing_loss_once():
    nats, added = torch.rand(4, 5), torch.tensor(0.3, requires_grad=True)
    targets = torch.zeros(2, 10, dtype=torch.int64)
    targets[:, [4, 9]] = -100
    nats[:, -1] = 0
    batch = Batch(torch.zeros_like(targets), targets)
    logs, tokens, found = answer_log_probabilities(lambda *_, **__: (nats + added, None), batch)
    assert torch.allclose(logs, -nats.sum(1).view(2, 2)) and tokens.tolist() == [[4, 4]] * 2
    found.backward()
    assert found.item() == pytest.approx(0.3) and added.grad.item() == pytest.approx(1)


# The reference


def reference_of(data):
    """Returns the stored log-probabilities."""
    (path,) = Path(data).glob("reference-*")
    return load_file(path)


def test_the_reference_has_no_dropout_and_is_computed_once(file, start, tmp_path, monkeypatch):
    tables = []
    for name, dropout in (("a", 0.0), ("b", 0.5)):
        flags = settings(start, tmp_path / name, data=file, dropout=dropout, max_steps=2)
        run_recipe("chat_dpo", *flags)
        (data,) = (tmp_path / name).glob("data-*")
        tables.append(reference_of(data))
    for split, count in (("train", 52), ("val", 7)):
        assert tables[0][split].shape == (count, 2) and (tables[0][split] < -1).all()
        assert torch.equal(tables[0][split], tables[1][split])
    first = metrics(tmp_path / "a")[0]
    assert first["train/loss"] == pytest.approx(math.log(2)) and abs(first["train/margin"]) < 1e-5
    # Another run on the same pairs reads it.
    monkeypatch.setattr(Preferences, "compute", lambda *_: pytest.fail("computed again"))
    run_recipe("chat_dpo", *settings(start, tmp_path / "c", data_dir=data, beta=0.1, max_steps=2))


def test_a_resume_never_takes_the_checkpoint_as_reference(pairs, start, tmp_path):
    data = tmp_path / "pairs"
    shutil.copytree(pairs, data, ignore=shutil.ignore_patterns("reference-*"))
    flags = {"data_dir": data, "max_steps": 8, "eval_every": 2}
    run_recipe("chat_dpo", *settings(start, tmp_path / "whole", **flags))
    run_recipe("chat_dpo", *settings(start, tmp_path / "run", **flags, max_hours=1e-9))
    assert not (tmp_path / "run/model.safetensors").exists()
    run_recipe("chat_dpo", *settings(start, tmp_path / "run", **flags))
    assert losses(metrics(tmp_path / "run")) == losses(metrics(tmp_path / "whole"))
    (path,) = data.glob("reference-*")
    run_recipe("chat_dpo", *settings(start, tmp_path / "short", **{**flags, "max_steps": 4}))
    path.unlink()
    with refused("log-probabilities of the model that the run began from, is missing: resume with"):
        run_recipe("chat_dpo", *settings(start, tmp_path / "short", **flags))
    assert not list(data.glob("reference-*"))


def test_a_kill_at_each_stage_loses_nothing(file, start, tmp_path):
    def flags(folder):
        return settings(start, tmp_path / folder, data=file, max_steps=6, save_every=2)

    python(RECIPE, *flags("whole"))
    harness = ROOT / "tests/reliability/kill_at_operation.py"
    for number, place in [(2, ".partial"), (7, ".partial"), (1, "reference-"), (2, "reference-"), (2, "checkpoint-2"), (9, "checkpoint-4")]:  # fmt: skip
        done = python(harness, number, place, RECIPE, *flags("run"), fails=True)
        assert done.returncode == -9, (number, place, done.stderr)
    python(RECIPE, *flags("run"))
    assert losses(metrics(tmp_path / "run")) == losses(metrics(tmp_path / "whole"))
    assert digest(tmp_path / "run/model.safetensors") == digest(tmp_path / "whole/model.safetensors")  # fmt: skip
    (data,) = (tmp_path / "run").glob("data-*")
    assert not list((tmp_path / "run").glob(".*.partial")) and len(reference_of(data)) == 2


# What does not belong together


def test_other_data_models_and_settings_are_refused_in_the_same_folder(file, start, tmp_path):
    flags = settings(start, tmp_path / "run", data=file, max_steps=4)
    run_recipe("chat_dpo", *flags)
    before = contents(tmp_path / "run")
    changed = write_lines(tmp_path / "changed.jsonl", pair_rows(50))
    with refused("has changed since the run in"):
        run_recipe("chat_dpo", *flags, "--data", changed)
    other, model = tmp_path / "other", from_pretrained(start)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    save_pretrained(model, other, load_tokenizer(start))
    for more in ([], ["--max_steps", 8]):
        with refused("began from a model with other weights: give that by --model, or choose"):
            run_recipe("chat_dpo", *flags, "--model", other, *more)
    with refused("is complete: .* beta 0.5 -> 0.1"):
        run_recipe("chat_dpo", *flags, "--beta", 0.1)
    assert contents(tmp_path / "run") == before
    with refused("holds a model but no checkpoint to continue"):
        run_recipe("chat_dpo", *flags, "--output_dir", other)
    assert from_pretrained(other) is not None


def test_pairs_do_not_go_into_a_run_of_sft_and_conversations_are_no_pairs(
    file, pairs, start, tmp_path
):
    chats = write_lines(tmp_path / "chats.jsonl", chat_rows(24))
    sft = tmp_path / "sft"
    flags = ["--max_steps", 2, "--sample_every", 0, "--output_dir", sft]
    run_recipe("chat_sft", "--model", start, "--data", chats, *flags)
    before = contents(sft)
    with refused("has changed since the run in"):
        run_recipe("chat_dpo", *settings(start, sft, data=file))
    with refused("order of the data"):
        run_recipe("chat_dpo", *settings(start, sft, data_dir=pairs))
    assert contents(sft) == before
    (data,) = sft.glob("data-*")
    with refused("holds no pairs of answers: prepare some by"):
        run_recipe("chat_dpo", *settings(start, tmp_path / "run", data_dir=data))
    with refused("holds pairs of a better and a worse answer"):
        run_recipe("chat_sft", "--data_dir", pairs, "--output_dir", tmp_path / "run")
    with refused("holds pairs of a better and a worse answer"):
        run_recipe("evaluate", "--model", start, "--data_dir", pairs)
    assert not (tmp_path / "run").exists()


def test_two_at_once_are_one(pairs, start, tmp_path, monkeypatch):
    monkeypatch.setattr("gpt2_accel.lifecycle.GRACE_OF_HOLDER", 0.1)
    with lock_folder(tmp_path / "run"), refused("another process"):
        run_recipe("chat_dpo", *settings(start, tmp_path / "run", data_dir=pairs))


def test_what_is_typed_wrong(file, pairs, start, chat_base, tmp_path):
    flags = settings(start, tmp_path / "run", data_dir=pairs)
    with refused("batch_size 4 is .* tokens per update, total_batch_size 1024: leave one out"):
        run_recipe("chat_dpo", *flags, "--total_batch_size", 1024)
    with refused("loss_type must be one of sigmoid, sigmoid_norm, got 'ipo'"):
        run_recipe("chat_dpo", *flags, "--loss_type", "ipo")
    for value in (0, -1):
        with refused("beta must be above 0"):
            run_recipe("chat_dpo", *flags, "--beta", value)
    data = settings(start, tmp_path / "run", data=file)
    with refused("129 tokens are more than the 128 positions"):
        run_recipe("chat_dpo", *data, "--max_length", 129)
    with refused("has no chat template"):
        run_recipe("chat_dpo", *data, "--model", chat_base)
    with refused("gives? conversations: leave one out|both give"):
        run_recipe("chat_dpo", *data, "--data_dir", pairs)
    assert not list((tmp_path / "run").glob("data-*"))


def test_a_full_disk_leaves_no_reference(pairs, start, tmp_path, monkeypatch):
    data = tmp_path / "pairs"
    shutil.copytree(pairs, data, ignore=shutil.ignore_patterns("reference-*"))
    flags = settings(start, tmp_path / "run", data_dir=data, max_steps=2)
    honest = files.os.fsync

    def full(number):
        if "reference" in str(Path(f"/proc/self/fd/{number}").resolve()):
            raise OSError(28, "No space left on device")
        return honest(number)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with refused("No space left"):
            run_recipe("chat_dpo", *flags)
    assert not list(data.glob("*reference-*"))
    run_recipe("chat_dpo", *flags)
    assert len(losses(metrics(tmp_path / "run"))) == 2


def test_too_long_pairs_are_counted_and_the_dry_run_plans_for_pairs(file, start, tmp_path, capsys):
    rows = [*pair_rows(40), {"prompt": "x" * 200, "chosen": "a", "rejected": "b"}]
    long = write_lines(tmp_path / "long.jsonl", rows)
    flags = settings(start, tmp_path / "run", data=long, max_steps=2)
    run_recipe("chat_dpo", *flags, "--dry_run", "here")
    shown = capsys.readouterr().out
    assert "left out: 1 pair of more tokens than a window" in shown
    assert "2 updates of 4 x 128 tokens, " in shown and "micro-batch 4 x 128" in shown
    run_recipe("chat_dpo", *flags)
    assert len(losses(metrics(tmp_path / "run"))) == 2

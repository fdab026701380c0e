"""Preference training: the numbers of TRL, the reference model, resuming, refusals."""

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    contents,
    long,
    losses,
    metrics,
    pair_rows,
    refused,
    run_recipe,
    weights_digest,
    write_lines,
)
from launching import launch, sharded
from safetensors.torch import load_file

from gpt2_accel import from_pretrained, preferences, save_pretrained
from gpt2_accel.data.conversations import prepare_conversations
from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.shards import COUNTS, TOKEN_ID, TokenStream
from gpt2_accel.data.source import open_data
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.preferences import Preferences, answer_log_probabilities, read_reference
from gpt2_accel.tokenizer import load_tokenizer

RECIPE = "recipes/chat_dpo.py"
BETA = 0.5


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("file") / "pairs.jsonl", pair_rows(60))


@pytest.fixture(scope="module")
def pairs(tuned, file, tmp_path_factory):
    """The shards of 60 pairs, of which some are for validation."""
    folder = tmp_path_factory.mktemp("pairs") / "pairs"
    prepare_conversations(
        [str(file)], chat_tokenizer(tuned), folder, pairs=True, sequence_length=128,
        shorten=True, source="made up", model=str(tuned),
    )  # fmt: skip
    return folder


def settings(tuned, folder, **changes):
    """Returns the flags of a short run."""
    values = {
        "model": tuned,
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
    } | changes
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


# The numbers of TRL

UPDATES = 3  # a mistake shows in the first ones; later ones add up rounding
PARITY = {"max_steps": UPDATES, "eval_every": 0, "save_every": 0, "learning_rate": 3e-4}
PARITY |= {"lr_schedule": "constant", "warmup_steps": 0, "beta2": 0.95, "max_grad_norm": 1.0}
# Figures and their names in TRL.
NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "margin": "rewards/margins",
}
FIGURES = {f"{split}/{name}" for split in ("train", "val") for name in NAMES}
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
# An answer's log-probability is a sum of about 12 terms of 6 nats. A reward is BETA times the
# difference of two. In fp32 the last bit of a sum above 64 is 2^-17, and four of them may be wrong;
# in bf16 each term is rounded to 8 bits, up or down.
FP32 = BETA * 2 * 4 * 2**-17
BF16 = BETA * (2 * 12) ** 0.5 * 6 * 2**-9
# ChatML whose last turn has no line break after it, which TRL would train on.
TEMPLATE = """\
{%- for message in messages -%}
    {{- '\\n' if not loop.first -}}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\\n<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def by_trl(trl, tuned, rows, losses, folder):
    """Trains updates of 4 pairs by TRL, in the order of `rows`; returns their figures."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tuned)
    tokenizer.chat_template = TEMPLATE
    model, reference = (
        AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32) for _ in range(2)
    )
    options = trl.DPOConfig(
        str(folder), beta=BETA, loss_type=[*losses], loss_weights=[*losses.values()],
        learning_rate=3e-4, lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0,
        max_grad_norm=1.0, max_steps=UPDATES, per_device_train_batch_size=4, max_length=None,
        bf16=False, gradient_checkpointing=False, logging_steps=1, report_to=[], use_cpu=True,
        train_sampling_strategy="sequential", save_strategy="no",
    )  # fmt: skip
    messages = [
        {name: [{"role": role, "content": row[name]}] for name, role in ROLES.items()}
        for row in rows
    ]
    trainer = trl.DPOTrainer(
        model, reference, options, train_dataset=Dataset.from_list(messages),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "grad_norm" in line]
    return [
        {f"train/{ours}": float(line[theirs]) for ours, theirs in NAMES.items()} for line in lines
    ]


def in_order(pairs, rows):
    """Returns the rows of the first updates of 4 pairs, in the order of training."""
    loader = TrainLoader(
        open_data(pairs).split("train"), micro_batch_size=4, seed=1337,
        sequence_length=TokenStream(pairs, "train").sequence_length,
    )  # fmt: skip
    tokenizer = load_tokenizer(pairs / "tokenizer")
    by_prompt = {row["prompt"]: row for row in rows}
    ordered = []
    for step in range(UPDATES):
        for batch in loader.update(4 * step, 4):
            for text in tokenizer.batch_decode(batch.input_ids):
                prompt = re.search(r"user\n(.*?)<\|im_end\|>", text)[1]
                ordered.append(by_prompt[prompt])
    return ordered


def assert_close(lines, expected, tolerance):
    """Compares the figures of each update, and those of the validation pairs after it."""
    # The reference is computed in the precision of the training.
    assert lines[0]["train/margin"] == pytest.approx(0, abs=FP32)
    for step, (line, other) in enumerate(zip(lines, expected, strict=True)):
        for name in FIGURES & other.keys():
            value = pytest.approx(other[name], rel=tolerance, abs=tolerance)
            assert line[name] == value, (step, name)


@pytest.mark.parametrize(
    "losses",
    [
        {"sigmoid": 1.0, "sft": 0.2},
        pytest.param({"sigmoid": 1.0}, marks=long),
        pytest.param({"sigmoid_norm": 1.0}, marks=long),
    ],
)
def test_the_first_updates_equal_trl(pairs, tuned, losses, tmp_path):
    """TRL has one micro-batch; the second term is a mean over the chosen tokens of all of ours."""
    trl = pytest.importorskip("trl")
    expected = by_trl(trl, tuned, in_order(pairs, pair_rows(60)), losses, tmp_path / "trl")
    for processes, size in ((1, 4), (2, 1)):
        folder = tmp_path / f"{processes}-{size}"
        changes = {"data_dir": pairs, "micro_batch_size": size, "nll": losses.get("sft", 0)}
        changes |= {"loss_type": next(iter(losses))} | PARITY
        launch(RECIPE, *settings(tuned, folder, **changes), processes=processes)
        assert_close(metrics(folder), expected, FP32)


def log_probabilities(model, tokens):
    """Returns the sum of the log-probabilities of the counted tokens, by transformers."""
    ids = torch.from_numpy(tokens & int(TOKEN_ID))
    counted = torch.from_numpy(tokens & int(COUNTS) != 0)
    with torch.no_grad():
        logs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return logs.gather(1, ids[1:, None])[counted[1:]].sum().item()


def test_the_validation_loss_equals_transformers_on_the_held_out_pairs(pairs, tuned, tmp_path):
    from transformers import AutoModelForCausalLM

    run_recipe("chat_dpo", *settings(tuned, tmp_path / "run", data_dir=pairs))
    model, reference = (
        AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (tmp_path / "run", tuned)
    )
    stream = TokenStream(pairs, "val")
    margins = []
    for pair in stream.read(0, stream.tokens).reshape(-1, 2, stream.sequence_length // 2):
        better, worse = (
            log_probabilities(model, tokens) - log_probabilities(reference, tokens)
            for tokens in pair
        )
        margins.append(BETA * (better - worse))
    margins = torch.tensor(margins)
    first = stream.read(0, stream.sequence_length // 2) & int(TOKEN_ID)
    text = re.search(r"user\n(.*?)<\|im_end\|>", load_tokenizer(tuned).decode(first))[1]
    card = (tmp_path / "run/README.md").read_text()
    assert f"held out: user {text} assistant\n  before: " in card
    last = metrics(tmp_path / "run")[-1]
    assert last["val/loss"] == pytest.approx(-F.logsigmoid(margins).mean().item(), rel=1e-4)
    assert last["val/margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert last["val/reward_accuracy"] == pytest.approx((margins > 0).float().mean().item())


# The reference


def reference_of(data):
    """Returns the stored log-probabilities."""
    (path,) = Path(data).glob("reference-*")
    return load_file(path)


def test_the_reference_has_no_dropout_and_is_computed_once(file, tuned, tmp_path, monkeypatch):
    tables = []
    for name, dropout in (("a", 0.0), ("b", 0.5)):
        flags = settings(tuned, tmp_path / name, data=file, dropout=dropout, max_steps=2)
        run_recipe("chat_dpo", *flags)
        [data] = (tmp_path / name).glob("data-*")
        tables.append(reference_of(data))
    for split, count in (("train", 52), ("val", 7)):
        assert tables[0][split].shape == (count, 2)
        assert (tables[0][split] < -1).all()
        assert torch.equal(tables[0][split], tables[1][split])
    # Another run on the same pairs reads it.
    monkeypatch.setattr(Preferences, "compute", lambda *_: pytest.fail("computed again"))
    run_recipe("chat_dpo", *settings(tuned, tmp_path / "c", data_dir=data, beta=0.1, max_steps=2))


def test_a_resume_never_takes_the_checkpoint_as_reference(pairs, tuned, tmp_path):
    data = tmp_path / "pairs"
    shutil.copytree(pairs, data, ignore=shutil.ignore_patterns("reference-*"))
    flags = {"data_dir": data, "eval_every": 2}
    run_recipe("chat_dpo", *settings(tuned, tmp_path / "whole", **flags))
    stopped = settings(tuned, tmp_path / "run", **flags)
    run_recipe("chat_dpo", *stopped, "--max_hours", 1e-9)
    run_recipe("chat_dpo", *stopped)
    assert losses(metrics(tmp_path / "run")) == losses(metrics(tmp_path / "whole"))
    [path] = data.glob("reference-*")
    good = path.read_bytes()
    path.write_bytes(good[:-5] + bytes([good[-5] ^ 1]) + good[-4:])
    with refused("missing or damaged"):
        run_recipe("chat_dpo", *stopped, "--max_steps", 10)
    run_recipe("chat_dpo", *settings(tuned, tmp_path / "new", max_steps=1, **flags))
    assert path.read_bytes() == good  # computed again by a new run
    path.unlink()
    with refused("log-probabilities of the model that the run began from"):
        run_recipe("chat_dpo", *stopped, "--max_steps", 10)
    assert not list(data.glob("reference-*"))


def test_an_adapter_starts_from_the_reference_and_resumes(pairs, tuned, tmp_path):
    pytest.importorskip("peft")
    changes = {"data_dir": pairs, "lora": 4, "lora_dropout": 0.1, "max_steps": 4, "eval_every": 0}
    run_recipe("chat_dpo", *settings(tuned, tmp_path / "whole", **changes))
    changes["resume_from"] = tmp_path / "whole/checkpoint-2"
    run_recipe("chat_dpo", *settings(tuned, tmp_path / "run", **changes))
    lines = metrics(tmp_path / "whole")
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=FP32) != lines[1]["train/loss"]
    assert losses(metrics(tmp_path / "run")) == losses(lines)[2:]
    assert weights_digest(tmp_path / "run") == weights_digest(tmp_path / "whole")


# What does not belong together


def test_other_data_models_and_settings_are_refused_in_the_same_folder(file, tuned, tmp_path):
    flags = settings(tuned, tmp_path / "run", data=file, max_steps=4)
    run_recipe("chat_dpo", *flags)
    before = contents(tmp_path / "run")
    changed = write_lines(tmp_path / "changed.jsonl", pair_rows(50))
    other = tmp_path / "other"
    model = from_pretrained(tuned)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    save_pretrained(model, other, load_tokenizer(tuned))
    for changes, words in [
        (("--data", changed), "has changed since the run"),
        (("--model", other, "--max_steps", 8), "a model with other weights"),
        (("--beta", 0.1), "beta 0.5 -> 0.1"),
    ]:
        with refused(words):
            run_recipe("chat_dpo", *flags, *changes)
    assert contents(tmp_path / "run") == before


# Several processes and precisions


def other_reference(change):
    return lambda path: {name: change(table) for name, table in read_reference(path).items()}


def one_label_later(model, batch, trim):
    batch = batch._replace(targets=batch.targets.roll(1, dims=1))
    return answer_log_probabilities(model, batch, trim)


# Names in gpt2_accel/preferences.py, and what they are by mistake.
MISTAKES = [
    ("F", SimpleNamespace(logsigmoid=lambda margins: F.logsigmoid(-margins))),
    ("read_reference", other_reference(torch.zeros_like)),
    ("read_reference", other_reference(lambda table: table.bfloat16().float())),
    ("answer_log_probabilities", one_label_later),
    ("Preferences", lambda start, **_: Preferences(start, beta=1.1 * BETA)),
]


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("no", FP32), pytest.param("bf16", BF16, marks=long)]
)
def test_a_mistake_shows_in_the_first_updates(
    precision, tolerance, pairs, tuned, tmp_path, monkeypatch
):
    def figures(folder):
        run_recipe("chat_dpo", *settings(tuned, folder, data_dir=pairs, **PARITY))
        return metrics(folder)

    expected = figures(tmp_path / "fp32")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    figures(tmp_path / "right")  # stores the reference
    for number, (name, value) in enumerate(MISTAKES):
        with monkeypatch.context() as patch:
            patch.setattr(preferences, name, value)
            wrong = figures(tmp_path / str(number))
        with pytest.raises(AssertionError):
            assert_close(wrong, expected, tolerance)


@pytest.mark.parametrize("how", ["bf16", pytest.param("fsdp2", marks=long)])
def test_bf16_and_two_sharded_processes_give_the_figures_of_fp32(how, pairs, tuned, tmp_path):
    def flags(name, **changes):
        data = tmp_path / f"{name}-pairs"
        shutil.copytree(pairs, data, ignore=shutil.ignore_patterns("reference-*"))
        changes = PARITY | {"data_dir": data, "batch_size": 16, "eval_every": 1} | changes
        return settings(tuned, tmp_path / name, **changes)

    run_recipe("chat_dpo", *flags("fp32"))
    if how == "bf16":
        launch("--mixed_precision", "bf16", RECIPE, *flags(how))
    else:
        sharded("tests/fsdp_script.py", *flags(how, micro_batch_size=2), RECIPE="chat_dpo")
    tolerance = BF16 if how == "bf16" else FP32
    assert_close(metrics(tmp_path / how), metrics(tmp_path / "fp32"), tolerance)

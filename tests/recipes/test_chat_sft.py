"""Fine-tuning on conversations: from a base model to one that answers, and resuming on the way."""

import shutil

import pytest
import yaml
from conftest import (
    chat_rows,
    load_recipe,
    metrics,
    refused,
    run,
    run_recipe,
    tiny_config,
    write_lines,
)
from launching import launch, python
from tables import table
from transformers import pipeline

from gpt2_accel.runtime.files import read_json_lines

RECIPE = "recipes/chat_sft.py"


@pytest.fixture(scope="module")
def chat_data(chat_base, tmp_path_factory):
    """The shards of 21 conversations, one of them for validation."""
    folder = tmp_path_factory.mktemp("chat_data")
    rows = write_lines(folder / "rows.jsonl", chat_rows(21))
    flags = ("--model", chat_base, "--sequence_length", 128, "--data_dir", folder / "shards")
    run_recipe("prepare_data", "chat", rows, *flags)
    return folder / "shards"


def rate_of(folder):
    """The learning rate in a run's settings."""
    return yaml.safe_load((folder / "config.yaml").read_text())["learning_rate"]


SHORT = (
    "--total_batch_size 512 --micro_batch_size 4 --max_steps 12 --log_every 1 --eval_every 0 "
    "--keep_best false --learning_rate 1e-3 --patience 0 --sample_every 0 --save_every 2"
)


def settings(data, folder, **changes):
    """Returns the flags of a short run with windows of 128 tokens."""
    given = {"data_dir": data, "output_dir": folder} | changes
    return SHORT.split() + [f"--{name}={value}" for name, value in given.items()]


def test_twenty_conversations_become_exact_answers_that_end(chat_data, tmp_path):
    changes = {"max_steps": 200, "save_every": 0, "learning_rate": 4e-3, "log_every": 10}
    changes |= {"sample_every": 200, "sample_tokens": 5}
    run_recipe("chat_sft", *settings(chat_data, tmp_path / "run", **changes))
    chat = pipeline("text-generation", model=str(tmp_path / "run"))
    options = {"do_sample": False, "return_full_text": False}
    right = 0
    for row in chat_rows(21):
        question, answer = row["messages"]
        [reply] = chat([question], **options)
        right += reply["generated_text"] == answer["content"]
    assert right == 20
    sample = read_json_lines(tmp_path / "run/samples.jsonl")[0]
    begin = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    assert sample["text"].startswith(begin)
    assert len(sample["text"]) > len(begin)


@pytest.mark.parametrize(
    ("windows", "processes", "pretrained", "expected"), table("recipes/cases")["chat_sft"]
)
def test_settings_follow_from_the_data(windows, processes, pretrained, expected, monkeypatch):
    recipe = load_recipe("chat_sft")
    train = {"tokens": windows * 512, "documents": 2 * windows}
    splits = {"train": train, "val": {"documents": processes}}
    manifest = {"splits": splits, "sequence_length": 512}
    monkeypatch.setattr("gpt2_accel.data.shards.read_manifest", lambda _: manifest)
    config = recipe.ChatSFT()
    line = recipe.fit_to_data(config, 128, processes, pretrained)
    assert line.endswith(f"to say much: {processes}") == (processes < 5)
    actual = (config.max_steps, config.warmup_steps, config.eval_every)
    assert [config.total_batch_size // 512, *actual] == expected
    assert config.learning_rate == (2e-5 if pretrained else 0.0031)
    config = recipe.ChatSFT(max_steps=7, learning_rate=0.1)
    recipe.fit_to_data(config, 128, processes, pretrained)
    assert config.max_steps == 7
    assert config.learning_rate == 0.1


def test_a_model_trained_here_and_its_descendants_take_a_higher_rate_than_a_pretrained_one(
    chat_data, chat_base, data_dir, tmp_path
):
    base, tuned, again, other = (tmp_path / name for name in ("base", "tuned", "again", "other"))
    run(tiny_config(data_dir, base, max_steps=2, n_positions=128, total_batch_size=512))
    rows = write_lines(tmp_path / "rows.jsonl", chat_rows(21))
    flags = ["--data", rows, "--max_steps", 1, "--sample_every", 0]
    for model, folder in ((base, tuned), (tuned / "best", again), (chat_base, other)):
        run_recipe("chat_sft", *flags, "--model", model, "--output_dir", folder)
    rates = [rate_of(folder) for folder in (tuned, again, other)]
    assert rates == [0.013, 0.013, 2e-5]
    shutil.rmtree(base)  # what `again` comes from is no longer known
    flags[3] = 2  # another update, of a run that keeps its rate
    run_recipe("chat_sft", *flags, "--model", tuned / "best", "--output_dir", again)
    assert rate_of(again) == 0.013
    shutil.rmtree(again)
    run_recipe("chat_sft", *flags, "--model", tuned / "best", "--output_dir", again)
    assert rate_of(again) == 2e-5


def test_one_command_prepares_a_file_and_trains_and_knows_it_the_next_time(chat_base, tmp_path):
    file = write_lines(tmp_path / "my_chats.jsonl", chat_rows(24))
    flags = ["--model", chat_base, "--data", file, "--output_dir", tmp_path / "run"]
    launch(RECIPE, *flags, "--sample_tokens", 4, processes=2)
    values = [line["val/loss"] for line in metrics(tmp_path / "run") if "val/loss" in line]
    assert len(values) == 10
    assert values[-1] < values[0]
    assert (tmp_path / "run/best").is_dir()
    [data] = (tmp_path / "run").glob("data-*")
    before = (data / "manifest.json").stat().st_mtime_ns
    assert "is complete" in python(RECIPE, *flags).stdout
    assert (data / "manifest.json").stat().st_mtime_ns == before


def test_data_of_another_length_and_pairs_are_not_confused(chat_data, chat_base, tmp_path):
    flags = ("--output_dir", tmp_path / "run", "--data_dir")
    with refused("windows of 128 tokens, not 64"):
        run_recipe("chat_sft", *flags, chat_data, "--sequence_length", 64)
    with refused("holds no pairs"):
        run_recipe("chat_dpo", *flags, chat_data, "--model", chat_base)

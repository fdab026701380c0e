"""Runs the recipes as a user does, on less data and for fewer updates."""

import gzip
import shlex
import shutil
import sysconfig

import pytest
import yaml
from conftest import make_text, metrics, refused, run_recipe
from launching import python
from test_commands import started_by

from gpt2_accel.data.source import open_data


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Makes the standard library small, and the working directory a folder of the test's own."""
    folder = tmp_path / "python"
    for i in range(60):
        path = folder / ("tests" if i % 10 == 9 else "pkg") / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{i}(x):\n    return x + {i}\n\n" * 20)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.chdir(tmp_path)


def decay_of(run):
    return yaml.safe_load((run / "config.yaml").read_text())["weight_decay"]


def test_quickstart_prepares_a_file_beside_its_run(tmp_path):
    text = tmp_path / "my.txt.gz"
    text.write_bytes(gzip.compress(make_text(2000, 0).encode()))
    small = "--n_layer 1 --n_head 1 --n_embd 16 --n_positions 32 --total_batch_size 512"
    flags = [*small.split(), "--data", text, "--output_dir", tmp_path / "run", "--vocab_size", 270]
    for steps in (1, 2):  # the second goes on with the same shards
        run_recipe("quickstart", *flags, "--max_steps", steps)
    assert metrics(tmp_path / "run")[-1]["step"] == 2
    [data] = (tmp_path / "run").glob("data-*")
    assert len(open_data(data).tokenizer) == 270
    text.write_bytes(gzip.compress(make_text(2500, 1).encode()))
    with refused("my.txt.gz or the tokenizer has changed since the run"):
        run_recipe("quickstart", *flags, "--max_steps", 3)
    # A text that has grown keeps the run's tokenizer, and the run finds its data by itself.
    run_recipe("quickstart", *flags, "--max_steps", 3, "--ignore_changes")
    run_recipe("quickstart", *small.split(), "--output_dir", tmp_path / "run", "--max_steps", 4)
    assert metrics(tmp_path / "run")[-1]["step"] == 4
    tokenizers = (tmp_path / "run").glob("data-*/tokenizer/tokenizer.json")
    assert len({file.read_text() for file in tokenizers}) == 1


def test_quickstart_trains_a_small_model_and_prints_commands_that_run(library, tmp_path, capsys):
    folder = tmp_path / "my $(run)"
    flags = "--max_steps 30 --vocab_size 300 --eval_every 15 --sample_every 30 --sample_tokens 20"
    flags = flags.split() + ["--n_layer", 2, "--n_embd", 64]
    run_recipe("quickstart", *flags, "--output_dir", folder)
    output = capsys.readouterr().out
    first = metrics(folder)
    assert first[-1]["val/loss"] < 2  # a uniform guess is at ln(300), 5.7
    assert decay_of(folder) == 1.6  # the value for a small text that is read often
    went = output.splitlines()[-6]
    assert f"train/loss {first[0]['train/loss']:.4f} → " in went
    assert f"best val/bits_per_byte {first[-1]['val/bits_per_byte']:.4f} at update 30" in went
    assert "xz -9 needs 0." in went
    for command, words in zip(output.splitlines()[-3:], ("def ", ".html", "val/loss"), strict=True):
        words_of = started_by(shlex.split(command)[1:], tmp_path)
        assert words in python(*words_of[1:], cwd=tmp_path).stdout

    # Training continues from that model, with its tokenizer, and keeps the decay that is given.
    shutil.rmtree("data")
    flags += ["--output_dir", tmp_path / "continued", "--max_steps"]
    run_recipe("quickstart", *flags, 1, "--weight_decay", 0.3, "--init_from", folder)
    assert metrics(tmp_path / "continued")[0]["train/loss"] < first[0]["train/loss"] - 1
    run_recipe("quickstart", *flags, 2)
    assert decay_of(tmp_path / "continued") == 0.3


def test_shakespeare_char_has_settings_for_a_cpu(tmp_path):
    text, output = tmp_path / "input.txt", tmp_path / "run"
    text.write_text(make_text(3000, 0))
    flags = ("--cpu_settings", "--input", text, "--data_dir", tmp_path / "data")
    run_recipe("shakespeare_char", *flags, "--output_dir", output, "--max_steps", 1)
    settings = yaml.safe_load((output / "config.yaml").read_text())
    assert settings["n_layer"] == 4
    assert settings["n_embd"] == 128
    assert settings["max_steps"] == 1
    options = "--num_samples 1 --dtype bfloat16 --stop a e t --max_new_tokens 40"
    done = python("recipes/sample.py", "--model", output, "--prompt", "the ", *options.split())
    assert done.stdout.startswith("the ")
    assert not set(done.stdout[4:]) & set("aet")

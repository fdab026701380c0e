"""Runs the recipes as a user does, on less data and for fewer updates."""

import math
import os
import shlex
import shutil
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import yaml
from conftest import load_recipe, make_text, metrics, run_recipe
from launching import launch, python
from transformers import AutoModelForCausalLM, pipeline

from gpt2_accel.checkpoint.find import list_checkpoints
from gpt2_accel.data.shards import read_manifest


def test_quickstart_trains_a_small_model_that_pipeline_loads(tmp_path, monkeypatch, capsys):
    library = tmp_path / "python"
    for i in range(60):
        path = library / ("tests" if i % 10 == 9 else "pkg") / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{i}(x):\n    return x + {i}\n\n" * 20)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    output = tmp_path / "my $(run)"
    monkeypatch.chdir(tmp_path)
    flags = (
        f"--output_dir '{output}' --max_steps 30 --vocab_size 300 "
        "--eval_every 15 --sample_every 30 --sample_tokens 20 --n_layer 2 --n_embd 64"
    )
    run_recipe("quickstart", *shlex.split(flags))
    said = capsys.readouterr().out
    assert "val/bits_per_byte" in said and "sample" in said
    history = metrics(output)
    assert history[-1]["val/loss"] < 2  # a uniform guess is at ln(300), 5.7
    settings = yaml.safe_load((output / "config.yaml").read_text())
    assert settings["weight_decay"] == 1.6  # a little text, read often
    assert "weight decay 1.6 in place of 0.3: " in said

    [generated] = pipeline("text-generation", model=str(output))("def ")
    assert generated["generated_text"].startswith("def ") and len(generated["generated_text"]) > 10

    # Training continues from that model, with its tokenizer.
    shutil.rmtree("data")
    flags = flags.replace(str(output), f"{output}2")
    run_recipe("quickstart", *shlex.split(flags), "--init_from", output)
    more = metrics(f"{output}2")
    assert more[0]["train/loss"] < history[0]["train/loss"] - 1
    assert more[-1]["val/loss"] < history[-1]["val/loss"]
    settings = yaml.safe_load(Path(f"{output}2/config.yaml").read_text())
    assert settings["weight_decay"] == 0.3
    run_recipe("quickstart", *shlex.split(flags.replace("--max_steps 30", "--epochs 9")))
    settings = yaml.safe_load(Path(f"{output}2/config.yaml").read_text())
    assert settings["weight_decay"] == 0.3  # a run keeps its own
    assert settings["epochs"] == 9 and "max_steps" not in settings
    recipe = load_recipe("quickstart")
    config = recipe.Quickstart(vocab_size=300, n_embd=64, output_dir="none")
    branch = replace(config, resume_from=str(list_checkpoints(f"{output}2")[-1]))
    assert recipe.decay_for(branch) == 0.3  # that of the run that it names
    tokens = read_manifest(config.data_dir)["splits"]["train"]["tokens"]
    size = next(n for n in range(1000, 2000) if 0 < 4 * tokens % n < n / 2)
    config = replace(config, total_batch_size=size)
    assert recipe.decay_for(replace(config, epochs=4.0)) == 1.6
    assert recipe.decay_for(replace(config, epochs=3.9)) == 0.3
    [generated] = pipeline("text-generation", model=f"{output}2")("def ")
    assert generated["generated_text"].startswith("def ")
    capsys.readouterr()

    # The printed commands work.
    commands = [line.strip() for line in said.splitlines() if line.startswith("  ")][-2:]
    for command in commands:
        interpreter, *arguments = shlex.split(command)
        assert os.path.samefile(interpreter, sys.executable)
        if arguments[0] == "-c":
            (tmp_path / "command.py").write_text(arguments[1])
            arguments = [tmp_path / "command.py"]
        done = python(*arguments, cwd=Path.cwd())
        assert "def " in done.stdout


def nats_per_character(text):
    """Returns the unigram entropy of the text's words, in nats per character."""
    words = text.split(" ")
    return sum(math.log(len(words) / words.count(word)) for word in words) / len(text)


def test_shakespeare_fast_learns_the_word_frequencies(tmp_path):
    text = tmp_path / "input.txt"
    text.write_text(make_text(3000, 0))
    flags = ("--input", text, "--data_dir", tmp_path / "data", "--output_dir", tmp_path / "run")
    shorter = ("--max_steps", 60, "--eval_every", 60, "--sample_every", 60)
    launch("recipes/shakespeare_fast.py", *flags, *shorter)
    last = metrics(tmp_path / "run")[-1]
    assert last["val/loss"] < 1.3 * nats_per_character(text.read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path / "run")


def test_shakespeare_char_trains_and_samples(tmp_path):
    text = tmp_path / "input.txt"
    text.write_text(make_text(3000, 0))
    output = tmp_path / "run"
    flags = ["--input", str(text), "--cpu_settings", "--data_dir", str(tmp_path / "data")]
    flags += ["--output_dir", str(output), "--max_steps", "20", "--warmup_steps", "5"]
    launch("recipes/shakespeare_char.py", *flags)
    settings = yaml.safe_load((output / "config.yaml").read_text())
    assert (settings["n_layer"], settings["n_embd"], settings["max_steps"]) == (4, 128, 20)

    arguments = ["recipes/sample.py", "--model", str(output), "--prompt", "the "]
    first, again = python(*arguments), python(*arguments)
    assert first.stdout == again.stdout and first.stdout.count("the ") >= 3
    options = "--num_samples 1 --dtype bfloat16 --stop sat dog"
    one = python(*arguments, *options.split())  # a single sample is streamed
    assert one.stdout.startswith("the ") and "sat" not in one.stdout

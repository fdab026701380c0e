"""Runs recipes/evaluate.py as a user does."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from conftest import (
    hellaswag_items,
    long,
    make_text,
    metrics,
    read_json,
    refused,
    run,
    run_recipe,
    status,
    write_lines,
)
from launching import launch

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.evals import validation
from gpt2_accel.evals.formulas import INTERVALS
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def model(trained, tmp_path_factory):
    """A run's folder, whose model card and evaluations change."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("evaluate") / "run", symlinks=True)


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """A folder of local files: HellaSwag, a page of WikiText and a text."""
    folder = tmp_path_factory.mktemp("items")
    lines = hellaswag_items(30)
    for item in lines:  # texts that lm-eval does not change
        item["ctx_a"] = "x"
        item["ctx_b"] = item["ctx"].capitalize()
        item["ctx"] = f"Pets: x {item['ctx_b']}"
        item["label"] = str(item["label"])
    write_lines(folder / "hellaswag.jsonl", lines)
    write_lines(folder / "wikitext.jsonl", [{"page": make_text(60, 1).strip()}])
    (folder / "text.txt").write_text(make_text(60, 1))
    return folder


def flags_of(model, items) -> list[str]:
    data = [f"hellaswag={items / 'hellaswag.jsonl'}", f"text={items / 'text.txt'}"]
    flags = ["--model", model, "--tasks", "hellaswag", "text", "--data", *data]
    return list(map(str, flags))


def test_all_tasks_give_the_same_results_on_one_and_two_processes(
    model, items, data_dir, tmp_path, capsys
):
    flags = flags_of(model, items) + ["--data_dir", str(data_dir)]
    flags[3:3] = ["train,val"]
    run_recipe("evaluate", *flags)
    output = capsys.readouterr().out
    [[name, one]] = read_json(model / "evaluation.json").items()
    assert name.startswith(f"{model} (step 250, weights ")
    tasks = {key.partition("/")[0] for key in one["results"]}
    assert tasks == {"hellaswag", "text", "train", "val"}
    assert f"{one['results']['hellaswag/acc']:.4f} (0." in output
    assert INTERVALS in output
    logged = metrics(model)[-1]
    assert one["results"]["val/loss"] == pytest.approx(logged["val/loss"], abs=1e-5)

    launch("recipes/evaluate.py", *flags, "--output", str(tmp_path / "two.json"), processes=2)
    [two] = read_json(tmp_path / "two.json").values()
    assert two["results"] == pytest.approx(one["results"], rel=1e-6)


def test_a_run_is_evaluated_on_its_own_data_where_that_is_there(model, tmp_path, capsys):
    output = tmp_path / "own.json"
    checkpoint = max(model.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    run_recipe("evaluate", "--model", model, checkpoint, "--output", output)
    logged = pytest.approx(metrics(model)[-1]["val/loss"], abs=1e-5)
    assert {entry["results"]["val/loss"] == logged for entry in read_json(output).values()} == {
        True
    }
    moved = shutil.copytree(model, tmp_path / "moved")
    settings = yaml.safe_load((moved / "config.yaml").read_text())
    (moved / "config.yaml").write_text(yaml.safe_dump(settings | {"data_dir": "nowhere"}))
    for models in ([moved], [model, moved]):
        with refused("give --data hellaswag=FILE"):
            run_recipe("evaluate", "--model", *models)


def test_evaluations_are_merged_by_weights(model, items, tmp_path):
    copied, output = tmp_path / "run", tmp_path / "record.json"
    shutil.copytree(model, copied)

    def record(task, *flags):
        data = items / ("text.txt" if task == "text" else "hellaswag.jsonl")
        flags = ("--tasks", task, "--data", data, *flags)
        run_recipe("evaluate", "--model", copied, "--output", output, *flags)
        return read_json(output)

    [first] = record("text").values()
    assert first["step"] == 250
    [second] = record("hellaswag", "--limit", "10").values()
    assert second["results"].items() > first["results"].items()
    [again] = record("hellaswag").values()  # replaces the limited evaluation
    assert again["results"].keys() == second["results"].keys()
    assert again != second

    plain = from_pretrained(copied)
    plain.wte.weight.data[0] += 1
    save_pretrained(plain, copied)
    (_, other), (changed, entry) = record("text").items()
    assert other == again
    assert f"weights {entry['weights'][:12]}" in changed
    assert {metric.partition("/")[0] for metric in entry["results"]} == {"text"}


@long
@pytest.mark.skipif(not find_spec("lm_eval"), reason="needs lm-eval")
def test_results_equal_those_of_the_harness_by_its_own_command(items, tmp_path):
    """The harness opens a Qwen3 in transformers, and reads copies of its tasks with local items."""
    import lm_eval.tasks

    model, output = tmp_path / "model", tmp_path / "out.json"
    save_pretrained(Qwen3Config(257, 64, 2, 2, 1, 16, 32, 96).build(), model, byte_tokenizer())
    run_recipe("evaluate", *flags_of(model, items), "--output", output)
    [ours] = read_json(output).values()
    built_in = Path(lm_eval.tasks.__file__).parent
    for name, split in (("hellaswag", "validation"), ("wikitext", "test")):
        task = {
            "include": str(built_in / name / f"{name}.yaml"),
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(items / f"{name}.jsonl")}},
            "training_split": None,
            "validation_split": split if split == "validation" else None,
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    words = f"--model hf --model_args pretrained={model},dtype=float32 --device cpu"
    words += f" --include_path {tmp_path} --tasks local_hellaswag,local_wikitext"
    words += f" --output_path {tmp_path / 'harness'}"
    command = [sys.executable, "-m", "lm_eval", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("harness/**/results_*.json")
    theirs = read_json(path)["results"]
    for mine, name in {"acc": "acc", "acc_norm_per_char": "acc_norm"}.items():
        for error in ("", "_stderr"):
            expected = theirs["local_hellaswag"][f"{name}{error},none"]
            assert ours["results"][f"hellaswag/{mine}{error}"] == pytest.approx(expected, abs=1e-12)
    bits = theirs["local_wikitext"]["bits_per_byte,none"]
    assert ours["results"]["text/bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_mistakes_are_refused_before_scoring(tiny, items, tmp_path, monkeypatch):
    scored = []
    scorer = "gpt2_accel.evals.likelihood.log_likelihoods"
    monkeypatch.setattr(scorer, lambda *_: scored.append(0))
    run(tiny("run", max_steps=1))
    flags = ("--model", tmp_path / "run", "--tasks", "text", "--data")
    broken = from_pretrained(tmp_path / "run")
    broken.wte.weight.data[3, 1] = float("nan")
    save_pretrained(broken, tmp_path / "run")
    with refused("transformer.wte.weight of .*run holds NaN"):
        run_recipe("evaluate", *flags, items / "text.txt")
    assert scored == []


def test_results_of_a_checkpoint_are_in_the_runs_folder(tiny, data_dir, tmp_path, monkeypatch):
    """A run that trains meanwhile removes its older checkpoints."""
    run(tiny("run", max_steps=4, save_every=2))
    changed = status(tmp_path / "run") | {"state": "running"}
    (tmp_path / "run/status.json").write_text(json.dumps(changed))
    honest = validation.EvalLoader

    def removing(*args, **options):
        shutil.rmtree(tmp_path / "run/checkpoint-4", ignore_errors=True)
        return honest(*args, **options)

    monkeypatch.setattr(validation, "EvalLoader", removing)
    run_recipe("evaluate", "--model", tmp_path / "run", "--data_dir", data_dir)
    [entry] = read_json(tmp_path / "run/evaluation.json").values()
    assert entry["step"] == 4
    assert len(entry["weights"]) == 64

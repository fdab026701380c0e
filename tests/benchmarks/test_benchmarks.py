"""The benchmarks, and the tables of their results."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
from launching import ROOT, python

CONTESTANTS = {"gpt2_accel", "HF Trainer", "plain loop", "bare loop"}
RESULTS = ROOT / "benchmarks/results"
MACHINE = {"type": "cpu", "device": "a CPU", "threads": 2, "torch": "2", "date": "2026-01-01"}


def benchmark(name, *args):
    return python(f"benchmarks/{name}.py", *args)


def pages(folder):
    """Writes a page and one in a folder below, with outdated text between the markers; returns their paths."""
    (folder / "docs/studies").mkdir(parents=True)
    marks = {
        "performance": ("aims", "trainers", "generation", "gpu"),
        "studies/all": ("parts", "qwen3", "ladder", "scaling", "rates", "optimizers"),
    }
    paths = [folder / f"docs/{name}.md" for name in marks]
    for path, names in zip(paths, marks.values(), strict=True):
        sections = (f"<!-- bench {name} -->old<!-- /bench {name} -->\n" for name in names)
        path.write_text(f"before\n{''.join(sections)}after\n")
    return paths


def fill(folder, results):
    """Fills the pages in `folder`; returns all their text."""
    done = benchmark("table", "--results", results, "--docs", folder / "docs")
    assert done.returncode == 0, done.stderr
    return "".join(path.read_text() for path in sorted((folder / "docs").rglob("*.md")))


def write(folder, name, figures):
    (folder / "cpu").mkdir(exist_ok=True)
    (folder / "cpu" / f"{name}.json").write_text(json.dumps({"machine": MACHINE, **figures}))


def spread(value):
    return {"median": value, "low": value * 0.9, "high": value * 1.1}


def test_training_measures_all_contestants(tmp_path):
    flags = ["--size", "tiny", "--rounds", "1", "--results", str(tmp_path)]
    # A process inherits the peak memory of its parent, so this command is a new process.
    done = subprocess.run(
        [sys.executable, "benchmarks/training.py", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.rglob("training-tiny.json")
    found = json.loads(path.read_text())
    qwen3 = {"gpt2_accel, Qwen3", "HF Trainer, Qwen3"}
    others = {"HF Trainer, Qwen3", "gpt2_accel, four micro-batches"}
    assert found["contestants"].keys() == CONTESTANTS | qwen3 | others
    assert found["speed"].keys() == {"HF Trainer", "plain loop", "gpt2_accel"} | others
    assert all(len(own["seconds"]) == 1 for own in found["contestants"].values())
    assert all(own["tokens_per_second"]["low"] > 0 for own in found["contestants"].values())
    assert all(own["memory"] > 2**26 for own in found["contestants"].values())
    assert 0 < found["mfu"]["median"] < 1


def test_error_of_a_contestant_is_shown(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import training

    alone = dataclasses.replace(training.SIZES["tiny"], groups=(("gpt2_accel",),))
    monkeypatch.setitem(training.SIZES, "tiny", alone)
    facts = {"cuda": False, "bf16": False, "flops_per_token": 1}
    monkeypatch.setattr(training, "run_job", lambda job: facts)
    flags = ["--size", "tiny", "--batch_size", "-1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["training.py", *flags])
    with pytest.raises(RuntimeError, match="total_batch_size must be at least 1"):
        training.main()
    assert not list(tmp_path.rglob("*.json"))


def test_table_fills_the_markers_of_all_pages_and_marks_missing_results(tmp_path):
    paths = pages(tmp_path)
    text = fill(tmp_path, tmp_path)
    assert all(path.read_text().startswith("before\n<!-- bench ") for path in paths)
    assert all(path.read_text().endswith(" -->\nafter\n") for path in paths)
    assert "old" not in text
    assert text.count("| not measured |") == 11 and text.count("| no GPU available |") == 4
    assert text.count("\nNot measured.\n") == 8


def test_table_refuses_pages_without_a_marker(tmp_path):
    path, _ = pages(tmp_path)
    for missing in ("<!-- bench gpu -->", "<!-- /bench gpu -->"):
        text = path.read_text()
        path.write_text(text.replace(missing, ""))
        done = benchmark("table", "--results", tmp_path, "--docs", tmp_path / "docs")
        assert done.returncode == 1 and missing in done.stderr
        path.write_text(text)


def test_table_has_the_results(tmp_path):
    contestant = {"bf16": True, "compile": True, "tokens_per_second": spread(800), "memory": 2**32}
    contestant["seconds"] = [1.0, 1.1]
    training = {
        "shape": {"n_positions": 1024},
        "batch_size": 4,
        "contestants": {name: contestant for name in CONTESTANTS},
        "speed": {"HF Trainer": spread(2.5), "plain loop": spread(4.0)},
        "memory": {"HF Trainer": 0.5, "plain loop": 0.6},
        "overhead": spread(0.01),
        "ceiling": spread(1.5e12),
        "mfu": spread(0.45),
    }
    runs = {"seconds": [1.0], "loss": [1.85], "time": spread(8)}
    parts = {
        **{name: spread(2.0) for name in ("import", "first_update", "loader")},
        "preparation": {"missing": "GPT-2's BPE is not available"},
        "checkpoint": {"save": spread(0.3), "copy": spread(0.2)},
    }
    row = {"dtype": "bfloat16", "batch_size": 1, "tokens_per_second": spread(30)}
    names = ("no cache", "HF generate", "gpt2_accel", "gpt2_accel, compiled")
    rows = [{**row, "name": name, "speed": spread(1.4 + 0.1 * i)} for i, name in enumerate(names)]
    sizes = {"size": "gpt2", "prompt_tokens": 16, "new_tokens": 48, "rounds": 3}
    write(tmp_path, "training-gpt2", training)
    write(tmp_path, "training-baby", training)
    write(
        tmp_path,
        "shakespeare",
        {"goal": 1.9, "speed": spread(5.0), "recipe": runs, "nanogpt": runs},
    )
    write(tmp_path, "parts", parts)
    write(tmp_path, "generate", {**sizes, "rows": rows})
    pages(tmp_path)
    text = fill(tmp_path, tmp_path)
    assert "| ≥ 2.2 x | 2.50 x (2.25 to 2.75) | yes |" in text
    assert "| ≥ 4.5 x | 4.00 x (3.60 to 4.40) | no |" in text
    assert "| ≤ 0.55 x | 0.60 x | no |" in text
    assert "5.00 x (4.50 to 5.50): 8.0 s, loss 1.850, against 8.0 s, loss 1.850 | yes |" in text
    assert "| ≥ 1.5 x | 1.70 x (1.53 to 1.87) | yes |" in text
    assert "not measured: GPT-2's BPE is not available" in text
    assert "| bfloat16 | 1 | 30.0 | 30.0 | 30.0 (1.60 x) | 30.0 (1.70 x) |" in text
    assert (
        "| HF Trainer | bf16, compiled | 800 (720 to 880) | 4.00 | 2.50 x (2.25 to 2.75) | 0.50 x |"
        in text
    )
    images = tmp_path / "docs/images"
    drawn = (images / "trainers.svg").read_bytes()
    (tmp_path / "cpu/ladder").mkdir()
    (tmp_path / "cpu/ladder/speed_ladder.png").write_bytes(b"a picture")
    assert fill(tmp_path, tmp_path) == text
    assert (images / "speed_ladder.png").read_bytes() == b"a picture"
    assert (images / "trainers.svg").read_bytes() == drawn


def test_the_pages_have_the_tables_of_the_results_that_are_there(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    fill(tmp_path, RESULTS)
    for path in (ROOT / "docs").rglob("*"):
        copy = tmp_path / "docs" / path.relative_to(ROOT / "docs")
        if path.suffix in (".md", ".png"):
            assert copy.read_bytes() == path.read_bytes(), path


def test_shakespeare_without_its_text_is_marked_as_not_measured(tmp_path):
    done = benchmark("shakespeare", "--input", tmp_path / "none.txt", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    pages(tmp_path)
    assert "not measured: tiny Shakespeare is not available" in fill(tmp_path, tmp_path)


def test_an_aim_is_reached_only_by_all_rounds(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import table

    for sign, low, high, reached in (
        *(("≥", 1.5, 2.0, "yes"), ("≥", 1.4, 2.0, "not decided"), ("≥", 1.0, 1.4, "no")),
        *(("≤", 1.0, 1.5, "yes"), ("≤", 1.4, 2.0, "not decided"), ("≤", 1.6, 2.0, "no")),
    ):
        found = {"median": (low + high) / 2, "low": low, "high": high}
        assert table.compare("what", sign, 1.5, found)[-1] == reached

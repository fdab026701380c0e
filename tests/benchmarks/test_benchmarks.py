"""The benchmarks, and the tables of their results."""

import dataclasses
import json
import subprocess
import sys

import pytest
from launching import ROOT, python

CONTESTANTS = {"gpt2_accel", "HF Trainer", "plain loop", "bare loop"}
MACHINE = {"type": "cpu", "device": "a CPU", "threads": 2, "torch": "2", "date": "2026-01-01"}


def benchmark(name, *args):
    return python(f"benchmarks/{name}.py", *args)


def page(folder):
    """Writes a page with outdated text between the markers."""
    path = folder / "performance.md"
    marks = ("bench", "bench tokens", "bench generation", "bench ladder", "bench gpu")
    path.write_text(
        "before\n" + "".join(f"<!-- {m} -->old<!-- /{m} -->\n" for m in marks) + "after\n"
    )
    return path


def write(folder, name, figures):
    (folder / "cpu").mkdir(exist_ok=True)
    (folder / "cpu" / f"{name}.json").write_text(json.dumps({"machine": MACHINE, **figures}))


def spread(value):
    return {"median": value, "low": value * 0.9, "high": value * 1.1}


def test_training_measures_all_contestants(tmp_path):
    flags = ["--size", "tiny", "--rounds", "2", "--results", str(tmp_path)]
    # A process inherits the peak memory of its parent, so this command is a new process.
    done = subprocess.run(
        [sys.executable, "benchmarks/training.py", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.rglob("training-tiny.json")
    found = json.loads(path.read_text())
    assert found["contestants"].keys() == CONTESTANTS
    assert all(len(own["seconds"]) == 2 for own in found["contestants"].values())
    assert all(own["tokens_per_second"]["low"] > 0 for own in found["contestants"].values())
    assert all(own["memory"] > 2**26 for own in found["contestants"].values())
    assert 0 < found["mfu"]["median"] < 1


def test_error_of_a_contestant_is_shown(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import training

    alone = dataclasses.replace(training.SIZES["tiny"], groups=(("gpt2_accel",),))
    monkeypatch.setitem(training.SIZES, "tiny", alone)
    monkeypatch.setattr(training, "prepare", lambda *_: {"cuda": False, "flops_per_token": 1})
    flags = ["--size", "tiny", "--batch_size", "-1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["training.py", *flags])
    with pytest.raises(RuntimeError, match="total_batch_size must be at least 1"):
        training.main()
    assert not list(tmp_path.rglob("*.json"))


def test_table_fills_the_markers_and_marks_missing_results(tmp_path):
    path = page(tmp_path)
    assert benchmark("table", "--results", tmp_path, "--page", path).returncode == 0
    text = path.read_text()
    assert text.startswith("before\n<!-- bench -->\n") and text.endswith("after\n")
    assert "old" not in text
    assert text.count("| not measured |") == 12 and text.count("| no GPU available |") == 4
    assert "Optimizers and schedules: not measured." in text
    assert "Generation: not measured." in text


def test_table_has_the_results(tmp_path):
    contestant = {"bf16": True, "compile": True, "tokens_per_second": spread(800), "memory": 2**32}
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
    path = page(tmp_path)
    done = benchmark("table", "--results", tmp_path, "--page", path)
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    assert "| ≥ 2.2 x | 2.50 x (2.25 to 2.75) | yes |" in text
    assert "| ≥ 4.5 x | 4.00 x (3.60 to 4.40) | no |" in text
    assert "| ≤ 0.55 x | 0.60 x | no |" in text
    assert "5.00 x (4.50 to 5.50), loss 1.850 | yes |" in text
    assert "| ≥ 1.5 x | 1.70 x (1.53 to 1.87) | yes |" in text
    assert "not measured: GPT-2's BPE is not available" in text
    assert "| bfloat16 | 1 | 30.0 | 30.0 | 30.0 (1.60 x) | 30.0 (1.70 x) |" in text
    again = path.read_text()
    (tmp_path / "cpu/ladder").mkdir()
    (tmp_path / "cpu/ladder/speed_ladder.png").write_bytes(b"a picture")
    benchmark("table", "--results", tmp_path, "--page", path)
    assert path.read_text() == again
    assert (tmp_path / "images/speed_ladder.png").read_bytes() == b"a picture"


def test_the_page_has_the_tables_of_the_results_that_are_there(tmp_path):
    path = tmp_path / "performance.md"
    path.write_text((ROOT / "docs/performance.md").read_text())
    assert benchmark("table", "--page", path).returncode == 0
    assert path.read_text() == (ROOT / "docs/performance.md").read_text()
    picture = "images/speed_ladder.png"
    assert (tmp_path / picture).read_bytes() == (ROOT / "docs" / picture).read_bytes()


def trial(optimizer, updates, loss, rate=4e-3, **others):
    own = {"size": "4 layers of 128", "optimizer": optimizer, "rate": rate, "updates": updates}
    common = {"schedule": "linear", "sequences": 12, "min_ratio": 0.0, "beta2": 0.95}
    return {"trial": common | own | others, "loss": loss}


def test_token_table_has_best_learning_rates_and_muons_share(tmp_path):
    runs = [
        trial("adamw", 2000, 1.9, 1e-3, schedule="cosine", min_ratio=0.1),
        trial("adamw", 2000, 1.8, 2e-3),
        trial("adamw", 2000, 1.7),
        trial("muon", 1000, 1.6),
        trial("muon", 500, 1.85),
        trial("muon", 400, 1.95),
    ]
    kinds = [(name, 12, milliseconds) for name, milliseconds in (("adamw", 10.0), ("muon", 20.0))]
    updates = [
        {"size": "4 layers of 128", "optimizer": name, "sequences": sequences}
        | {"milliseconds": spread(milliseconds)}
        for name, sequences, milliseconds in kinds
    ]
    study = {"length": 64, "runs": runs, "updates": updates}
    write(tmp_path, "token_value-shakespeare_char", study)
    write(tmp_path, "token_value-unfinished", {"length": 64, "runs": runs})
    path = page(tmp_path)
    done = benchmark("table", "--results", tmp_path, "--page", path)
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    assert "| ≤ 50% | 25%, in 50% of their time | yes |" in text
    assert "| AdamW | linear | 12 | 1.54M | 1.700 at 0.004 |" in text
    assert "| AdamW | cosine to a tenth | 12 | 1.54M | 1.900 at 0.001 |" in text
    assert "| Muon | linear | 12 | 0.38M | 1.850 at 0.004 |" in text
    assert "unfinished" not in text
    write(tmp_path, "token_value-shakespeare_char", study | {"runs": [*runs[:3], runs[-1]]})
    benchmark("table", "--results", tmp_path, "--page", path)
    assert "not reached: tiny Shakespeare, 4 layers of 128 | no |" in path.read_text()


def test_token_study_skips_finished_runs(data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import token_value

    monkeypatch.setattr(token_value, "SIZES", {"tiny": (1, 2, 16)})
    monkeypatch.setattr(token_value, "TIMED", 2)
    monkeypatch.setattr(token_value, "LENGTH", 16)
    flags = ["--corpus", str(data_dir), "--updates", "8", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["token_value.py", *flags])
    token_value.main()
    [path] = tmp_path.rglob("token_value-*.json")
    found = json.loads(path.read_text())
    assert {run["trial"]["optimizer"] for run in found["runs"]} == {"adamw", "muon"}
    assert {run["trial"]["schedule"] for run in found["runs"]} == {"linear", "cosine", "wsd"}
    assert {update["sequences"] for update in found["updates"]} == {6, 12, 24}
    path.write_text(json.dumps(found | {"runs": found["runs"][:-1]}))
    capsys.readouterr()
    token_value.main()
    assert capsys.readouterr().out.count("wrote") == 2  # the missing run, and the times
    assert json.loads(path.read_text())["runs"] == found["runs"]


def test_shakespeare_without_its_text_is_marked_as_not_measured(tmp_path):
    done = benchmark("shakespeare", "--input", tmp_path / "none.txt", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    path = page(tmp_path)
    benchmark("table", "--results", tmp_path, "--page", path)
    assert "not measured: tiny Shakespeare is not available" in path.read_text()

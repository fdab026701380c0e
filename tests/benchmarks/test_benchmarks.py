"""The benchmarks, and the tables of their results."""

import dataclasses
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from launching import ROOT, python

from gpt2_accel import GPT, GPTConfig
from gpt2_accel.models.qwen3 import Qwen3, Qwen3Config

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
        "studies/all": ("parts", "tokens", "widths", "architectures", "ladder"),
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
    qwen3 = {"gpt2_accel, Qwen3", "HF Trainer, Qwen3"}
    others = {"HF Trainer, Qwen3", "gpt2_accel, four micro-batches"}
    assert found["contestants"].keys() == CONTESTANTS | qwen3 | others
    assert found["speed"].keys() == {"HF Trainer", "plain loop", "gpt2_accel"} | others
    assert all(len(own["seconds"]) == 2 for own in found["contestants"].values())
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
    assert text.count("| not measured |") == 13 and text.count("| no GPU available |") == 4
    assert text.count("\nNot measured.\n") == 7


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


def final(name, tokens, losses, size="4 layers of 128", **others):
    trial = {"corpus": "data/shakespeare_char", "size": size, "tokens": tokens, "rate": 4e-3}
    trial |= {"sequences": 12, "schedule": "linear", "min_ratio": 0.0, "warmup": 0.05}
    trial |= {"weight_decay": 0.1, "beta2": 0.95, "embedding_rate": 1.0, "vector_rate": 1.0}
    trial |= {"cautious": False, "momentum": 0.95, "momentum_warmup": 0.0, "average": 0.0}
    return {"name": name, "trial": trial | others, "losses": losses}


def test_token_table_has_intervals_and_muons_share(tmp_path):
    lever = {"corpus": "data/python_stdlib", "name": "cautious", "found": False, "other": True}
    width = {"optimizer": "muon", "size": "2 layers of 64"}
    study = {
        "screening": [{"trials": 4}],
        "finals": [
            final("nanoGPT", 1_600_000, [1.8, 1.9], schedule="cosine", min_ratio=0.1),
            final("AdamW", 800_000, [1.7, 1.8]),
            final("Muon", 400_000, [1.8, 1.9], embedding_rate=2.0),
            final("Muon", 600_000, [1.6, 1.7], embedding_rate=2.0),
        ],
        "levers": [lever | {"found_losses": [1.0, 2.0], "other_losses": [1.1, 2.1]}],
        "widths": [width | {"rate": rate, "loss": rate * 100} for rate in (0.01, 0.02)],
    }
    write(tmp_path, "token_value", study)
    pages(tmp_path)
    text = fill(tmp_path, tmp_path)
    # Halfway between the losses at 0.4M and 0.6M tokens: 0.49M, the geometric mean, is 61% of 0.8M.
    assert "| ≤ 36% | 25.0% ± 0.0% of its tokens | yes |" in text
    assert "| ≤ 75% | 61.2% ± 0.0% of its tokens | yes |" in text
    title = "tiny Shakespeare, 4 layers of 128"
    assert f"| {title} | nanoGPT | 1.60M | 1.850 ± 0.635 | 0.004, cosine to a tenth, " in text
    assert "embedding rate 2 |" in text
    assert "| cautious | Python's library | no | yes | +0.100 ± 0.000 |" in text
    assert "| Muon | 2 layers of 64 | **1.000** | 2.000 |" in text


def test_token_study_skips_finished_runs(data_dir, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import token_table
    import token_training
    import token_value

    sizes = {name: (1, 1, 8) for name in token_training.SIZES}
    monkeypatch.setattr(token_training, "SIZES", sizes)
    monkeypatch.setattr(token_training, "LENGTH", 16)
    monkeypatch.setattr(token_training, "EVAL_TOKENS", 64)
    monkeypatch.setattr(token_value, "LEVERS", {"cautious", "average"})
    monkeypatch.setattr(token_value, "WIDTHS", token_value.WIDTHS[:1])
    config = token_value.Study(corpora=[str(data_dir)], tokens=4 * 12 * 16, trials=3, seeds=2)
    path = tmp_path / "token_value.csv"

    def study():
        with ThreadPoolExecutor(1) as workers:
            runs = token_value.Runs(path, workers)
            return runs, token_value.study(config, runs)

    first, figures = study()
    names = [entry["name"] for entry in figures["finals"]]
    assert sorted(names) == ["AdamW"] * 2 + ["Muon"] * 4 + ["nanoGPT"] * 2
    assert {len(entry["losses"]) for entry in figures["finals"]} == {2}
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + len(first.losses)
    path.write_text("\n".join(lines[:-1]) + "\n")
    _, again = study()
    assert again == figures
    token_table.draw_widths(figures, tmp_path / "learning_rates.png")
    assert (tmp_path / "learning_rates.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.read_text().splitlines()) == sorted(lines)
    path.write_text(path.read_text()[:-3])
    with pytest.raises(ValueError, match="ends in the middle of a row"):
        study()


def test_architecture_study_has_all_models_at_equal_tokens_and_time(
    data_dir, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import architectures
    import token_table
    import token_training
    import token_value

    monkeypatch.setattr(token_training, "SIZES", {token_value.SMALL: (1, 2, 16)})
    monkeypatch.setattr(token_training, "LENGTH", 16)
    monkeypatch.setattr(token_training, "EVAL_TOKENS", 64)
    monkeypatch.setattr(architectures, "TIMED", 2)
    monkeypatch.setattr(token_value, "RATES", token_value.RATES[5:9])
    base = token_value.start("muon", str(data_dir), 8 * 12 * 16)
    with ThreadPoolExecutor(1) as workers:
        runs = token_value.Runs(tmp_path / "architectures.csv", workers)
        entries = architectures.study(architectures.Study(seeds=2), runs, [base])
    assert [entry["trial"]["model"] for entry in entries] == list(token_training.MODELS)
    assert entries[0]["losses"] == entries[0]["losses_in_time"]
    rows = token_table.architecture_rows({"entries": entries})
    assert [row[1] for row in rows] == list(token_training.MODELS)
    assert rows[0][4] == rows[0][7] and rows[0][5] == ""


def test_coordinate_descent_finds_the_best_settings_within_its_trials(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import token_value

    class Runs:
        def run(self, trials):
            return [abs(t.rate - 8e-3) + abs(t.beta2 - 0.98) for t in trials]

    first = token_value.start("adamw", "a corpus", 100_000)
    axes = {name: token_value.AXES["adamw"][name] for name in ("rate", "beta2")}
    descent = token_value.Descent(Runs(), first, axes, 30)
    best = descent.run()
    assert (best.rate, best.beta2) == (8e-3, 0.98)
    few = token_value.Descent(Runs(), first, axes, 3)
    few.run()
    assert len(few.losses) == 3


def renamed(weights, names):
    """Renames the tensors of a state dict; each name's parts that are in `names` are replaced."""
    for old, new in names.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    return weights


def test_the_models_between_are_gpt2_at_one_end_and_qwen3_at_the_other(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from between import CHANGES, ROPE_THETA, Between, BetweenConfig

    shape = 256, 32, 2, 2, 48
    last = BetweenConfig(*shape, len(CHANGES))
    gpt2 = GPT(GPTConfig(*shape))
    qwen3 = Qwen3(Qwen3Config(256, 32, 2, 2, 2, 24, 48, last.n_inner, rope_theta=ROPE_THETA))
    names = {"attn.c_": "c_", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    others = {"embed_tokens": "wte", "layers": "h", "post_attention_layernorm": "ln_2"}
    others |= {"input_layernorm": "ln_1", "self_attn.o_proj": "c_proj", "self_attn.": ""}
    others |= {"mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
    input_ids, targets = torch.randint(256, (2, 2, 32))
    for reference, config, mapping in ((gpt2, BetweenConfig(*shape), names), (qwen3, last, others)):
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        weights = renamed(reference.state_dict(), mapping)
        if reference is qwen3:
            weights["ln_f.weight"] = weights.pop("norm.weight")
            for i in range(2):
                parts = [weights.pop(f"h.{i}.{part}_proj.weight") for part in "qkv"]
                weights[f"h.{i}.c_attn.weight"] = torch.cat(parts)
        model = Between(config)
        model.load_state_dict(weights)
        torch.testing.assert_close(model(input_ids, targets), reference(input_ids, targets))


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

"""The report of whole, broken and unfinished runs, and that a browser opens it."""

import json
import math
import shutil
from pathlib import Path

import pytest
from conftest import read_json, refused, run, run_recipe, status, tiny_config
from tables import table

from gpt2_accel.charts import curve_points, still_falling
from gpt2_accel.runtime.files import write_json
from gpt2_accel.tools.report import RunFolder, draw, report_of


@pytest.fixture(scope="module")
def runs(data_dir, tmp_path_factory):
    """Two runs with everything in them."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {"max_steps": 60, "eval_every": 10, "sample_every": 20, "sample_tokens": 20}
    settings |= {"sample_prompts": ["the cat", "<b>"], "save_every": 20}
    run(tiny_config(data_dir, folder / "first", **settings))
    run(tiny_config(data_dir, folder / "second", learning_rate=3e-3, **settings))
    return folder


def test_the_report_has_the_newest_results_of_evaluate(runs, tmp_path):
    folder = shutil.copytree(runs / "first", tmp_path / "first")
    entry = {"step": 60, "weights": "00", "precision": "no"}
    older = {"hellaswag/acc": 0.2, "core/core": 0.125}
    newer = {"hellaswag/acc": 0.25, "hellaswag/acc_stderr": 0.05}
    newer |= {"hellaswag/acc_stderr_n": 76, "text/loss": None}
    for place, results in ((folder, newer), (folder / "checkpoint-40", older)):
        write_json(place / "evaluation.json", {"model": entry | {"results": results}})
    page = report_of([RunFolder(folder), RunFolder(runs / "second")])[0]
    assert "hellaswag/acc<" in page
    assert "0.2500 (0.1663 to 0.3578)" in page
    assert "0.1250" in page
    (folder / "evaluation.json").write_text("[")
    with refused("evaluation.json"):
        RunFolder(folder)


def test_curves_are_the_logged_values_over_tokens_time_and_flops(runs):
    first = RunFolder(runs / "first")
    lines = [json.loads(line) for line in (runs / "first/metrics.jsonl").open()]
    tokens, loss = first.curve("train/loss", "tokens")
    assert loss == [line["train/loss"] for line in lines]
    assert tokens == [128 * step for step in range(1, 61)]
    per_token = read_json(runs / "first/run.json")["flops_per_token"]
    flops, _ = first.curve("val/loss", "flops")
    assert flops == [128 * step * per_token for step in range(10, 61, 10)]
    hours, _ = first.curve("train/loss", "hours")
    assert hours[-1] * 3600 == pytest.approx(lines[-1]["train/seconds"])


def test_runs_of_different_tokens_are_compared_in_bits_per_byte(runs):
    def drawn():
        [axes] = draw([first, second], [])["loss-over-tokens"].axes
        return [list(line.get_ydata()) for line in axes.get_lines() if len(line.get_ydata())]

    first, second = RunFolder(runs / "first"), RunFolder(runs / "second")
    assert first.curve("val/loss", "tokens")[1] in drawn()
    second.metadata["tokenizer"] = "another"
    page = report_of([first, second])[0]
    assert "val/bits_per_byte" in page
    assert "val/perplexity" not in page
    assert drawn() == [run.curve("val/bits_per_byte", "tokens")[1] for run in (first, second)]


def test_unfinished_and_damaged_runs_have_a_report(runs, tmp_path):
    def without(*names: str) -> Path:
        ignored = shutil.ignore_patterns("checkpoint-*", *names)
        return shutil.copytree(runs / "first", tmp_path / names[0], ignore=ignored)

    starting = without("metrics.jsonl", "samples.jsonl", "status.json")
    running = without("run.json")
    write_json(running / "status.json", status(running) | {"state": "running"})
    with (running / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 61, "mine/$\\\\b$": 1}\n{"step": 61, "mine/$\\\\b$": 2}\n')
        file.write(b'\xfe\n[1]\n{"step": "x"}\n{"step": 62, "train/loss": NaN}\n{"step": 63, "tok')
    run_recipe("report", starting, running, "--output_dir", tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    assert "</svg>" in page
    assert "location.reload" in page
    curve = RunFolder(running).curve("train/loss", "tokens")[1]
    assert len(curve) == 60
    assert all(map(math.isfinite, curve))
    (running / "run.json").write_bytes(b"\xff{")
    with refused("run.json"):
        RunFolder(running)


def test_the_report_says_how_the_run_went_and_what_it_changed(runs):
    first = RunFolder(runs / "first")
    page = report_of([first])[0]
    losses = first.curve("train/loss", "tokens")[1]
    x, y = curve_points(first.lines, "val/bits_per_byte", "step")
    assert "finished at update 60 of 60" in page
    assert "location.reload" not in page
    assert f"train/loss {losses[0]:.4f} → {losses[-1]:.4f}" in page
    assert f"best val/bits_per_byte {min(y):.4f} at update {x[y.index(min(y))]}" in page
    assert "xz -9 needs " in page
    changed, _, others = page.partition("<h2>Settings")[2].partition("The other settings")
    assert "learning_rate" in changed and "adam_eps" not in changed
    assert "adam_eps" in others
    assert page.index(">update 20<") < page.index(">update 60<") < page.rindex(">update 20<")


def test_runs_with_other_validation_data_are_not_in_one_plot_or_row(runs):
    first, second = RunFolder(runs / "first"), RunFolder(runs / "second")
    assert first.metadata["validation"] == second.metadata["validation"]
    second.metadata["validation"] = "another"
    page, pictures = report_of([first, second])
    for name in ("loss-over-tokens", "2-loss-over-tokens"):
        assert len(pictures[name].axes[0].get_legend().get_texts()) == 1
    assert page.count(">val/loss</th>") == 2


@pytest.mark.parametrize(("losses", "falls"), table("tools/cases")["still falling"])
def test_a_validation_loss_that_still_falls_names_more_epochs(losses, falls):
    lines = [{"step": 10 * i, "val/loss": loss} for i, loss in enumerate(losses, 1)]
    assert ("still falling: --epochs 8" in still_falling(lines, 40, 4.0)) == falls

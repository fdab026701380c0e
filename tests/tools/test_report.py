"""The report: what it draws of whole, broken and unfinished runs, and that a browser opens it."""

import json
import math
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import read_json, refused, run, tiny_config
from launching import python

from gpt2_accel.runtime.files import write_json
from gpt2_accel.tools.report import RunFolder, draw, report_of, write_report

pytest.importorskip("matplotlib")

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.fixture(scope="module")
def runs(data_dir, tmp_path_factory):
    """Two runs with everything in them."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {"max_steps": 60, "eval_every": 10, "sample_every": 20, "sample_tokens": 20}
    settings |= {"sample_prompts": ["the cat", "<b>"], "save_every": 20}
    run(tiny_config(data_dir, folder / "first", **settings))
    run(tiny_config(data_dir, folder / "second", learning_rate=3e-3, **settings))
    return folder


def report(*arguments: str | Path, **how) -> subprocess.CompletedProcess:
    return python("recipes/report.py", *arguments, **how)


def test_the_report_of_two_runs_opens_in_a_browser_without_an_error(runs, tmp_path):
    for name in ("first", "second"):
        found = read_json(shutil.copytree(runs / name, tmp_path / name) / "run.json")
        found |= {"git_commit": "0123456789" * 4, "data": "/" + "a_folder/" * 12}
        (tmp_path / name / "run.json").write_text(json.dumps(found))
    report(tmp_path / "first", tmp_path / "second", "--output_dir", tmp_path / "out")
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert {"loss", "loss-over-hours", "loss-over-flops", "val-perplexity"} < names
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme, width in (("light", 1000), ("dark", 390)):
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
            errors, requests = [], []
            page.on("console", lambda message, e=errors: e.append(message.text))
            page.on("pageerror", lambda error, e=errors: e.append(str(error)))
            page.on("request", lambda request, r=requests: r.append(request.url))
            page.goto((tmp_path / "out/report.html").as_uri())
            assert page.title() == "first, second"
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("figure").count() == len(names)
            assert page.locator("pre", has_text="<b>").count() > 0  # a sample, not markup
            settings = page.locator("table").last.inner_text()
            assert "learning_rate" in settings and "max_steps" not in settings  # equal in both
            assert errors == []
            assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
        browser.close()


def test_the_newest_results_of_evaluate_stand_in_the_report(runs, tmp_path):
    folder = shutil.copytree(runs / "first", tmp_path / "first")
    entry = {"step": 60, "weights": "00", "precision": "no"}
    older = {"hellaswag/acc": 0.2, "core/core": 0.125}
    newer = {"hellaswag/acc": 0.25, "hellaswag/acc_stderr": 0.01}
    newer |= {"text/perplexity_per_token": 12345.6, "text/loss": None}
    for place, results in ((folder, newer), (folder / "checkpoint-40", older)):
        write_json(place / "evaluation.json", {"model": {**entry, "results": results}})
    first, second = RunFolder(folder), RunFolder(runs / "second")
    page = report_of([first, second])[0]
    assert "hellaswag/acc<" in page and "0.2500 ± 0.0100" in page and "0.1250" in page
    assert "text/perplexity_per_token" in page and "12,346" in page
    second.metadata["tokenizer"] = "another"
    assert "perplexity_per_token" not in report_of([first, second])[0]
    (folder / "evaluation.json").write_text("[")
    with refused("evaluation.json does not hold evaluations"):
        RunFolder(folder)


def test_curves_are_what_was_logged_over_tokens_time_and_flops(runs):
    first = RunFolder(runs / "first")
    lines = [json.loads(line) for line in (runs / "first/metrics.jsonl").open()]
    tokens, loss = first.curve("train/loss", "tokens")
    assert loss == [line["train/loss"] for line in lines]
    assert tokens == [128 * step for step in range(1, 61)]
    facts = read_json(runs / "first/run.json")
    flops, _ = first.curve("val/loss", "flops")
    assert flops == [128 * step * facts["flops_per_token"] for step in range(10, 61, 10)]
    hours, _ = first.curve("train/loss", "hours")
    assert hours == sorted(hours)
    assert hours[-1] * 3600 == pytest.approx(lines[-1]["train/seconds"])


def test_runs_of_different_tokens_are_compared_in_bits_per_byte(runs):
    def drawn():
        [axes] = draw([first, second], [])["loss"].axes
        return [list(line.get_ydata()) for line in axes.get_lines() if len(line.get_ydata())]

    first, second = RunFolder(runs / "first"), RunFolder(runs / "second")
    assert first.curve("val/loss", "tokens")[1] in drawn()
    second.metadata["tokenizer"] = "another"
    page = report_of([first, second])[0]
    assert "val/bits_per_byte" in page and "val/perplexity" not in page
    assert "nats per token" not in page
    assert drawn() == [run.curve("val/bits_per_byte", "tokens")[1] for run in (first, second)]


@pytest.mark.parametrize("updates", [2, 19_000])
def test_curves_of_any_length_fill_their_axes(updates, tmp_path):
    """No chart of one value or of standard errors, no labels that collide; the fall at the start does not flatten the rest."""
    every = max(1, updates // 20)
    lines = [
        {"step": n, "tokens": n * 524_288, "train/loss": 3 + 8 / n, "train/memory_gb": 60.1}
        for n in range(1, updates + 1)
    ]
    for line in lines[every - 1 :: every]:
        line |= {"val/loss": 3 + 8 / line["step"], "val/loss_stderr": 0.01}
        line |= {"val/perplexity": 20 + 1e5 / line["step"], "val/rising": 1 - 1 / line["step"]}
    lines[-1] |= {"hellaswag/acc": 0.25, "hellaswag/acc_stderr": 0.01}
    changes = ["a 1 -> 2 from update 8", "b"]
    write_json(tmp_path / "run.json", {"run_id": "", "flops_per_token": 8.6e8, "changes": changes})
    run = RunFolder(tmp_path)
    run.lines = lines
    table, pictures = report_of([run])
    names = {
        "loss",
        "loss-over-flops",
        "val-loss",
        "val-perplexity",
        "val-rising",
        "train-memory_gb",
    }
    assert {*pictures} == names
    assert "0.2500 ± 0.0100" in table and "stderr" not in table
    assert "<td>a 1 -&gt; 2 from update 8; b</td>" in table
    for name, figure in pictures.items():
        renderer, [ax] = figure._get_renderer(), figure.axes
        for axis in (ax.xaxis, ax.yaxis):
            labels = [t.get_window_extent(renderer) for t in axis.get_ticklabels()]
            labels = [box for box in labels if box.width]
            assert not any(a.overlaps(b) for a, b in pairwise(labels)), name
    top = {name: figure.axes[0].get_ylim()[1] for name, figure in pictures.items()}
    assert top["val-rising"] > lines[-1]["val/rising"] and top["train-memory_gb"] > 60.1
    if updates == 19_000:
        assert top["val-perplexity"] < 100 and top["loss"] < 4


def test_a_report_is_made_of_what_is_there(runs, tmp_path):
    def variant(name: str, *gone: str) -> Path:
        folder = shutil.copytree(runs / "first", tmp_path / name)
        for pattern in gone:
            for path in folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return folder

    starting = variant("first", "metrics.jsonl", "samples.jsonl", "status.json", "checkpoint-*")
    running = variant("running", "run.json", "checkpoint-*")
    with (running / "metrics.jsonl").open("ab") as file:
        file.write(b'\xfe\n[1]\n{"step": "x"}\n{"step": 62, "train/loss": NaN}\n{"step": 63, "tok')
    report(starting, running, "--output_dir", tmp_path / "out")
    assert "</svg>" in (tmp_path / "out/report.html").read_text()
    curve = RunFolder(running).curve("train/loss", "tokens")[1]
    assert len(curve) == 60 and all(map(math.isfinite, curve))
    (running / "run.json").write_bytes(b"\xff{")
    with refused("run.json is not valid YAML"):
        RunFolder(running)


def test_a_folder_that_is_not_a_runs_is_refused(tmp_path):
    with refused("none is not a folder: give the --output_dir"):
        RunFolder(tmp_path / "none")
    for name, content in (("config.yaml", "debug: true\n"), ("config.json", "{}")):
        (tmp_path / name).write_text(content)
        with refused("does not contain a run: give the --output_dir of a run"):
            RunFolder(tmp_path)


def test_without_matplotlib_it_says_what_to_install(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refused(r"pip install 'matplotlib>=3.9'"):
        write_report([RunFolder(runs / "first")], runs / "out")

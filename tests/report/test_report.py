"""The report: what it draws of whole, broken and unfinished runs, and that a browser opens it."""

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from conftest import run, tiny_config
from launching import python
from transformers import AutoModelForCausalLM

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.report import page as page_module
from gpt2_accel.report.figures import smoothed
from gpt2_accel.report.page import Page, newest, table_of_runs, tell_apart, write_report
from gpt2_accel.report.reader import Run, read_run

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
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


def report(*arguments: str | Path) -> subprocess.CompletedProcess:
    return python("recipes/report.py", *arguments)


@needs_matplotlib
def test_the_report_of_two_runs_opens_in_a_browser_without_an_error(runs, tmp_path):
    text = ("--text", "the cat sat on $x$")
    done = report(runs / "first", runs / "second", *text, "--output_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert names >= {"loss", "loss-over-minutes", "loss-over-flops", "training", "evaluations"}
    assert names >= {"first-attention", "second-attention"}
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
            texts = page.locator("svg:visible text")
            sizes = texts.evaluate_all("all => all.map(t => t.getBoundingClientRect().height)")
            assert min(sizes) > 8  # pixels: legible
            links = page.locator("nav a").evaluate_all("all => all.map(a => a.hash)")
            assert links and all(page.locator(link).count() == 1 for link in links)
            loss = page.locator("section", has=page.locator("h2", has_text="Loss"))
            assert loss.locator("svg:visible").count() == 1
            assert "tokens" in loss.locator("svg:visible").text_content()
            loss.get_by_text("FLOPs", exact=True).first.click()
            assert "FLOPs" in loss.locator("svg:visible").text_content()
            assert loss.locator("svg:visible").bounding_box()["height"] > 100
            loss.locator("svg:visible").hover()
            shown = page.locator(".read:visible").inner_text()
            assert "first, training" in shown and "second, validation" in shown
            assert page.locator("pre", has_text="<b>").count() > 0  # a sample, not markup
            assert errors == []
            assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
        browser.close()


@needs_matplotlib
@pytest.mark.parametrize("updates", [2, 20, 19_000])
def test_curves_of_any_length_fill_their_axes(updates, tmp_path):
    """No chart of one value or of standard errors, no axis of 0.2% of a value, no labels that collide."""
    from gpt2_accel.report import figures, page

    every = max(1, updates // 20)
    lines = [
        {"step": n, "tokens": n * 524_288, "train/loss": 3 + 8 / n, "train/memory_gb": 60.1}
        for n in range(1, updates + 1)
    ]
    for line in lines[every - 1 :: every]:
        line |= {"val/loss": 3 + 8 / line["step"], "val/loss_stderr": 0.01}
        line |= {
            "val/perplexity": 20 + 1e5 / line["step"],
            "val/steady": 1 + line["step"] * 1e-9,
        }
    lines[-1] |= {"hellaswag/acc": 0.25, "hellaswag/acc_stderr": 0.01}
    run = Run(tmp_path, "run", lines=lines, metadata={"flops_per_token": 8.6e8})
    drawn = page.Page()
    page.add_curves(drawn, [run])
    titles = [ax.get_title(loc="left") for ax in drawn.figures["evaluations"].axes]
    assert titles[:2] == ["validation perplexity", "validation steady"]
    assert not any("HellaSwag" in title or "stderr" in title for title in titles)
    table = page.table_of_runs([run])
    assert "HellaSwag accuracy" in table and "0.2500 ± 0.0100" in table
    assert "validation loss in nats per token" in table and "val/" not in table
    for name, figure in drawn.figures.items():
        renderer = figure._get_renderer()
        for ax in filter(lambda ax: ax.get_visible(), figure.axes):
            low, high = ax.get_ylim()
            assert high - low >= figures.LEAST_SPAN * max(abs(low), abs(high)) * 0.99, name
            for axis in (ax.xaxis, ax.yaxis):
                labels = [t.get_window_extent(renderer) for t in axis.get_ticklabels()]
                labels = [box for box in labels if box.width]
                assert not any(a.overlaps(b) for a, b in pairwise(labels)), name
    if updates == 19_000:  # the fall at the start does not flatten the rest
        assert drawn.figures["evaluations"].axes[0].get_ylim()[1] < 100
        assert drawn.figures["loss"].axes[0].get_ylim()[1] < 4


@needs_matplotlib
def test_results_of_evaluate_stand_in_the_report(runs, tmp_path):
    from gpt2_accel.report.page import table_of_evaluations

    folder = shutil.copytree(runs / "first", tmp_path / "first")
    entry = {
        "step": 60,
        "weights": "00",
        "precision": "no",
        "results": {"hellaswag/acc": 0.25, "hellaswag/acc_stderr": 0.01}
        | {"text/perplexity_per_token": 12345.6, "lm_eval:lambada_openai/perplexity": None},
        "notes": ["hellaswag: 12 <items>"],
    }
    older = {**entry, "step": 40}
    for place, name, content in ((folder, "new", entry), (folder / "checkpoint-40", "old", older)):
        (place / "evaluation.json").write_text(json.dumps({name: content}))
    first, second = read_run(folder), read_run(runs / "second")
    page = table_of_evaluations([first, second])
    assert "HellaSwag accuracy" in page and "0.2500 ± 0.0100" in page
    assert "first: hellaswag: 12 &lt;items&gt;" in page
    assert "old, update 40" in page and "new, update 60" in page
    assert "own text, perplexity per token" in page and "12,346" in page
    second.metadata["tokenizer"] = "another"
    page = table_of_evaluations([first, second])
    assert "perplexity per token" not in page and "lambada_openai perplexity" in page
    assert table_of_evaluations([second]) == ""
    (folder / "evaluation.json").write_text("[")
    assert read_run(folder).problems[-1] == "evaluation.json is damaged: left out"


@needs_matplotlib
def test_curves_are_what_was_logged_over_tokens_time_and_flops(runs):
    first = read_run(runs / "first")
    lines = [json.loads(line) for line in (runs / "first/metrics.jsonl").open()]
    tokens, loss = first.curve("train/loss", "tokens")
    assert loss == [line["train/loss"] for line in lines]
    assert tokens == [128 * step for step in range(1, 61)]
    facts = json.loads((runs / "first/run.json").read_text())
    flops, _ = first.curve("val/loss", "flops")
    assert flops == [128 * step * facts["flops_per_token"] for step in range(10, 61, 10)]
    minutes, _ = first.curve("train/loss", "minutes")
    assert minutes == sorted(minutes)
    assert minutes[-1] * 60 == pytest.approx(lines[-1]["train/seconds"])
    assert first.problems == []


@needs_matplotlib
def test_runs_in_folders_of_the_same_name_are_told_apart(runs, tmp_path):
    twins = [shutil.copytree(runs / "first", tmp_path / place / "run") for place in ("a", "b")]
    found = [read_run(folder) for folder in (*twins, twins[0])]
    tell_apart(found)
    assert [run.name for run in found] == ["a-run", "b-run", "a-run (3)"]


@needs_matplotlib
def test_what_is_not_finite_leaves_the_rest_of_a_curve_alone():
    y = [1.0] * 100
    y[50] = math.nan
    assert smoothed(y) == [1.0] * 100


@needs_matplotlib
@pytest.mark.parametrize("shape", [None, LlamaConfig, Qwen3Config])
def test_attention_is_that_of_transformers(shape, runs, tmp_path):
    from gpt2_accel.report.figures import attention_weights

    input_ids, folder = torch.randint(0, 257, (1, 20)), runs / "first"
    if shape:  # with grouped-query attention
        folder = tmp_path
        shape = shape(257, 32, 2, n_head=4, n_kv_head=2, head_dim=8, n_embd=32, n_inner=48)
        save_pretrained(shape.build(), folder)
    ours = attention_weights(from_pretrained(folder), input_ids)
    hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = torch.cat(hf(input_ids, output_attentions=True).attentions)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@needs_matplotlib
def test_gpt2s_lines_are_drawn_only_where_they_apply(runs):
    from gpt2_accel.report.figures import loss_figure, themed_svg

    first = read_run(runs / "first")
    assert "GPT-2 124M" not in themed_svg(loss_figure([first]))
    first.metadata |= {"data": "HuggingFaceFW/fineweb-edu (9 tokens)", "vocab_size": 50257}
    assert first.gpt2_line("val/loss") == (3.2924, "build-nanogpt")
    assert "GPT-2 124M: 3.292" in themed_svg(loss_figure([first]))
    first.metadata["vocab_size"] = 4096  # other tokens, another loss
    assert first.gpt2_line("val/loss") is None
    assert first.gpt2_line("hellaswag/acc_norm_per_token") == (0.2945, "build-nanogpt")
    first.settings["hellaswag_data"] = "my.jsonl"
    assert first.gpt2_line("hellaswag/acc_norm_per_token") is None


@needs_matplotlib
def test_runs_of_different_tokens_are_compared_in_bits_per_byte(runs):
    from gpt2_accel.report.figures import loss_figure, themed_svg
    from gpt2_accel.report.page import Page, add_curves

    def written():
        page = Page()
        add_curves(page, [first, second])
        return table_of_runs([first, second]) + "".join(page.sections)

    def drawn(figure):
        [axes] = figure.axes
        return {
            line.get_gid(): list(line.get_ydata()) for line in axes.get_lines() if line.get_gid()
        }

    first, second = read_run(runs / "first"), read_run(runs / "second")
    gpt2s = {"data": "fineweb-edu (9 tokens)", "vocab_size": 50257}
    first.metadata |= gpt2s
    assert first.tokenizer == second.tokenizer
    both = loss_figure([first, second])
    assert "nats per token" in themed_svg(both) and "GPT-2 124M" not in themed_svg(both)
    assert drawn(both)["first, validation"] == first.curve("val/loss", "tokens")[1]

    second.metadata["tokenizer"] = "another"
    first.metadata["data"] = "made up (17 tokens)"
    page = written()
    assert "bits per byte, as the tokenizers differ" in page and "nats per token" not in page
    assert "validation bits per byte" in page and "validation perplexity" not in page
    assert "different data" not in page
    curves = drawn(loss_figure([first, second]))
    expected = first.curve("val/bits_per_byte", "tokens")[1]
    assert curves["first, validation"] == expected
    unit = expected[-1] / first.last("val/loss")
    training = smoothed([loss * unit for loss in first.curve("train/loss", "tokens")[1]])
    assert curves["first, training"] == pytest.approx(training)

    for line in second.lines:  # as of data whose bytes are not known
        line.pop("val/bits_per_byte", None)
    second.metadata["data"] = "another"
    page = written()
    assert "different data" in page and "not known" in second.problems[-1]
    left = loss_figure([first, second])
    assert drawn(left)["second, validation"] == []
    assert [line.get_label() for line in left.axes[0].get_legend().get_lines()] == ["first"]


def test_a_figure_of_an_earlier_update_says_so(tmp_path):
    found = Run(tmp_path, "run", lines=[{"step": 20, "val/loss": 3.5}])
    assert newest(found, "val/loss") == "3.5000"
    found.lines.append({"step": 40, "tokens": 5120, "train/loss": 3.4, "train/seconds": 9.0})
    assert newest(found, "val/loss") == "3.5000 at update 20" and newest(found, "val/none") == ""
    found.metadata["flops_per_token"] = 1000
    assert "<td>5,120</td>" in table_of_runs([found])
    found.status = {"state": "stopped", "step": 50}  # ten updates after the last line of the log
    page = table_of_runs([found])
    assert "<td>stopped at update 50</td>" in page and "<td>5,120 at update 40</td>" in page
    assert "<td>9 s at update 40</td>" in page and "<td>5.12e+06 at update 40</td>" in page


def test_a_path_breaks_after_a_slash_only(tmp_path):
    found = Run(tmp_path, "run", metadata={"data": "/my/texts <1>"})
    assert "<td>/<wbr>my/<wbr>texts &lt;1&gt;</td>" in table_of_runs([found])
    style = (Path(page_module.__file__).parent / "page.html").read_text()
    assert "anywhere" not in re.search(r"^th, td \{.*?\}", style, re.M | re.S)[0]


@needs_matplotlib
def test_a_report_is_made_of_what_is_there(runs, tmp_path):
    def variant(name: str, *gone: str) -> Path:
        folder = shutil.copytree(runs / "first", tmp_path / name)
        for pattern in gone:
            for path in folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return folder

    weights = ("model.safetensors", "config.json", "checkpoint-*")
    older = variant("older", "run.json", "status.json")
    lines = [json.loads(line) for line in (older / "metrics.jsonl").open()]
    for line in lines:
        line.pop("train/seconds"), line.pop("train/memory_gb")
    (older / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    starting = variant("starting", "metrics.jsonl", "samples.jsonl", "status.json", *weights)
    running = variant("running", *weights)
    with (running / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 61, "tok')
    broken = variant("broken", "model.safetensors", "checkpoint-*")
    (broken / "run.json").write_bytes(b"\xff{")
    with (broken / "metrics.jsonl").open("ab") as file:
        file.write(b'\xfe\n[1]\n{"step": "x"}\n{"step": 62, "train/loss": NaN}\n')

    folders = (older, starting, running, broken)
    done = report(*folders, "--text", "the cat", "--output_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stdout
    for name, sentence in (
        ("older", "run.json is missing: the run is of another release, or just starting"),
        ("starting", "metrics.jsonl has no lines yet: no curves"),
        ("starting", "its attention is not drawn: "),
        ("running", "metrics.jsonl: 1 damaged line left out"),
        ("broken", "run.json is damaged: left out"),
        ("broken", "metrics.jsonl: 3 damaged lines left out"),
        ("broken", "its attention is not drawn: "),
    ):
        assert f"{tmp_path / name}: {sentence}" in said
    page = (tmp_path / "out/report.html").read_text()
    assert "<h2>Left out</h2>" in page and "<h2>Attention of older</h2>" in page
    # Without run.json, FLOPs come from the model and hours from the speed.
    old, new = read_run(older), read_run(runs / "first")
    assert old.metadata["flops_per_token"] == new.metadata["flops_per_token"]
    assert old.curve("step", "minutes")[0][-1] == pytest.approx(
        new.curve("step", "minutes")[0][-1], rel=0.01
    )
    assert all(map(math.isfinite, read_run(running).curve("train/loss", "tokens")[1]))


@needs_matplotlib
@pytest.mark.parametrize(
    "value", ["7", [1, {"a": []}], -(10**400)], ids=lambda value: str(value)[:9]
)
def test_a_value_of_a_wrong_type_is_left_out_and_its_file_named(value, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(Page, "picture", lambda *_: "")  # drawing is slow
    folder = shutil.copytree(runs / "first", tmp_path / "run")
    for name in ("run.json", "status.json", "config.yaml", "evaluation.json"):
        path = folder / name
        values = yaml.safe_load(path.read_text()) if path.exists() else {"a": {"results": 1}}
        path.write_text(json.dumps(dict.fromkeys(values, value)))
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        wrong = [
            line | {key: value}
            for line in lines[:2]
            for key in line
            if "/" in key or key == "tokens"
        ]
        wrong += [line | {"step": value} for line in lines[:1]]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in [*wrong, *lines]))
    run = read_run(folder)
    write_report([run], tmp_path / "out")
    said = "\n".join(run.problems)
    for name in (
        "run.json has parameters = ",
        "status.json has step = ",
        "config.yaml has max_steps = ",
    ):
        assert name in said
    for name in ("metrics.jsonl: ", "samples.jsonl: ", "evaluation.json is damaged"):
        assert name in said
    assert run.curve("train/loss", "tokens") == read_run(runs / "first").curve(
        "train/loss", "tokens"
    )


@needs_matplotlib
def test_a_run_that_is_being_written_can_be_drawn(data_dir, tmp_path):
    """While it goes on, as `tail` would see it, and with its folder held."""
    config = tiny_config(data_dir, tmp_path / "run", max_steps=3)
    run(config)
    (tmp_path / "run/metrics.jsonl").open("a").write('{"step": 4, "tokens": 512, "train/lo')
    found = read_run(tmp_path / "run")
    path = write_report([found], tmp_path / "report", text="the cat sat on the mat")
    assert "metrics.jsonl: 1 damaged line left out" in found.problems
    page = path.read_text()
    assert "finished at update 3 of 3" in page and "1 damaged line" in page
    assert "</svg>" in page and "<h2>Samples</h2>" not in page


def test_what_is_no_run_is_said_in_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="none is not a folder: give that of a run"):
        read_run(tmp_path / "none")
    done = report(tmp_path / "empty")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "empty holds nothing of a run: give the --output_dir of one" in done.stderr
    for name, content in (("config.yaml", "debug: true\n"), ("config.json", "{}")):
        other = tmp_path / name.replace(".", "-")
        other.mkdir()
        (other / name).write_text(content)
        with pytest.raises(ValueError, match="holds nothing of a run"):
            read_run(other)
        assert [path.name for path in other.iterdir()] == [name]


def test_without_matplotlib_it_says_what_to_install(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'matplotlib>=3.9'"):
        write_report([read_run(runs / "first")], runs / "out")

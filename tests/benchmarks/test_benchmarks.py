"""The benchmarks, and the pages' tables and figures of their results."""

import re
import shutil
import sys

import pytest
from conftest import long, read_json, refused
from launching import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import measure
import table
from results import read_results

import gpt2_accel

TINY = {"shape": measure.TINY, "batch_size": 4}


@long
def test_every_program_has_a_row_that_follows_from_its_seconds():
    jobs = measure.training("tiny", None).jobs
    result = measure.measure(measure.Benchmark("tiny", jobs, 5), rounds=2)
    assert [row["name"] for row in result["rows"]] == ["gpt2_accel", "HF Trainer", "nanoGPT's loop"]
    for row in result["rows"]:
        speeds = [5 * 4 * 32 / seconds for seconds in row["seconds"]]
        assert row["tokens_per_second"] == measure.summary(speeds)
        assert len(speeds) == 2
        assert row["memory"] > 2**26
        assert row["setting"].startswith("fp32")
    assert table.table(result).startswith("tiny, 2 rounds, fp32; gpt2_accel reaches ")


def test_the_pages_have_the_tables_of_the_results_that_are_there(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    pages = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")] + ["README.md"]
    for page in pages:
        path = tmp_path / page
        path.write_text(re.sub(r"(<!-- bench \w+ -->).*?(<!-- /bench)", r"\1\2", path.read_text()))
    monkeypatch.setattr(sys, "argv", ["table.py", "--docs", str(tmp_path / "docs")])
    table.main()
    for page in pages:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), page
    with refused(r"has no none\.json: measure it first"):
        table.section("none")


@pytest.mark.parametrize("name", ["gpt2_fp32", "baby", "shakespeare", "chat_quickstart"])
def test_the_main_figures_of_a_cpu_are_of_this_minor_version(name):
    minor = gpt2_accel.__version__.rpartition(".")[0]
    machine = read_json(ROOT / f"benchmarks/results/cpu/{name}.json")["machine"]
    assert machine["version"].rpartition(".")[0] == minor, "measure it again"


def test_the_figures_at_the_top_of_the_readme_are_recorded():
    readme = (ROOT / "README.md").read_text()
    [quickstart] = read_results("quickstart")
    line = "val/bits_per_byte {val/bits_per_byte:.4f} at update {step:,}, xz -9 needs {xz -9:.4f}"
    assert line.format(**quickstart) in readme
    assert f"`xz -9` needs {quickstart['xz -9']:.3f} bits per byte" in readme
    assert f"the model {quickstart['val/bits_per_byte']:.2f}" in readme

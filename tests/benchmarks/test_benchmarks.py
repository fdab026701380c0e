"""The benchmarks, and the tables of their results."""

import re
import shutil
import sys

import pytest
from launching import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import measure
import table
from processes import Job

TINY = {"shape": measure.TINY, "batch_size": 4}
GENERATION = TINY | {"new_tokens": 4}


def test_every_contestant_has_a_row_that_follows_from_its_seconds(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # the job's own precision counts
    training = measure.training("tiny", None).groups[0]
    texts = [Job(kind, kind, **GENERATION) for kind in ("generate", "hf_generate")]
    found = measure.measure(measure.Benchmark("tiny", [training, texts], 5), rounds=2)
    names = ["gpt2_accel", "HF Trainer", "nanoGPT's loop", "generate", "hf_generate"]
    assert [row["name"] for row in found["rows"]] == names
    for row in found["rows"]:
        tokens = 5 * 4 * (4 if "generate" in row["name"] else 32)
        speeds = [tokens / seconds for seconds in row["seconds"]]
        assert row["tokens_per_second"] == measure.summary(speeds) and len(speeds) == 2
        assert row["memory"] > 2**26 and row["setting"].startswith("fp32")
    assert ["speed_up" in row for row in found["rows"]] == [False, True, True, False, True]
    assert 0 < found["rows"][0]["mfu"]["median"] < 1
    shown = table.table(found)
    assert shown.startswith("tiny, 2 rounds; gpt2_accel reaches ") and shown.count("\n") == 8


def test_the_pages_have_the_tables_of_the_results_that_are_there(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for path in (tmp_path / "docs").rglob("*.md"):
        path.write_text(re.sub(r"(<!-- bench \w+ -->).*?(<!-- /bench)", r"\1\2", path.read_text()))
    monkeypatch.setattr(sys, "argv", ["table.py", "--docs", str(tmp_path / "docs")])
    table.main()
    for path in (ROOT / "docs").rglob("*.md"):
        copy = tmp_path / "docs" / path.relative_to(ROOT / "docs")
        assert copy.read_text() == path.read_text(), path
    with pytest.raises(FileNotFoundError, match=r"has no none\.json: measure it first"):
        table.section("none")

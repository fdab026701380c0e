"""The table of recorded runs, when it or a record is damaged."""

import math

import pytest

from gpt2_accel.study.table import RESULT, Result, read_result, read_table, write_table

ROW = Result("ab12", "{}", 10, 2, 256, 1e6, 3.5, None, "c0de")


def test_rows_survive_the_file(tmp_path):
    rows = [ROW, Result("cd34", '{"a": 1}', 10, 2, 256, 1e6, math.inf, 1.5)]
    write_table(tmp_path / "runs.csv", rows)
    found = list(read_table(tmp_path / "runs.csv").values())
    assert sorted(found, key=lambda row: row.id) == rows


@pytest.mark.parametrize(
    "change", [("3.5", "nan"), ("3.5", "three"), ("loss", "los"), ("256", "")], ids=str
)
def test_a_damaged_table_is_refused(change, tmp_path):
    path = tmp_path / "runs.csv"
    write_table(path, [ROW])
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ValueError, match="is no table of runs .*restore it from a copy"):
        read_table(path)


@pytest.mark.parametrize("text", ["", '{"id": "ab', '{"id": "ab12"}', "[]"])
def test_a_damaged_record_counts_as_none(text, tmp_path):
    (tmp_path / RESULT).write_text(text)
    assert read_result(tmp_path) is None

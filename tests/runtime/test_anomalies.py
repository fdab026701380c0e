"""The anomaly guard, and non-finite values in the log."""

import json
import math

from gpt2_accel.runtime.files import JsonLines, read_json_lines
from gpt2_accel.runtime.guard import MAX_OVERFLOWS, AnomalyGuard


def test_endless_fp16_overflows_are_bad_updates():
    guard = AnomalyGuard()
    checks = [guard.check(2.0, math.inf, scaled=True) for _ in range(MAX_OVERFLOWS + 2)]
    assert checks[:MAX_OVERFLOWS] == [None] * MAX_OVERFLOWS
    assert all("gradient norm is inf" in problem for problem in checks[MAX_OVERFLOWS:])
    assert guard.bad_in_a_row == 2
    assert guard.check(2.0, 1.0, scaled=True) is None
    assert guard.check(2.0, math.nan, scaled=True) is None  # the count starts again


def test_non_finite_numbers_are_null_in_the_log(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl", 0)
    log.write({"step": 1, "train/grad_norm": math.inf, "train/loss": math.nan, "tokens": 3})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(text, parse_constant=lambda name: 1 / 0)
    assert strict == {"step": 1, "train/grad_norm": None, "train/loss": None, "tokens": 3}
    assert read_json_lines(tmp_path / "metrics.jsonl") == [strict]

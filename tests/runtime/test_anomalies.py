"""The anomaly guard, and non-finite values in the log."""

import json
import math
import statistics
from pathlib import Path

from conftest import as_flags, metrics, reset_accelerate
from launching import launch
from seams_script import noisy

from gpt2_accel.runtime import guard
from gpt2_accel.runtime.files import JsonLines, digest, read_json_lines
from gpt2_accel.runtime.guard import MAX_OVERFLOWS, AnomalyGuard
from gpt2_accel.train import train


def test_endless_fp16_overflows_are_bad_updates():
    guard = AnomalyGuard()
    checks = [guard.check(2.0, math.inf, scaled=True) for _ in range(MAX_OVERFLOWS + 2)]
    assert checks[:MAX_OVERFLOWS] == [None] * MAX_OVERFLOWS
    assert all("gradient norm is inf" in problem for problem in checks[MAX_OVERFLOWS:])
    assert guard.bad_in_a_row == 2
    assert guard.check(2.0, 1.0, scaled=True) is None
    assert guard.check(2.0, math.nan, scaled=True) is None  # the count starts again


def test_a_spike_is_a_value_far_above_the_last_100_good_ones():
    values = [2 + math.sin(7 * i) for i in range(150)]
    for place in (0, 1):  # the loss, the gradient norm
        guard = AnomalyGuard(spike_z=3.0)
        assert not any(guard.check(value, value) for value in values)
        border = statistics.fmean(values[-100:]) + 3 * statistics.pstdev(values[-100:])
        for spike in (border + 1e-6, 1e9, border + 1e-6):  # they do not move the border
            pair = [2.0, 2.0]
            pair[place] = spike
            assert "after a mean of" in guard.check(*pair)
            assert AnomalyGuard().check(*pair) is None
        assert guard.bad_in_a_row == 3
        assert guard.check(-1e9, border - 1e-6) is None
    young = AnomalyGuard(spike_z=3.0)
    assert not any(young.check(value, value) for value in values[:99] + [1e9])


def left_out(monkeypatch, update):
    """Skips an update, whatever it is."""
    check = AnomalyGuard.check
    calls = iter(range(10**6))

    def without(self, *figures, **how):
        return "it is left out" if next(calls) == update else check(self, *figures, **how)

    monkeypatch.setattr(AnomalyGuard, "check", without)


def test_a_batch_of_noise_leaves_no_trace_also_after_a_resume(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "WINDOW", 10)
    settings = {"max_steps": 24, "spike_z": 6.0, "save_every": 15, "keep_last": 9}
    settings |= {"optimizer": "muon", "lr_schedule": "constant", "learning_rate": 5e-3}

    def trained(folder, update, **changes):
        config = tiny(folder, **settings, **changes)
        reset_accelerate()
        train(config, objective=noisy(update))
        files = "model.safetensors", "training_state/optimizer.safetensors"
        skipped = {line["step"]: line["skipped"] for line in metrics(folder) if "skipped" in line}
        return skipped, [digest(Path(folder, "checkpoint-24", file)) for file in files]

    skipped, expected = trained(tmp_path / "noise", 20)
    assert list(skipped) == [21]
    assert "the loss is" in skipped[21]
    resume = str(tmp_path / "noise/checkpoint-15")  # inside the window
    assert trained(tmp_path / "resumed", 5, resume_from=resume) == (skipped, expected)
    left_out(monkeypatch, 20)
    assert trained(tmp_path / "left-out", None) == ({21: "it is left out"}, expected)


def test_all_ranks_skip_an_update_that_is_noise_on_one(tiny, tmp_path):
    config = tiny("run", max_steps=24, spike_z=6.0, micro_batch_size=2, lr_schedule="constant")
    launch("tests/seams_script.py", *as_flags(config), processes=2, CASE="noise", WINDOW="8")
    assert [line["step"] for line in metrics(tmp_path / "run") if "skipped" in line] == [21]
    first = digest(tmp_path / "run/weights-0.safetensors")
    assert digest(tmp_path / "run/weights-1.safetensors") == first


def test_non_finite_numbers_are_null_in_the_log(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl", 0)
    log.write({"step": 1, "train/grad_norm": math.inf, "train/loss": math.nan, "tokens": 3})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(text, parse_constant=lambda name: 1 / 0)
    assert strict == {"step": 1, "train/grad_norm": None, "train/loss": None, "tokens": 3}
    assert read_json_lines(tmp_path / "metrics.jsonl") == [strict]

"""What the log of a run says."""

from gpt2_accel.runtime import log
from gpt2_accel.runtime.log import RunLog


def test_the_time_left_is_measured_after_the_first_update(tmp_path, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    run = RunLog(
        tmp_path,
        first_step=0,
        max_steps=106,
        tokens_at=lambda step: 100 * step,
        flops_per_token=1,
        flops_per_second=None,
    )
    with run:
        for step, seconds in enumerate([30, 2, 2, 2, 2, 2, 2], start=1):
            now[0] += seconds  # the first update compiles
            run.advance(step)
            run.training(1.0, 1.0, 0.1)
            now[0] += 5  # an evaluation
            run.end_step()
    lines = [line for line in capsys.readouterr().out.splitlines() if "expected" in line]
    assert lines == ["step 6: expected: about 3 min 20 s of training, at 50 tokens/s"]

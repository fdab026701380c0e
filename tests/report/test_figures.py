"""Figures of metrics."""

import pytest

from gpt2_accel.report.reader import Run

pytest.importorskip("matplotlib")

from gpt2_accel.report import figures


def test_gpt2s_hellaswag_is_drawn_beside_the_metric_that_it_is(tmp_path):
    lines = [{"step": 1, "tokens": 8, "hellaswag/acc_norm_per_token": 0.25}]
    run = Run(tmp_path, "run", lines=lines)
    figure = figures.metrics_figure([run], ["hellaswag/acc_norm_per_token"])
    svg = figures.themed_svg(figure)
    assert "GPT-2 124M: 0.2945 (build-nanogpt)" in svg and "HellaSwag accuracy" in svg

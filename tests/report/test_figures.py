"""Figures of metrics."""

import errno
from pathlib import Path

import pytest
from conftest import run, tiny_config

from gpt2_accel.report.reader import Run

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from gpt2_accel.report import figures


def test_gpt2s_hellaswag_is_drawn_beside_the_metric_that_it_is(tmp_path):
    lines = [{"step": 1, "tokens": 8, "hellaswag/acc_norm_per_token": 0.25}]
    run = Run(tmp_path, "run", lines=lines)
    figure = figures.metrics_figure([run], ["hellaswag/acc_norm_per_token"])
    svg = figures.themed_svg(figure)
    assert "GPT-2 124M: 0.2945 (build-nanogpt)" in svg and "HellaSwag accuracy" in svg


def test_a_picture_that_cannot_be_written_leaves_the_old_one(data_dir, tmp_path, monkeypatch):
    run(tiny_config(data_dir, tmp_path / "run"))
    path = tmp_path / "loss.png"
    figures.draw_loss(tmp_path / "run", path)
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")

    def full(self, to, *_, **__):
        (Path(to).open("wb") if isinstance(to, str | Path) else to).write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space left"):
        figures.draw_loss(tmp_path / "run", path)
    assert path.read_bytes() == before and len([*tmp_path.iterdir()]) == 2

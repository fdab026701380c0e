"""Figures of metrics."""

import errno
from pathlib import Path

import numpy as np
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


def test_the_legend_names_what_is_drawn_and_a_single_point_has_a_marker(tmp_path):
    """A run without evaluation has its training loss in the legend; one without curves is not there."""
    losses = ({"train/loss": 4.0, "val/loss": 3.5}, {"train/loss": 3.0}, {"grad_norm": 1.0})
    runs = [
        Run(tmp_path, name, lines=[{"step": 8, "tokens": 64, **loss}])
        for name, loss in zip(("evaluated", "training only", "empty"), losses, strict=True)
    ]
    [ax] = figures.loss_figure(runs).axes
    named = [line.get_label() for line in ax.get_legend().get_lines()]
    assert named == ["evaluated", "training only"]
    drawn = {line.get_gid(): line for line in ax.get_lines() if len(line.get_xdata())}
    for curve in ("evaluated, training", "evaluated, validation", "training only, training"):
        assert drawn[curve].get_marker() == "o", curve
    assert figures.loss_figure(runs[2:]).axes[0].get_legend() is None


def test_the_axis_of_a_short_run_shows_its_first_loss(tmp_path):
    """The initial fall stays unless it would take more than half of the chart."""
    for later, whole in ((4.9, True), (3.5, False)):
        losses = [6.7, 6.4, 6.0, 5.5, 5.2, *np.linspace(later, 3, 95)]
        lines = [{"step": n, "tokens": n, "train/loss": y} for n, y in enumerate(losses)]
        [ax] = figures.loss_figure([Run(tmp_path, "run", lines=lines)]).axes
        assert bool(ax.get_ylim()[1] > 6.7) == whole


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

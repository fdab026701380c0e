"""Figures of metrics."""

from itertools import pairwise

import pytest

from gpt2_accel.tools.report.page import report_of
from gpt2_accel.tools.report.reader import Run

pytest.importorskip("matplotlib")


from gpt2_accel.hf.loss_plot import LEAST_SPAN


@pytest.mark.parametrize("updates", [2, 20, 19_000])
def test_curves_of_any_length_fill_their_axes(updates, tmp_path):
    """No chart of one value or of standard errors, no axis of 0.2% of a value, no labels that collide."""
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
    page = report_of([Run(tmp_path, "run", lines=lines, metadata={"flops_per_token": 8.6e8})])
    assert {*page.pictures} == {
        *("loss", "loss-over-flops", "val-perplexity", "val-steady", "train-memory_gb")
    }
    table = page.document
    assert "hellaswag/acc<" in table and "0.2500 ± 0.0100" in table
    assert "val/loss<" in table and "stderr" not in table
    for name, figure in page.pictures.items():
        renderer, [ax] = figure._get_renderer(), figure.axes
        low, high = ax.get_ylim()
        assert high - low >= LEAST_SPAN * max(abs(low), abs(high)) * 0.99, name
        for axis in (ax.xaxis, ax.yaxis):
            labels = [t.get_window_extent(renderer) for t in axis.get_ticklabels()]
            labels = [box for box in labels if box.width]
            assert not any(a.overlaps(b) for a, b in pairwise(labels)), name
    if updates == 19_000:  # the fall at the start does not flatten the rest
        assert page.pictures["val-perplexity"].axes[0].get_ylim()[1] < 100
        assert page.pictures["loss"].axes[0].get_ylim()[1] < 4

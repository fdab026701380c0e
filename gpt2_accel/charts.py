"""Points of a metric's curve, and sentences about a run's metrics."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

FEWEST = 10  # logged rewards at either end of a run


def outcome(lines: Sequence[Mapping], xz: float | None) -> str:
    """Returns how a run went so far, from the lines of `metrics.jsonl`: the first and the last
    training loss, or reward, and the best validation, beside `xz`, the bits per byte of `xz -9`."""
    words: list[str] = []
    for name in ("train/reward", "train/loss"):
        _, y = curve_points(lines, name, "step")
        if y and not words:
            words.append(f"{name} {y[0]:.4f} → {y[-1]:.4f}")
    for name in ("val/bits_per_byte", "val/loss"):
        x, y = curve_points(lines, name, "step")
        if y and len(words) < 2:
            words.append(f"best {name} {min(y):.4f} at update {x[y.index(min(y))]:,}")
    if xz and "bits_per_byte" in str(words):
        words.append(f"xz -9 needs {xz:.4f}")
    return ", ".join(words)


def fallen(lines: Iterable[Mapping]) -> str:
    """Returns a line if the reward has fallen by more than two standard errors, else "".

    Compares the mean `train/reward` of the first tenth of the lines of `metrics.jsonl` with that of
    the last, at least `FEWEST` lines each. The variance of a mean is that of the lines'
    `train/reward_stderr`, or of their spread if that is larger or no error is known.

    A run is judged at a half, at three quarters and at its end. Of simulated runs whose reward does
    not change, 4% get the line at least once; 8% with a single prompt per update.
    """
    points = [
        (line["train/reward"], line.get("train/reward_stderr") or 0)
        for line in lines
        if line.get("train/reward") is not None  # it is null without an answer that counts
    ]
    n = max(FEWEST, len(points) // 10)
    if len(points) < 2 * n:
        return ""
    ends = np.array([points[:n], points[-n:]])
    before, after = ends[..., 0].mean(1)
    variances = np.maximum((ends[..., 1] ** 2).mean(1), ends[..., 0].var(1, ddof=1)) / n
    if before - after <= 2 * variances.sum() ** 0.5:
        return ""
    return (
        f"the reward has fallen, from a mean of {before:.4g} in the first {n} logged updates to "
        f"{after:.4g} in the last {n}: start again with a lower --learning_rate"
    )


def still_falling(lines: Iterable[Mapping], updates: int, epochs: float) -> str:
    """Returns a line if the validation loss was still falling in the last of `epochs`, else "".

    It was if it is the lowest of all at the end of the run, and 0.001 nats per token or more below
    the first evaluation in that epoch; one at its start counts. The line names twice the epochs.
    The low rates at the end of a cosine hide what more epochs would give: after 20 the loss may
    stand still at any height.
    """
    x, y = curve_points(lines, "val/loss", "step")
    start = updates - math.ceil(updates / epochs)
    last = [loss for step, loss in zip(x, y, strict=True) if step >= start]
    if not last or min(y) < last[-1] or last[0] - last[-1] < 0.001:
        return ""
    return (
        f"still falling: --epochs {math.ceil(2 * epochs)}; val/loss went from {last[0]:.4g} to "
        f"{last[-1]:.4g} in the last epoch"
    )


def curve_points(
    lines: Iterable[Mapping], name: str, key: str, factor: float = 1
) -> tuple[list[float], list[float]]:
    """Returns x and y of a curve, from the lines of `metrics.jsonl`.

    y: the finite values of metric `name`; x: the last value of `key` up to that line, times
    `factor`.
    """
    xs = []
    ys = []
    amount = None
    for line in lines:
        amount = line.get(key, amount)
        y = line.get(name)
        if amount is not None and isinstance(y, int | float) and math.isfinite(y):
            xs.append(amount * factor)
            ys.append(y)
    return xs, ys

"""The batch size of each update in sequences, and the micro-batches that divide it."""

from gpt2_accel.rounding import ceil_div, round_up


class BatchSchedule:
    """The batch size of each update in sequences, from update `step` on, after `seen` sequences.

    It is `full`, or with `ramp` grows linearly from `start` to `full` over the first `ramp`
    sequences, in multiples of `start`, which divides `full` (as in GPT-3: Brown et al., 2020,
    arXiv:2005.14165, appendix B, from 32k tokens over the first 4 to 12 billion). It is a function
    of the sequences seen, so a resumed run has the same batches.

    `updates` is the number of updates, from the start of the run, that see `total` sequences. With
    a ramp the last update may be smaller, to end at `total`. Without a ramp it is full, also after
    a resume with another batch size.
    """

    def __init__(self, full: int, total: int, start: int, ramp: int, step: int, seen: int):
        self.full = full
        self.step = step
        left = max(0, total - seen)
        left = left - left % start if ramp else round_up(left, full)
        self.end = seen + left
        self.firsts = [seen]  # the first sequence of each update of the ramp, and of the next
        while seen < min(ramp, self.end):
            size = start + (full - start) * seen // ramp
            seen = min(seen + size // start * start, self.end)
            self.firsts.append(seen)
        self.ramped = step + len(self.firsts) - 1  # updates at the end of the ramp
        self.updates = self.ramped + ceil_div(self.end - seen, full)

    def first(self, step: int) -> int:
        """Returns the number of sequences before update `step`."""
        assert step >= self.step, (step, self.step)
        if step < self.ramped:
            return self.firsts[step - self.step]
        return min(self.firsts[-1] + (step - self.ramped) * self.full, self.end)

    def sequences(self, step: int) -> int:
        """Returns the batch size of update `step`."""
        return self.first(step + 1) - self.first(step)


def halved(size: int, total: int) -> int:
    """Halves the micro-batch `size` until it divides `total` sequences.

    Halving keeps the number of compiled shapes small.
    """
    while total % size:
        size = max(size // 2, 1)
    return size

"""Early stopping: ends a run whose validation loss no longer falls."""


class EarlyStopping:
    """Counts evaluations without a lower validation loss; `limit` of them in a row end the run, 0 never does."""

    def __init__(self, limit: int = 0):
        self.limit, self.waited = limit, 0
        self.best: float | None = None

    def exhausted(self, loss: float | None) -> bool:
        """Takes note of an evaluation, unless it gave no loss; returns whether it was one too many."""
        if loss is None:
            return False
        if self.best is None or loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the run has ended by it, perhaps before a restart."""
        return self.limit > 0 and self.waited >= self.limit

    def state(self) -> dict:
        """What a resume needs."""
        return {"best": self.best, "waited": self.waited}

    def load(self, state: dict) -> None:
        """Takes `state()` of an earlier run."""
        self.best, self.waited = state.get("best"), state.get("waited", 0)

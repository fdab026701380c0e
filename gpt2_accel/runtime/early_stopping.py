"""Early stopping: ends a run whose validation loss no longer falls."""


class EarlyStopping:
    """Counts evaluations in a row without a lower validation loss. `limit` of them end the run; 0 means never."""

    def __init__(self, limit: int = 0):
        self.limit, self.waited = limit, 0
        self.best: float | None = None

    def exhausted(self, loss: float | None) -> bool:
        """Counts one evaluation, unless `loss` is None. Returns whether the run ends."""
        if loss is None:
            return False
        if self.best is None or loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether early stopping has ended the run, also before a resume."""
        return self.limit > 0 and self.waited >= self.limit

    def state(self) -> dict:
        """Returns the state to save in a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def load(self, state: dict) -> None:
        """Restores the result of `state()`."""
        self.best, self.waited = state.get("best"), state.get("waited", 0)

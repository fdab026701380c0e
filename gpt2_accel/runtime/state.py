"""The state that training changes, and what a checkpoint holds of it."""

import torch

from gpt2_accel.config import TrainConfig
from gpt2_accel.runtime.guard import AnomalyGuard, EarlyStopping


class TrainState:
    """The state that training changes.

    `model` and `optimizer` are prepared by Accelerate. `step` is the number of updates done, `schedule` the sequences of
    each update, `guard` and `early_stopping` what they have seen, and `run_id` the run's id in the trackers. `processes`
    is the number of processes. Raises the errors of `TrainConfig.batch_schedule`.
    """

    def __init__(
        self,
        config: TrainConfig,
        processes: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ):
        self._config, self._processes = config, processes
        self.model, self.optimizer = model, optimizer
        self.schedule = config.batch_schedule(processes)
        self.guard, self.early_stopping = (
            AnomalyGuard(config.spike_z),
            EarlyStopping(config.patience),
        )
        self.step, self.run_id = 0, None

    def state_dict(self) -> dict:
        """Returns the state beside the tensors, for a checkpoint.

        `position` is the number of sequences read and the settings that determine their order."""
        return {
            "step": self.step,
            "position": {
                "sequences": self.schedule.first(self.step),
                **order_settings(self._config),
            },
            "guard": self.guard.state() | self.early_stopping.state(),
            "run_id": self.run_id,
        }

    def load_state_dict(self, saved: dict) -> None:
        """Restores the result of `state_dict`. The schedule goes on from the sequences that were read.

        Release 0.1 has no `position`: the sequences are those of this schedule."""
        self.step, self.run_id = saved["step"], saved["run_id"]
        self.guard.load(saved["guard"])
        self.early_stopping.load(saved["guard"])
        seen, position = self.schedule.first(self.step), saved["position"]
        if position is not None:
            seen = (
                position["sequences"]
                * position["sequence_length"]
                // self._config.tokens_per_sequence
            )
        self.schedule = self._config.batch_schedule(self._processes, self.step, seen)


def order_settings(config: TrainConfig) -> dict[str, int]:
    """Returns the settings that determine the order of the data."""
    return {"seed": config.seed, "sequence_length": config.tokens_per_sequence}

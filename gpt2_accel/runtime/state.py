"""The state that training changes, and what a checkpoint holds of it."""

from pathlib import Path

import torch

from gpt2_accel.config import TrainConfig
from gpt2_accel.runtime.guard import AnomalyGuard, EarlyStopping


class TrainState:
    """The state that training changes.

    `model` and `optimizer` are prepared by Accelerate. `step` is the number of updates done, `schedule` the sequences of
    each update, `guard` and `early_stopping` what they have seen, and `run_id` the run's id in the trackers. `unevaluated` says
    that the checkpoint of a resume has no validation loss. `processes` is the number of processes. Raises the errors of `TrainConfig.batch_schedule`.
    """

    def __init__(
        self,
        config: TrainConfig,
        processes: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ):
        self._config, self._processes = config, processes
        # The settings that determine the order of the data.
        self._order = {"seed": config.seed, "sequence_length": config.tokens_per_sequence}
        self.model, self.optimizer = model, optimizer
        self.schedule = config.batch_schedule(processes)
        self.guard = AnomalyGuard(config.spike_z)
        self.early_stopping = EarlyStopping(config.patience)
        self.step, self.run_id = 0, None
        self.unevaluated = False

    def state_dict(self) -> dict:
        """Returns the state beside the tensors, for a checkpoint.

        `position` is the number of sequences read and the settings that determine their order."""
        return {
            "step": self.step,
            "position": {"sequences": self.schedule.first(self.step), **self._order},
            "guard": self.guard.state() | self.early_stopping.state(),
            "run_id": self.run_id,
        }

    def load_state_dict(self, saved: dict, source: Path) -> None:
        """Restores the result of `state_dict` from the checkpoint `source`. The schedule continues from its position.

        Raises `ValueError` if a setting that determines the order of the data has changed, unless `ignore_changes` is
        set."""
        config, position = self._config, saved["position"]
        for name, value in self._order.items():
            if position[name] != value and not config.ignore_changes:
                raise ValueError(
                    f"{source} was trained with --{name} {position[name]}, not {value}, which changes the order of "
                    "the data: resume with the former value, or with --ignore_changes"
                )
        seen = position["sequences"] * position["sequence_length"] // config.tokens_per_sequence
        self.step, self.run_id = saved["step"], saved["run_id"]
        self.guard.load(saved["guard"])
        self.early_stopping.load(saved["guard"])
        self.schedule = config.batch_schedule(self._processes, self.step, seen)

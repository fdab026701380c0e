"""An exponential moving average of the weights, which is evaluated and saved as a model in `ema/`.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/ema.py \\
        --config recipes/changes/small.yaml --data_dir data/python_stdlib --output_dir runs/ema

After each update: average = decay · average + (1 - decay) · weights. Training does not use the
average, so the losses are the same as without it. Checkpoints have it, so a resume continues it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpt2_accel import cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import torch

from gpt2_accel.checkpoint.state_dict import shard_like, unwrap
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.run import Run
from gpt2_accel.train import train


class EMA:
    def __init__(self, decay: float = 0.99):
        self.decay = decay
        self.average: dict[str, torch.Tensor] = {}
        self.saved: dict[str, Any] = {}

    def on_train_begin(self, run: Run) -> None:
        self.weights = dict(unwrap(run.accelerator, run.model).named_parameters())
        for name, weight in self.weights.items():
            start = self.saved.get(name, weight.detach().clone())
            self.average[name] = shard_like(start, weight)

    @torch.no_grad()
    def on_step_end(self, run: Run, skipped: bool) -> None:
        if not skipped:
            for name, weight in self.weights.items():
                self.average[name].lerp_(weight, 1 - self.decay)
        if run.due(run.config.eval_every):
            with self.in_use():
                run.validate("ema/")

    def on_train_end(self, run: Run, finished: bool) -> None:
        if finished:
            with self.in_use():
                run.save_model(run.run_dir / "ema")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Replaces the weights of the model by the average inside the block."""
        kept = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.copy(self.average)
        yield
        self.copy(kept)

    @torch.no_grad()
    def copy(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(tensors[name])

    def state_dict(self) -> dict[str, Any]:
        return self.average

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state


def main() -> None:
    train(parse_config(TrainConfig), callbacks=[EMA()])


if __name__ == "__main__":
    cli.run(main)

"""A curriculum of sequence lengths: 64, then 128, then 256 tokens, each for a third of the updates.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/curriculum.py \\
        --config recipes/changes/small.yaml --n_positions 256 --data_dir data/python_stdlib \\
        --output_dir runs/curriculum

Short sequences are cheaper, and a new model cannot use long ones yet (Li et al., 2022,
arXiv:2108.06084). The objective cuts each window into shorter ones: an update has the same tokens
as without. The validation loss is of whole windows.
"""

from gpt2_accel import cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import torch

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.data.loader import Batch
from gpt2_accel.run import Loss, Run
from gpt2_accel.train import next_token_loss, train

STAGES = 3


class Curriculum:
    """The objective, and the callback that tells it the stage."""

    def __init__(self) -> None:
        self.stage = 0

    def on_train_begin(self, run: Run) -> None:
        self.stage = min(STAGES * run.step // run.updates, STAGES - 1)

    def on_step_end(self, run: Run, skipped: bool) -> None:
        self.on_train_begin(run)

    def __call__(self, model: torch.nn.Module, batch: Batch) -> Loss:
        length = batch.input_ids.shape[1] >> (STAGES - 1 - self.stage)
        ids, targets = batch.input_ids.reshape(-1, length), batch.targets.reshape(-1, length)
        return next_token_loss(model, batch._replace(input_ids=ids, targets=targets))


def main() -> None:
    curriculum = Curriculum()
    train(parse_config(TrainConfig), objective=curriculum, callbacks=[curriculum])


if __name__ == "__main__":
    cli.run(main)

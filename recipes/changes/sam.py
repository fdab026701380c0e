"""Sharpness-aware minimization, SAM (Foret et al., 2021, arXiv:2010.01412): two passes an update.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/sam.py \\
        --config recipes/changes/small.yaml --data_dir data/python_stdlib --output_dir runs/sam

The first pass finds the direction in which the loss of the update grows fastest. The weights move
0.05 in this direction, and the second pass computes the gradients there, for the weights as they
were. The loss is that of the first pass. An update takes twice the time. Expected of the command
above, over five seeds: a validation loss of 4.3 to 4.8. With so few updates this is not better than
without SAM (`quickstart.py` with these settings and AdamW: 4.3 to 4.7, in half the time).
"""

from gpt2_accel import cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import torch

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.run import MicroBatches, Run
from gpt2_accel.train import accumulate_gradients, train

RHO = 0.05  # the norm of the move


@torch.no_grad()
def move(run: Run) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Moves the weights along the gradient; returns a copy of each from before."""
    scale = RHO / run.gradient_norm()
    before = {}
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            before[parameter] = parameter.detach().clone()
            parameter.add_(parameter.grad * scale)
    return before


def sam(run: Run, batches: MicroBatches) -> dict[str, torch.Tensor]:
    figures = accumulate_gradients(run, batches)
    before = move(run)
    run.optimizer.zero_grad()
    try:
        accumulate_gradients(run, batches)
    finally:  # also if a signal stops the run here: the checkpoint has the weights as they were
        with torch.no_grad():
            for parameter, weight in before.items():
                parameter.copy_(weight)
    return figures


def main() -> None:
    train(parse_config(TrainConfig), gradients=sam)


if __name__ == "__main__":
    cli.run(main)

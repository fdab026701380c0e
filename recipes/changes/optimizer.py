"""The optimizer Lion (Chen et al., 2023, arXiv:2302.06675), a tenth of the rate for embeddings.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/optimizer.py \\
        --config recipes/changes/small.yaml --data_dir data/python_stdlib --output_dir runs/lion \\
        --learning_rate 3e-4

The schedule keeps the ratio between the rates of the groups. Checkpoints have all of its state: the
momentum, the number of updates, and the largest absolute values of each weight's last gradients.
"""

from typing import Any

from gpt2_accel import cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import torch

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.models import LanguageModel
from gpt2_accel.train import train


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, weight_decay: float, beta1: float = 0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "updates": 0})
        self.beta1 = beta1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["updates"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                direction = momentum.lerp(weight.grad, 1 - self.beta1).sign()
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(direction * group["lr"])
                momentum.lerp_(weight.grad, 0.01)
                sizes = state.setdefault("sizes", [])
                sizes.append(float(weight.grad.abs().max()))
                state["sizes"] = sizes[-3:]


def lion(model: LanguageModel, config: TrainConfig) -> Lion:
    embeddings = [model.head_weight]
    others = [weight for weight in model.parameters() if weight is not model.head_weight]
    groups = [{"params": embeddings, "lr": config.learning_rate / 10}, {"params": others}]
    return Lion(groups, config.learning_rate, config.weight_decay)


def main() -> None:
    train(parse_config(TrainConfig), optimizer=lion)


if __name__ == "__main__":
    cli.run(main)

"""A mixture of experts in place of each MLP, as in Switch Transformer (Fedus et al., 2021,
arXiv:2101.03961): one expert per token.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/moe.py \\
        --config recipes/changes/small.yaml --data_dir data/python_stdlib --output_dir runs/moe
    python recipes/sample.py --model runs/moe --model_class recipes/changes/moe.py:MoE

The load balancing loss of a sequence is E · Σ f · p over the E experts, where f is the share of its
tokens that an expert gets and p its mean probability. Per sequence, it does not depend on how an
update is divided into micro-batches. Each expert computes all tokens: this is simple, and every
expert always has a gradient.
"""

from typing import TYPE_CHECKING

from gpt2_accel import GPT, GPTConfig, cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import torch
from torch import nn

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.data.loader import Batch
from gpt2_accel.models.gpt2 import MLP
from gpt2_accel.train import train

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Experts(nn.Module):
    def __init__(self, config: GPTConfig, number: int = 4):
        super().__init__()
        self.router = nn.Linear(config.n_embd, number, bias=False)
        self.experts = nn.ModuleList(MLP(config) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, C) -> (B, T, C)."""
        probability = self.router(x).softmax(dim=-1)  # (B, T, E)
        chosen = nn.functional.one_hot(probability.argmax(dim=-1), len(self.experts))
        shares = chosen.float().mean(dim=1) * probability.mean(dim=1)  # (B, E)
        self.balance = len(self.experts) * shares.sum(dim=-1).mean()
        gates = probability * chosen
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = y + gates[..., number, None] * expert(x)
        return y


class MoE(GPT):
    def __init__(self, config: GPTConfig):
        super().__init__(config)
        for block in self.h:
            block.mlp = Experts(config)
        self.init_weights()


def new_model(config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> MoE:
    return MoE(GPTConfig.from_settings(config, len(tokenizer)))


def objective(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(batch.input_ids, batch.targets, documents=batch.documents)
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    balance = torch.stack([layer.balance for layer in layers]).mean()
    return loss + 0.01 * balance, {"balance": balance}


def main() -> None:
    train(parse_config(TrainConfig), model=new_model, objective=objective)


if __name__ == "__main__":
    cli.run(main)

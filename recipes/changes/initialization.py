"""The recipe of a study: GPT-2 with its own initial weights, or with PyTorch's defaults.

    python recipes/compare.py recipes/studies/initialization.yaml

`--initialization` is one of:
- `gpt2`, the initial weights of this package: N(0, 0.02), a smaller standard deviation for the
  projections onto the residual stream, biases of zero;
- `pytorch`, `reset_parameters` of each module: U(±1 / sqrt(inputs)) for weights and biases of
  `nn.Linear`, N(0, 1) for `nn.Embedding`;
- `linear`, `reset_parameters` of each `nn.Linear` only.

The head is tied to the embedding. `recipes/shakespeare_char.py --dry_run` prepares the data.
"""

from dataclasses import dataclass

from gpt2_accel import GPT, GPTConfig, cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import torch
from torch import nn

from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.tokenizer import PreTrainedTokenizerBase
from gpt2_accel.train import train

# The modules that get PyTorch's initial weights.
RESET: dict[str, tuple[type[nn.Linear | nn.Embedding], ...]] = {
    "gpt2": (),
    "pytorch": (nn.Linear, nn.Embedding),
    "linear": (nn.Linear,),
}


@dataclass
class Initialization(TrainConfig):
    initialization: str = setting("gpt2", ", ".join(RESET))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initialization not in RESET:
            raise ValueError(
                f"initialization must be one of {', '.join(RESET)}, got {self.initialization!r}"
            )


def new_model(config: Initialization, tokenizer: "PreTrainedTokenizerBase") -> GPT:
    """Returns a new model with the initial weights that `config.initialization` names."""
    model = GPT(GPTConfig.from_settings(config, len(tokenizer)))
    for module in model.modules():
        if isinstance(module, RESET[config.initialization]):
            module.reset_parameters()
    with torch.no_grad():  # an in-place write to a parameter is not part of a graph
        model.wte.weight[model.config.vocab_size :] = 0  # the padding rows
    return model


def main() -> None:
    train(parse_config(Initialization), model=new_model)


if __name__ == "__main__":
    cli.run(main)

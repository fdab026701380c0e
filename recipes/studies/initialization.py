"""A study's recipe: GPT-2 from its own initial weights, or from those that PyTorch gives each
module.

    python recipes/compare.py recipes/studies/initialization.yaml

`--initialization gpt2` is that of the package: N(0, 0.02), smaller on the residual stream, and no
biases. `pytorch` calls `reset_parameters` of each module: U(±1/sqrt(inputs)) for weights and biases
of `nn.Linear`, N(0, 1) for `nn.Embedding`. `linear` does so for `nn.Linear` only. The head is tied
to the embedding. Data: `recipes/shakespeare_char.py --dry_run`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from gpt2_accel import GPT, cli
from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.hf.convert import configured_shape
from gpt2_accel.train import train

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESET = {"gpt2": (), "pytorch": (nn.Linear, nn.Embedding), "linear": (nn.Linear,)}


@dataclass
class Initialization(TrainConfig):
    initialization: str = setting("gpt2", ", ".join(RESET))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initialization not in RESET:
            raise ValueError(f"initialization must be one of {', '.join(RESET)}")


def new_model(config: Initialization, tokenizer: "PreTrainedTokenizerBase") -> GPT:
    """Returns a new model with the weights that `config.initialization` names."""
    model = configured_shape(config, len(tokenizer)).build()
    for module in model.modules():
        if isinstance(module, RESET[config.initialization]):
            module.reset_parameters()
    model.wte.weight.data[model.config.vocab_size :] = 0  # the padding
    return model


def main() -> None:
    train(parse_config(Initialization), model=new_model)


if __name__ == "__main__":
    cli.run(main)

"""Compares the trained module with the class of `transformers`, and saves it in the right form.

A model that differs, or with tensors that `transformers` does not have, is saved under the
`model_type` of `convert.CUSTOM`: `transformers` refuses it and does not load another model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from gpt2_accel.hf.any_model import open_class
from gpt2_accel.hf.convert import hf_config, save_pretrained, special_ids
from gpt2_accel.hf.model_card import Training
from gpt2_accel.hf.tensors import HEAD, to_hf
from gpt2_accel.models import LanguageModel, filled, skeleton
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.tokenizer import PreTrainedTokenizerBase

TOKENS = 64  # largest number of tokens that both models read
SMALLER = 1 / 8  # a power of two, so weights are scaled exactly
LIMIT = 7.0  # largest difference; measured: 1.2 without, 24 with a change (docs/architecture.md)


@dataclass
class ModelFiles:
    """Writes the directories of a run's model, and decides on their form.

    `custom` is the reason why `transformers` cannot open the model, empty if it can. `compared`:
    its logits were compared.
    """

    tokenizer: "PreTrainedTokenizerBase"
    print_line: Callable[[str], None]
    custom: str = ""
    compared: bool = False

    def save(
        self,
        model: LanguageModel,
        directory: Path,
        training: Training | None = None,
        name: str | None = None,
    ) -> None:
        """Writes the directory of a model in host memory.

        The first time it compares the tensors' names and shapes, writes the directory, and compares
        the logits. Raises `ValueError` if the tokenizer does not fit the model.
        """
        if isinstance(model, AnyModel):
            self.compared = True  # it is a class of transformers
        if not (self.custom or self.compared):
            self.custom = unknown_tensors(model)
        write = partial(
            save_pretrained, model, directory, self.tokenizer, training=training, name=name
        )
        write(custom=self.custom)
        if self.compared or model.device.type == "meta":
            return
        self.compared = True
        if not self.custom:
            gap = difference(model, directory)
            if not gap <= LIMIT:  # NaN too
                self.custom = f"its logits differ by {gap:.2g} times their rounding error"
                write(custom=self.custom)
        if self.custom:
            self.print_line(
                f"transformers cannot open this model ({self.custom}): it is saved in a form of "
                "its own, see its README.md"
            )


def unknown_tensors(model: LanguageModel) -> str:
    """Returns why `transformers` has no model with these tensors.

    Empty if its model has the same names and shapes. Takes no memory for weights.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hf_config(model.config, special_ids(None, 0)))
    expected = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    actual = {name: tensor.shape for name, tensor in to_hf(model).items()}
    actual.setdefault(HEAD, expected[HEAD])  # a tied head is not stored
    differ = expected.items() ^ actual.items()
    return f"its {min(differ)[0]} differs" if differ else ""


@torch.no_grad()
def difference(model: LanguageModel, directory: Path) -> float:
    """Returns the largest difference between the logits of a model and of its directory.

    The unit is the rounding error of these logits: how much they change if the last bit of each
    weight changes. It is 1e-6 of their standard deviation in a small model, 1e-5 in SmolLM2-135M.
    Both models are compared twice, first with all weights an eighth as large: the activations of a
    trained model hide the epsilon of a norm.

    The model is on the CPU, `transformers` opens the directory, and both compute in fp32. The
    model's weights change meanwhile. The document mask, a setting of training, is left out.
    """
    theirs = open_class(directory).eval()  # fp32: bf16 would change the default dtype
    config = model.config
    generator = torch.Generator().manual_seed(0)
    shape = 1, min(TOKENS, config.n_positions)
    input_ids = torch.randint(config.vocab_size, shape, generator=generator)
    ours = filled(skeleton(model), model.state_dict()).float().eval()
    ours.separator = None
    gaps = []
    for factor in (SMALLER, 1 / SMALLER):
        for parameter in chain(ours.parameters(), theirs.parameters()):
            parameter.mul_(factor)
        expected = theirs(input_ids).logits
        gaps.append((ours(input_ids) - expected).abs().max() / expected.std())
    for parameter in theirs.parameters():
        parameter.nextafter_(torch.zeros(()))
    rounding = (theirs(input_ids).logits - expected).abs().max() / expected.std()
    return (torch.stack(gaps).max() / rounding.clamp(min=1e-7)).item()

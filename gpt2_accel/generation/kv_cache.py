"""KV cache of the trained model: keys and values of past tokens, in transformers' cache layers.

Rows of several lengths have padding at their left, so all end at the same slot. Shape letters: B
rows, T tokens, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from gpt2_accel.models import LanguageModel
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.runtime.device import best_device, has_cpp_compiler
from gpt2_accel.tokenizer import print_once


class KVCache:
    """What a model in evaluation mode has read of a batch of rows.

    With `slots` it has memory for that many tokens of one row, and the forward of one token is
    compiled. Else memory grows. A class of `transformers` has its own cache, without `slots`. A
    class without a cache, or one that counts positions itself, reads its rows again for each token,
    and so does a model with a block that leaves its layer of the cache empty.
    """

    def __init__(self, model: LanguageModel, slots: int = 0):
        self.model = model
        self.slots = 0 if isinstance(model, AnyModel) else slots
        self.decode = compiled() if self.slots else next_logits

    def start(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """Clears the cache and reads rows of token ids, none empty.

        Returns the logits of the token after each row, (B, V).
        """
        self.layers = self.model.new_cache(self.slots)
        ids = [torch.tensor(row, device=self.model.device) for row in rows]
        input_ids = pad_sequence(ids, batch_first=True, padding_side="left")
        self.input_ids = input_ids[:, :0]
        self.end = 0
        lengths = torch.tensor([len(row) for row in rows], device=self.model.device)
        self.padding = input_ids.shape[1] - lengths
        self.is_padded = len({len(row) for row in rows}) > 1
        logits = self._run(next_logits, input_ids)
        if isinstance(self.layers, list) and not all(each.is_initialized for each in self.layers):
            print_once(
                f"a block of {type(self.model).__name__} does not put its keys and values into "
                "`past`: samples are generated without a cache, more slowly"
            )
            self.layers = None
            self.end = 0
            return self.read(input_ids)  # without padding, which such a block may read
        return logits

    def read(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Reads the next token of each row, (B, 1).

        Returns the logits of the token after it, (B, V).
        """
        return self._run(self.decode, input_ids)

    def _run(self, forward: Callable[..., torch.Tensor], input_ids: torch.Tensor) -> torch.Tensor:
        T = input_ids.shape[1]
        places = torch.arange(self.end, self.end + T, device=input_ids.device)
        self.end += T
        if self.layers is None:
            self.input_ids = torch.cat([self.input_ids, input_ids], dim=1)
            rows = [row[None, n:] for row, n in zip(self.input_ids, self.padding, strict=True)]
            return torch.cat([self.model(row, logits_to_keep=1)[:, -1] for row in rows])
        slots = self.slots or self.end
        if not (self.slots or self.is_padded or isinstance(self.model, AnyModel)):
            slots = 0  # all rows attend to all that is there: kernels without a mask are faster
        return forward(self.model, input_ids, places, self.padding, self.layers, slots)


def next_logits(
    model: LanguageModel,
    input_ids: torch.Tensor,
    places: torch.Tensor,
    padding: torch.Tensor,
    layers: Sequence[Any],
    slots: int,
) -> torch.Tensor:
    """Runs the model on tokens (B, T) in the slots `places` (T); returns the last logits (B, V).

    `padding`, (B,), is the number of unused slots before each row. The layers return the keys of
    `slots` slots; 0 if all are used, so that no mask is needed.
    """
    mask = None
    if slots:
        all_slots = torch.arange(slots, device=places.device)
        mask = all_slots >= padding[:, None]  # (B, slots)
        if not isinstance(model, AnyModel):
            causal = all_slots <= places[:, None]  # (T, slots)
            # A padding slot attends to itself, since a softmax over nothing would be NaN.
            itself = all_slots == places[:, None]
            mask = causal & (itself | mask[:, None, None])  # (B, 1, T, slots)
    positions = (places - padding[:, None]).clamp(min=0)  # (B, T)
    logits = model(
        input_ids, position_ids=positions, attention_mask=mask, logits_to_keep=1, cache=layers
    )
    return logits[:, -1]


@functools.cache
def compiled() -> Callable[..., torch.Tensor]:
    """Returns `next_logits` compiled. Raises `ValueError` without a C++ compiler or GPU."""
    if best_device().type == "cpu" and not has_cpp_compiler():
        raise ValueError("compile needs a C++ compiler: install g++, set CXX, or leave compile out")
    return torch.compile(next_logits, dynamic=False, fullgraph=True)

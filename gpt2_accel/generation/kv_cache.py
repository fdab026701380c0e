"""KV cache of the trained model: keys and values of past tokens, in transformers' cache layers.

Rows of several lengths have padding at their left, so all end at the same place. Shape letters: B
rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from gpt2_accel.models import LanguageModel
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.tokenizer import print_once


class KVCache:
    """What a model in evaluation mode has read of a batch of rows.

    A class of `transformers` has its own cache. A class without a cache, or one that counts
    positions itself, reads its rows again for each token, and so does a model with a block that
    leaves its layer of the cache empty.
    """

    def __init__(self, model: LanguageModel):
        self.model = model

    def start(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """Clears the cache and reads rows of token ids, none empty.

        Returns the logits of the token after each row, (B, V).
        """
        self.layers = self.model.new_cache()
        ids = [torch.tensor(row, device=self.model.device) for row in rows]
        input_ids = pad_sequence(ids, batch_first=True, padding_side="left")
        self.input_ids = input_ids[:, :0]
        self.end = 0
        lengths = torch.tensor([len(row) for row in rows], device=self.model.device)
        self.padding = input_ids.shape[1] - lengths
        self.is_padded = len({len(row) for row in rows}) > 1
        logits = self.read(input_ids)
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
        """Reads the next tokens of each row, (B, T).

        Returns the logits of the token after them, (B, V).
        """
        T = input_ids.shape[1]
        places = torch.arange(self.end, self.end + T, device=input_ids.device)
        self.end += T
        if self.layers is None:
            self.input_ids = torch.cat([self.input_ids, input_ids], dim=1)
            rows = [row[None, n:] for row, n in zip(self.input_ids, self.padding, strict=True)]
            return torch.cat([self.model(row, logits_to_keep=1)[:, -1] for row in rows])
        mask = None
        if isinstance(self.model, AnyModel) or self.is_padded:  # kernels without a mask are faster
            every = torch.arange(self.end, device=places.device)
            mask = every >= self.padding[:, None]  # (B, end)
            if not isinstance(self.model, AnyModel):
                causal = every <= places[:, None]  # (T, end)
                # A padding token attends to itself, since a softmax over nothing would be NaN.
                itself = every == places[:, None]
                mask = causal & (itself | mask[:, None, None])  # (B, 1, T, end)
        logits = self.model(
            input_ids,
            position_ids=(places - self.padding[:, None]).clamp(min=0),
            attention_mask=mask,
            logits_to_keep=1,
            cache=self.layers,
        )
        return logits[:, -1]

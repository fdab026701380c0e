"""KV cache: the keys and values of past tokens, for generation without recomputing them.

Rows of different lengths have left padding, so that all end at the same slot. Memory is allocated once. Shape letters
as in `models/gpt2.py`.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from gpt2_accel.device import best_device, has_cpp_compiler
from gpt2_accel.models import LanguageModel, LayerCache

Layers = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each block: (B, H, slots, D)


class KVCache:
    """The KV cache of a batch of rows, for a model in evaluation mode.

    `rows` are token ids, at least one per row. `slots`, at most `n_positions`, is the most tokens that a row can have.
    Device and dtype are those of the weights. With `compile` the forward of one token is compiled, once each for one row, for
    several rows of one length, and for several rows with padding.

    `logits` (B, vocab_size), in the dtype of the weights, predict the token after each row.
    """

    def __init__(
        self, model: LanguageModel, rows: Sequence[list[int]], slots: int, *, compile: bool = False
    ):
        config, device = model.config, model.device
        longest = max(map(len, rows))
        assert 0 < min(map(len, rows)) and longest <= slots <= config.n_positions
        self.model, self.compile, self.slots = model, compile, slots
        self.end = 0  # slots in use
        padding = [longest - len(row) for row in rows]
        self.padding = torch.tensor(padding, device=device) if any(padding) else None
        # One unused slot: the compiler would treat a slice of all slots as another case.
        n_layer, n_head, head_dim = config.cache_shape
        shape = (len(rows), n_head, slots + 1, head_dim)
        options = {"device": device, "dtype": model.dtype}
        self.layers: Layers = [
            (torch.zeros(shape, **options), torch.zeros(shape, **options)) for _ in range(n_layer)
        ]
        padded = [[0] * pad + row for pad, row in zip(padding, rows, strict=True)]
        self.logits = self._read(torch.tensor(padded, device=device))

    def append(self, ids: torch.Tensor) -> None:
        """Appends tokens to each row and updates `logits`. ids: (B, T) int64."""
        assert self.end + ids.shape[1] <= self.slots
        self.logits = self._read(ids)

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens of rows without padding. `logits` are valid after an `append`."""
        assert self.padding is None and length <= self.end
        self.end = length

    def _read(self, input_ids: torch.Tensor) -> torch.Tensor:
        T = input_ids.shape[1]
        self.end += T
        slots = torch.arange(self.end - T, self.end, device=input_ids.device)
        positions, mask = slots[None], None
        if self.padding is not None:
            positions = (slots - self.padding[:, None]).clamp(min=0)  # (B, T)
            mask = padding_mask(self.padding, slots, self.end)
        elif 1 < T < self.end:  # torch's causal mask would begin at the first slot
            mask = padding_mask(slots.new_zeros(1), slots, self.end)
        run = compiled() if self.compile and T == 1 and self.end > 1 else next_logits
        return run(self.model, input_ids, positions, mask, self.layers, slots, self.end)


def padding_mask(padding: torch.Tensor, slots: torch.Tensor, end: int) -> torch.Tensor:
    """Returns the attention mask of the tokens in `slots` (T) over the first `end` slots: (B, 1, T, end) bool, True
    where attended.

    A padding slot attends to itself only, since a softmax over nothing would be NaN.
    """
    seen = torch.arange(end, device=slots.device)
    causal = seen <= slots[:, None]  # (T, end)
    itself = seen == slots[:, None]
    filled = seen >= padding[:, None, None, None]  # (B, 1, 1, end)
    return causal & (filled | itself)


def next_logits(
    model: LanguageModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    layers: Layers,
    slots: torch.Tensor,
    end: int,
) -> torch.Tensor:
    """Runs `model.decode` on tokens (B, T), stored in `slots` (T) up to `end`; returns the logits (B, vocab_size)."""
    cache = [LayerCache(keys, values, slots, end) for keys, values in layers]
    return model.decode(input_ids, positions, mask, cache)


@functools.cache
def compiled() -> Callable[..., torch.Tensor]:
    """Returns `next_logits` compiled with dynamic shapes. Raises `ValueError` without a C++ compiler or GPU."""
    if best_device().type == "cpu" and not has_cpp_compiler():
        raise ValueError("compile needs a C++ compiler: install g++, set CXX, or leave compile out")
    return torch.compile(next_logits, dynamic=True)

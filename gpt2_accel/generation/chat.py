"""A conversation with a model. The KV cache stays between turns, so a turn costs its own tokens."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from gpt2_accel.generation.kv_cache import KVCache
from gpt2_accel.generation.sampling import (
    Completion,
    Sampling,
    encode_prompt,
    stream,
    user_turn,
)
from gpt2_accel.models import LanguageModel, evaluating
from gpt2_accel.tokenizer import prompt_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOM = 1024  # tokens for which a conversation's first cache has memory at least
Message = Mapping[str, str]
"""A message: `role` is "system", "user" or "assistant", `content` its text."""


class Chat:
    """Answers conversations. What a conversation has in common with the one before is not computed again.

    `dropped` is the number of messages that the last answer was given without: when a conversation outgrows the model's
    positions, its oldest turns are dropped. Raises `ValueError` if the tokenizer has no chat template.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: "PreTrainedTokenizerBase", compile: bool = False
    ):
        prompt_tokens(tokenizer, user_turn("Hi"))  # raises without a chat template
        self.model, self.tokenizer, self.compile = model, tokenizer, compile
        self.dropped = 0
        self._cache: KVCache | None = None
        self._read: list[int] = []  # the tokens in the cache, and maybe more

    def answer(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[Completion]:
        """Yields the assistant's next message after each token; always the same object, one token longer.

        `messages` is the whole conversation, which ends with the user's. An answer ends where the positions do. Raises
        `ValueError` for a conversation without a user's message at the end or with one that is too long, and the errors of
        `encode_prompt`.
        """
        n_positions = self.model.config.n_positions
        room = min(sampling.max_new_tokens, n_positions // 2)
        kept, prompt = fit(self.tokenizer, messages, n_positions, room)
        self.dropped = len(messages) - len(kept)
        room = min(sampling.max_new_tokens, n_positions - len(prompt))
        sampling = replace(sampling, max_new_tokens=room, num_samples=1)
        self._fill_cache(prompt, room)
        for (answer,) in stream(
            self.model, self.tokenizer, [kept], sampling, compile=self.compile, cache=self._cache
        ):
            self._read = prompt + answer.ids
            yield answer

    @torch.no_grad()
    def _fill_cache(self, prompt: list[int], room: int) -> None:
        """Reads `prompt` into the cache, without the tokens at its start that the cache holds already; it then has
        room for `room` more."""
        slots = len(prompt) + room
        with evaluating(self.model):
            if self._cache is not None and slots <= self._cache.slots:
                before = self._read[: self._cache.end]
                known = 0
                # The last token is read always: it gives the logits.
                while known < min(len(before), len(prompt) - 1) and before[known] == prompt[known]:
                    known += 1
                self._cache.truncate(known)
                self._cache.append(torch.tensor([prompt[known:]], device=self.model.device))
            else:
                slots = min(max(2 * slots, ROOM), self.model.config.n_positions)
                self._cache = KVCache(self.model, [prompt], slots, compile=self.compile)
        self._read = prompt


def fit(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    n_positions: int,
    room: int,
) -> tuple[list[Message], list[int]]:
    """Drops the oldest turns until `room` of `n_positions` tokens are free; returns the messages and their tokens.

    The system prompt and the last turn stay. The number of renderings is logarithmic in the number of turns. Raises the
    errors of `Chat.answer`.
    """
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    turns = list(messages[len(system) :])
    starts = [0, *(i for i in range(1, len(turns)) if turns[i]["role"] == "user")]

    def prompt(start: int) -> list[int]:
        return encode_prompt(tokenizer, [*system, *turns[start:]])

    first = bisect_left(starts, True, key=lambda i: len(prompt(i)) + room <= n_positions)
    start = starts[min(first, len(starts) - 1)]
    ids = prompt(start)
    if len(ids) >= n_positions:
        raise ValueError(
            f"the last message has {len(ids):,} tokens with the chat template and the system prompt, and the model reads "
            f"{n_positions:,}: write less"
        )
    return [*system, *turns[start:]], ids

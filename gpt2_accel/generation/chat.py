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

Message = Mapping[str, str]
"""A message: `role` is "system", "user" or "assistant", `content` its text."""


class Chat:
    """Answers conversations. What a conversation has in common with the one before is not computed again.

    `dropped` is the number of messages that the last answer was given without: when a conversation outgrows the model's
    positions, its oldest turns are dropped. `computed` is the number of prompt tokens that it computed. Raises `ValueError`
    if the tokenizer has no chat template.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: "PreTrainedTokenizerBase", *, compile: bool = False
    ):
        prompt_tokens(tokenizer, user_turn("Hi"))  # raises without a chat template
        self.model, self.tokenizer, self.compile = model, tokenizer, compile
        self.dropped = self.computed = 0
        self._cache: KVCache | None = None
        self._prompt: list[int] = []
        self._answer = Completion([])

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
        self._read(prompt)
        written = stream(
            self.model, self.tokenizer, [kept], sampling, compile=self.compile, cache=self._cache
        )
        for (self._answer,) in written:
            yield self._answer

    @torch.no_grad()
    def _read(self, prompt: list[int]) -> None:
        """Reads `prompt` into the cache, without the tokens at its start that the cache holds already."""
        cache, known = self._cache, 0
        if cache is not None:
            before = (self._prompt + self._answer.ids)[: cache.end]
            pairs = zip(before, prompt[:-1], strict=False)  # the last token gives the logits
            known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        with evaluating(self.model):
            if known:
                cache.truncate(known)
                cache.append(torch.tensor([prompt[known:]], device=self.model.device))
            else:
                slots = min(2 * len(prompt), self.model.config.n_positions)
                cache = KVCache(self.model, [prompt], slots, compile=self.compile)
        self._cache, self._prompt, self._answer = cache, prompt, Completion([])
        self.computed = len(prompt) - known


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
        what = "the system prompt and the last message have" if system else "the last message has"
        raise ValueError(
            f"{what} {len(ids):,} tokens with the template, and the model reads {n_positions:,}: write less"
        )
    return [*system, *turns[start:]], ids

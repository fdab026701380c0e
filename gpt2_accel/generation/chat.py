"""A conversation with a model. The KV cache stays between turns, so a turn costs its own tokens."""

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
        kept, prompt = self._fit(messages, min(sampling.max_new_tokens, n_positions // 2))
        self.dropped = len(messages) - len(kept)
        room = min(sampling.max_new_tokens, n_positions - len(prompt))
        sampling = replace(sampling, max_new_tokens=room, num_samples=1)
        self._read(prompt)
        written = stream(
            self.model, self.tokenizer, [kept], sampling, compile=self.compile, cache=self._cache
        )
        for (self._answer,) in written:
            yield self._answer

    def _fit(self, messages: Sequence[Message], room: int) -> tuple[list[Message], list[int]]:
        """Drops the oldest turns until `room` tokens are free; returns the messages and their tokens."""
        n_positions = self.model.config.n_positions
        system = list(takewhile(lambda message: message["role"] == "system", messages))
        turns = list(messages[len(system) :])
        prompt = encode_prompt(self.tokenizer, [*system, *turns])
        while len(prompt) + room > n_positions:
            later = (i for i in range(1, len(turns)) if turns[i]["role"] == "user")
            if (first := next(later, None)) is None:
                break
            turns = turns[first:]
            prompt = encode_prompt(self.tokenizer, [*system, *turns])
        if len(prompt) >= n_positions:
            what = (
                "the system prompt and the last message have" if system else "the last message has"
            )
            raise ValueError(
                f"{what} {len(prompt):,} tokens with the template, and the model reads {n_positions:,}: write less"
            )
        return [*system, *turns], prompt

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

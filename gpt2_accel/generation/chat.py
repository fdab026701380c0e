"""Answers in a conversation. Drops its oldest turns if the model has too few positions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpt2_accel.generation.sampling import Completion, Sampling, encode_prompt, stream
from gpt2_accel.models import LanguageModel
from gpt2_accel.tokenizer import PreTrainedTokenizerBase


def answer(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    sampling: Sampling,
) -> tuple[int, Iterator[list[Completion]]]:
    """Returns the number of dropped messages, and the assistant's next message from `stream`.

    `messages` is the full conversation, which ends with a message of the user. A quarter of the
    model's positions is kept free for the answer, or fewer if `sampling` wants fewer. The answer
    ends at the last position. Raises `ValueError` if the last turn is too long or refused.
    """
    n_positions = model.config.n_positions
    room = min(sampling.max_new_tokens, n_positions // 4)
    kept, tokens = drop_oldest_turns(tokenizer, messages, n_positions, room)
    longest = min(sampling.max_new_tokens, n_positions - tokens)
    sampling = replace(sampling, max_new_tokens=longest, num_samples=1)
    return len(messages) - len(kept), stream(model, tokenizer, [kept], sampling)


def drop_oldest_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    n_positions: int,
    room: int,
) -> tuple[list[Mapping[str, str]], int]:
    """Drops the oldest turns until `room` of `n_positions` tokens are free.

    Returns the messages and the number of their tokens. The system prompt and the last turn stay.
    Raises `ValueError` if the last turn is too long or refused.
    """
    turns = list(messages)
    system: list[Mapping[str, str]] = []
    while turns and turns[0]["role"] == "system":
        system.append(turns.pop(0))
    last = len(turns) - 1
    start = 0
    length = len(encode_prompt(tokenizer, messages))
    while length + room > n_positions and start < last:
        start += 1
        if turns[start]["role"] == "user":
            length = len(encode_prompt(tokenizer, system + turns[start:]))
    if length >= n_positions:
        raise ValueError(
            f"the last message has {length:,} tokens with the chat template and the system prompt, "
            f"and the model reads {n_positions:,}: write less"
        )
    return system + turns[start:], length

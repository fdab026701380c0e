"""Pairs of answers: rows with `chosen` and `rejected` become two conversations that differ in their last message.

| form                 | fields of a row                                                                          |
|----------------------|------------------------------------------------------------------------------------------|
| prompt and answers   | `prompt`, `chosen`, `rejected`: texts or lists of messages, as in `messages.py`          |
| whole conversations  | `chosen`, `rejected`: lists of messages that begin with the prompt, optionally `prompt`  |

`system` or `system_prompt` beside them is the system's message. Only the last answer counts.
"""

from typing import Any

from gpt2_accel.data.messages import (
    EMPTY,
    FORMS,
    Problem,
    as_messages,
    read_messages,
    role_of,
)

ANSWERS = ("chosen", "rejected")
# Why a pair is left out.
NO_LAST_ANSWER = "without a message of the assistant at the end of each answer"
OTHER_PROMPTS = "whose answers have different prompts"
EQUAL = "whose answers are equal"
PAIR_TOO_LONG = (
    "with an answer that has, with its prompt, more tokens than the longest conversation allowed"
)


def read_pair(row: Any, place: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Returns the messages of the chosen and of the rejected conversation, which are equal but for the last, the assistant's.

    Raises `ValueError` for a row in none of the forms, and `Problem` for a pair that cannot be trained on.
    """
    if not isinstance(row, dict) or not row.keys() >= {*ANSWERS}:
        found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{place}, has {found}, no pair of answers: write prompt, chosen and rejected, each a text or a list of messages"
        )
    if not (row["chosen"] and row["rejected"]):
        raise Problem(EMPTY)
    chosen, rejected = (read_answer(row, name, place) for name in ANSWERS)
    if any(not messages or messages[-1]["role"] != "assistant" for messages in (chosen, rejected)):
        raise Problem(NO_LAST_ANSWER)
    if chosen[:-1] != rejected[:-1]:
        raise Problem(OTHER_PROMPTS)
    if chosen == rejected:
        raise Problem(EQUAL)
    return chosen, rejected


def read_answer(row: dict, name: str, place: str) -> list[dict[str, str]]:
    """Returns the messages of the conversation that ends with the answer `name`. Raises the errors of `read_messages`, and
    `Problem` if it holds its prompt, and that is not the row's `prompt`."""
    answer, prompt = row[name], row.get("prompt")
    # Data sets of pairs may have the chosen conversation as messages, too.
    rest = {field: value for field, value in row.items() if field not in (*FORMS, *ANSWERS)}
    if isinstance(answer, list) and begins_with_prompt(answer):
        messages, _ = read_messages({**rest, "messages": answer}, place)
        asked = []
        if prompt:
            asked, _ = read_messages({"messages": as_messages(prompt, "user")}, place)
        if not all(message in messages[:-1] for message in asked):
            raise Problem(OTHER_PROMPTS)
        return messages
    if not prompt:
        raise ValueError(
            f"{place}, has no prompt: write it in prompt, or as the first messages of chosen and rejected"
        )
    return read_messages({**rest, "prompt": prompt, "completion": answer}, place)[0]


def begins_with_prompt(messages: list) -> bool:
    """Whether the first message is not the assistant's."""
    try:
        return role_of(messages[0]) != "assistant"
    except (AttributeError, KeyError, TypeError):  # `read_messages` says what is wrong
        return False

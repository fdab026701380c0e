"""Pairs of answers: rows with `chosen` and `rejected` become two conversations that differ in their last message.

| form                 | fields of a row                                                                          |
|----------------------|------------------------------------------------------------------------------------------|
| prompt and answers   | `prompt`, `chosen`, `rejected`: texts or lists of messages, as in `messages.py`          |
| whole conversations  | `chosen`, `rejected`: lists of messages that begin with the prompt, optionally `prompt`  |

`system` or `system_prompt` beside them is the system's message. Only the last answer counts.
"""

from typing import Any

from gpt2_accel.data.messages import FORMS, Problem, as_messages, read_messages

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
    chosen, rejected = (read_answer(row, name, place) for name in ANSWERS)
    if chosen[:-1] != rejected[:-1]:
        raise Problem(OTHER_PROMPTS)
    if chosen == rejected:
        raise Problem(EQUAL)
    return chosen, rejected


def read_answer(row: dict, name: str, place: str) -> list[dict[str, str]]:
    """Returns the messages of the conversation that ends with the answer `name`. Raises `ValueError` without a prompt, the
    errors of `read_messages`, and `Problem` if the last message is not the assistant's, or a whole conversation lacks the
    row's `prompt`."""
    own, _ = read_messages({"messages": as_messages(row[name], "assistant")}, place)
    if not own or own[-1]["role"] != "assistant":
        raise Problem(NO_LAST_ANSWER)
    prompt = row.get("prompt")
    # Data sets of pairs may have the chosen conversation as messages, too.
    beside = {field: value for field, value in row.items() if field not in (*FORMS, *ANSWERS)}
    asked, _ = read_messages({**beside, "messages": as_messages(prompt or [], "user")}, place)
    first = own[0]["role"]
    if first == "assistant":
        if not prompt:
            raise ValueError(
                f"{place}, has no prompt: write it in prompt, or as the first messages of chosen and rejected"
            )
        return asked + own
    if first != "system":
        own = [message for message in asked if message["role"] == "system"] + own
    if not all(message in own[:-1] for message in asked):
        raise Problem(OTHER_PROMPTS)
    return own

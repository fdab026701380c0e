"""Reads the messages of a conversation, or of a pair of answers, from a row of a data set.

| form                      | fields of a row                                                     |
|---------------------------|---------------------------------------------------------------------|
| messages                  | `messages`: a list of `role` and `content`, or its JSON             |
| ShareGPT                  | `conversations`: a list of `from` (human, gpt, system) and `value`  |
| prompt and completion     | `prompt`, `completion`: texts or lists of messages; the completion  |
|                           | counts                                                              |
| Alpaca, Dolly, GSM8K      | `instruction` or `question`; `output`, `response` or `answer`;      |
|                           | optionally `input` or `context`                                     |
| pair, prompt and answers  | `prompt`, `chosen`, `rejected`: texts or lists of messages          |
| pair, full conversations  | `chosen`, `rejected`: lists of messages that begin with the prompt, |
|                           | optionally `prompt`                                                 |

A row with several forms is read in the first of them. A field `system` or `system_prompt` is the
system message, `tools` has the JSON schemas of the tools. A text that begins with an empty line and
"Human:" is a transcript, as in Anthropic's pairs; "Human:" and "Assistant:" after empty lines begin
its messages.
"""

import re
from typing import Any

from gpt2_accel.runtime.files import parse_json

Message = dict[str, Any]
ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    "model": "assistant",
    "tool": "tool",
}
# The fields that tell the form of a row.
FORMS = """
    messages conversations prompt completion instruction question output response answer
""".split()  # noqa: SIM905
# Fields of a message for the chat template.
PASSED = ("tool_calls", "reasoning_content", "reasoning", "thinking", "name", "tool_call_id")
# Fields of a row, a message or a part that would change a conversation if they are not empty.
UNSUPPORTED = """
    tools functions history tool_calls function_call reasoning_content reasoning thinking image
    images image_url audio audios input_audio video videos file
""".split()  # noqa: SIM905
TOOLS = ("tools", "file")  # of a row: a column `file` names where it is from
# The text of a list of messages.
LISTED = re.compile(
    r"""(?s)\s*\[\s*{.*["'](role|from)["']\s*:\s*["'](system|user|assistant|human|gpt)["']"""
)
# A turn of a transcript ends where the other side speaks.
TURNS = re.compile(r"(?s)\n\n(Human|Assistant):(.*?)(?=\n\n(?!\1)(?:Human|Assistant):|\Z)")
# Why a conversation or a pair is left out.
EMPTY = "without messages, or with one without text"
UNWANTED = "with a label of false, which is not a completion to learn"
NOT_SUPPORTED = "with messages of a form that is not supported"
NO_LAST_ANSWER = "without a message of the assistant that counts at the end of each answer"
NOT_ALTERNATING = "with a transcript in which one side speaks twice in a row"
OTHER_PROMPTS = "whose answers have different prompts"
EQUAL = "whose answers are equal"


class Problem(Exception):
    """A conversation cannot be trained on; the message says why."""


# Conversations


def read_messages(row: Any, place: str) -> tuple[list[Message], list[bool]]:
    """Returns the messages of a row, and which of them may count in the loss.

    A message has `role`, `content`, which is "" for null, and the fields of `PASSED` that are not
    empty.

    Messages of a prompt do not count, nor do those with a `weight` of 0. System messages without
    text are dropped. Raises `ValueError` for a row in none of the forms, or with a `weight` other
    than 0 and 1, `Problem` for a conversation that cannot be trained on.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}, holds a value of type {type(row).__name__}, not an object: write "
            '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}'
        )
    messages = []
    counts = []
    try:
        for message in raw_messages(row, place):
            role = role_of(message)
            content = message.get("content")
            content = text_of(message.get("value") if content is None else content)
            weight = message.get("weight")
            check_supported(row, TOOLS)
            check_supported(message, PASSED)
            if weight not in (None, 0, 1):
                raise ValueError(
                    f"{place}, has a message with a weight of {weight!r}: give 1, or 0 for a "
                    "message that does not count"
                )
            others = {name: message[name] for name in PASSED if message.get(name)}
            if content.strip() or role == "tool" or "tool_calls" in others:
                messages.append({"role": role, "content": content} | others)
                counts.append(weight != 0)
            elif role != "system":
                raise Problem(EMPTY)
    except (AttributeError, KeyError, TypeError) as error:  # another role, or no text
        raise Problem(NOT_SUPPORTED) from error
    return messages, counts


def raw_messages(row: dict, place: str) -> list:
    """Returns the messages of a row, unchecked; the messages of a prompt get a `weight` of 0."""
    fields = {name: value for name, value in row.items() if value is not None}

    def first(*names: str) -> Any:
        return next((fields[name] for name in names if name in fields), None)

    answer = first("output", "response", "answer")
    task = first("instruction", "question", "prompt")
    messages = listed(first("messages", "conversations"))
    if isinstance(messages, list):
        pass
    elif "prompt" in fields and "completion" in fields:
        label = fields.get("label", True)
        word = str(label).lower()
        if word in ("false", "0", "0.0"):  # a bad completion, in data sets for KTO
            raise Problem(UNWANTED)
        if word not in ("true", "1", "1.0"):
            raise ValueError(
                f"{place}, has a label of {label!r}: give true, or false for a completion that is "
                "not to be learned"
            )
        messages = [message | {"weight": 0} for message in as_messages(fields["prompt"], "user")]
        messages += as_messages(fields["completion"], "assistant")
    elif task is not None and answer is not None:
        given = fields.get("input") or fields.get("context")
        both = [text for text in (text_of(task), text_of(given)) if text.strip()]
        messages = as_messages("\n\n".join(both), "user") + as_messages(answer, "assistant")
    elif not fields or any(not row.get(name, True) for name in FORMS):
        raise Problem(EMPTY)
    elif "chosen" in fields:
        raise ValueError(
            f"{place}, is a pair of answers, not a conversation: prepare it with --pairs, or train "
            "on it by chat_dpo.py"
        )
    else:
        raise ValueError(
            f"{place}, has the fields {', '.join(map(str, fields))}, but a conversation has a list "
            "in messages or conversations; or prompt and completion; or instruction, question or "
            "prompt, and output, response or answer: rename or correct them"
        )
    system = first("system", "system_prompt")
    if system is not None and not (messages and role_of(messages[0]) == "system"):
        return as_messages(system, "system") + messages
    return messages


def as_messages(value: Any, role: str) -> list:
    """Returns a list of messages, also one of JSON or a transcript; else one message of `role`.

    The cue of an answer at the end of a transcript, "Assistant:", is left out. Raises `Problem` for
    a transcript whose turns do not alternate.
    """
    value = listed(value)
    if isinstance(value, list):
        return value
    if not str(value).startswith("\n\nHuman:"):
        return [{"role": role, "content": value}]
    turns = TURNS.findall(value.rstrip().removesuffix("\n\nAssistant:"))
    if any(f"\n\n{speaker}:" in text for speaker, text in turns):
        raise Problem(NOT_ALTERNATING)
    return [{"from": speaker.lower(), "value": text.strip()} for speaker, text in turns]


def listed(value: Any) -> Any:
    """Parses a list of messages in JSON; returns anything else unchanged.

    Raises `Problem` for a list in another notation, such as the Python lists that pandas writes
    into CSV.
    """
    if isinstance(value, str) and LISTED.match(value):
        try:
            return parse_json(value)
        except ValueError as error:
            raise Problem(NOT_SUPPORTED) from error
    return value


def role_of(message: dict[str, Any]) -> str:
    """Returns the role of a message, one of `ROLES`' values. Raises `Problem` for another.

    A tool of ShareGPT is another role: its text has the marks of one model's template.
    """
    name = message.get("role") or message["from"]
    role = ROLES.get(name.lower())
    if role is None or (role == "tool" and "role" not in message):
        raise Problem(f"with the role {name!r}, which is not supported")
    return role


def text_of(content: Any) -> str:
    """Returns the text of a message; text parts, `{"type": "text", "text": …}`, are joined.

    Raises `Problem`, `AttributeError`, `KeyError` or `TypeError` for other content.
    """
    if isinstance(content, str | int | float):  # a number, as an answer may be
        return str(content)
    text = ""
    for part in content or []:
        check_supported(part)
        if part.get("type") not in (None, "text"):
            raise Problem(f"with a part of type {part['type']!r}, which is not supported")
        text += part["text"]
    return text


def check_supported(fields: dict, allowed: tuple[str, ...] = ()) -> None:
    """Raises `Problem` if a row, a message or a part has a field that is not supported."""
    for name in UNSUPPORTED:
        if name not in allowed and fields.get(name):
            raise Problem(f"with a field {name!r} where it is not supported")


# Pairs of answers


def read_pair(row: Any, place: str) -> tuple[list[Message], list[Message]]:
    """Returns the messages of the chosen and of the rejected conversation.

    They differ only in the last message, an answer of the assistant. Raises `ValueError` for a row
    in none of the forms, and `Problem` for a pair that cannot be trained on.
    """
    if not isinstance(row, dict) or not row.keys() >= {"chosen", "rejected"}:
        raise ValueError(
            f"{place}, is not a pair of answers: write prompt, chosen and rejected, each a text or "
            "a list of messages"
        )
    chosen = read_answer(row, "chosen", place)
    rejected = read_answer(row, "rejected", place)
    if chosen[:-1] != rejected[:-1]:
        raise Problem(OTHER_PROMPTS)
    return chosen, rejected


def read_answer(row: dict, name: str, place: str) -> list[Message]:
    """Returns the messages of the conversation that ends with the answer `name`.

    Raises `ValueError` without a prompt or for a row of another form, and `Problem` if the last
    message is not an answer that counts, or if a full conversation does not begin with the row's
    `prompt`.
    """
    check_supported(row, TOOLS)
    answered, counts = read_messages({"messages": as_messages(row[name], "assistant")}, place)
    if not answered or answered[-1]["role"] != "assistant" or not counts[-1]:
        raise Problem(NO_LAST_ANSWER)
    prompt = row.get("prompt") or []
    if not prompt and len(answered) == 1:
        raise ValueError(
            f"{place}, has no prompt: write it in prompt, or as the first messages of chosen and "
            "rejected"
        )
    asked, _ = read_messages(row | {"messages": as_messages(prompt, "user")}, place)
    system = [message for message in asked[:1] if message["role"] == "system"]
    first = answered[0]["role"]
    whole = answered if first == "system" else system + answered
    if first == "system" and not system:
        asked = answered[:1] + asked
    if whole[:-1][: len(asked)] == asked:  # a full conversation
        return whole
    if first != "assistant" or any(message in asked for message in answered[:-1]):
        raise Problem(OTHER_PROMPTS)
    return asked + answered

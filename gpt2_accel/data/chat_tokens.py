"""Conversations as token ids, by a tokenizer's chat template: for training and for answers."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpt2_accel.runtime.files import first_line
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, special_pattern

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The texts of messages and tools that a chat template has to print.
MARKED = re.compile(
    r"\.messages\.(content|reasoning_content|reasoning|thinking|tool_calls(\.function)?"
    r"\.(name|arguments.*))|\.tools(\.function)?\.name"
)
ESCAPED = re.compile(r'[\s"\\]+')
PIECES = (
    "{% for piece in messages %}{% if piece.role == 'assistant' %}"
    "{% generation %}{{ piece.content }}{% endgeneration %}{% else %}{{ piece.content }}"
    "{% endif %}{% endfor %}"
)


def conversation_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids of a conversation, (n,) int64, and a mask of assistant tokens, (n,) bool.

    The `training_template` marks the assistant's tokens. Without such a template they are found by
    prefixes, see `answer_pieces`.

    `messages` are those of `read_messages`, `tools` JSON schemas. Special tokens in them are
    encoded as such. Raises `ValueError` if such a prefix is not found or a message or a tool is not
    printed, and whatever the chat template raises.
    """
    template = training_template(tokenizer)
    marks: list[str] = []
    marked = with_marks({"messages": messages, "tools": tools}, "", marks)
    text = "".join(_render(tokenizer, **marked, chat_template=template, tokenize=False).split())
    if any(mark not in text for mark in marks):
        raise ValueError(
            "the chat template leaves out a message, or a part of one, such as tools or reasoning"
        )
    if template is None:
        template = PIECES
        messages = answer_pieces(tokenizer, messages, tools)
    encoding = _render(
        tokenizer, messages, tools, chat_template=template, return_assistant_tokens_mask=True
    )
    return np.array(encoding["input_ids"], np.int64), np.array(encoding["assistant_masks"], bool)


def with_marks(value: Any, place: str, marks: list[str]) -> Any:
    """Returns a part of a conversation with a mark at the end of each text that is to be printed.

    The mark tells a short text from the template's own. The texts, which are added to `marks`, are
    without white space, which templates trim, and without what JSON escapes.
    """
    if isinstance(value, dict):
        return {key: with_marks(part, f"{place}.{key}", marks) for key, part in value.items()}
    if isinstance(value, list):
        return [with_marks(part, place, marks) for part in value]
    if value and isinstance(value, str) and MARKED.fullmatch(place):
        value = f"{ESCAPED.sub('', value)}\ue000{len(marks)}\ue000"
        marks.append(value)
    return value


def training_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Returns the chat template that marks the assistant's tokens by `{% generation %}`.

    It is the tokenizer's own template if that marks them, otherwise TRL's training template for the
    tokenizer; None if TRL has none or is not installed.
    """
    return _marking_template(tokenizer, tokenizer.get_chat_template())


@functools.lru_cache(maxsize=1)
def _marking_template(tokenizer: "PreTrainedTokenizerBase", template: str) -> str | None:
    """Returns `training_template`; `template` is the tokenizer's own, which may change."""
    if GENERATION.search(template):
        return template
    try:
        from trl.chat_template_utils import get_training_chat_template

        return get_training_chat_template(tokenizer)
    except Exception:  # TRL is not installed, does not know the template, or cannot render it
        return None


def answer_pieces(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
) -> list[dict[str, str]]:
    """Returns a conversation's text in the tokenizer's chat template, as messages for `PIECES`.

    An answer is the text that the template adds to the prompt before it, up to the end of the turn.
    Raises `ValueError` if the prompt or the turn is not a prefix of the conversation.
    """
    render = functools.partial(_render, tokenizer, tools=tools, tokenize=False)
    whole = render(messages)
    end = 0
    pieces = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:number], add_generation_prompt=True)
        after = render(messages[: number + 1])
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= end):
            raise ValueError(
                "the chat template renders a turn differently when another turn follows"
            )
        pieces.append({"role": "prompt", "content": whole[end : len(before)]})
        end = len(after)
        pieces.append({"role": "assistant", "content": whole[len(before) : end]})
    pieces.append({"role": "prompt", "content": whole[end:]})
    return pieces


def prompt_tokens(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]]
) -> list[int]:
    """Returns the token ids of a conversation, up to where the assistant's next message begins.

    Raises `ValueError` if the tokenizer has no chat template, if the template or the tokenizer
    refuses the messages, if the last message is not from the user, or for a message that is empty,
    is not valid Unicode or holds a special token, which could forge a turn. The assistant's
    messages are not checked.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "this model has no chat template, so it cannot be talked to: fine-tune it by "
            "chat_sft.py, or give it a text to continue"
        )
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("a conversation to answer ends with a message of the user: add one")
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":  # only messages of users and the system are checked
            continue
        if not content.strip():
            raise ValueError("the message is empty: write something")
        if content != content.encode(errors="ignore").decode():  # bytes become surrogates
            raise ValueError("the message holds bytes that are not UTF-8: leave them out")
        special = special_pattern(tokenizer).search(content)
        if special:
            raise ValueError(
                f"the message holds the special token {special[0]}, which could forge a turn: "
                "write it differently"
            )
    try:
        return _render(tokenizer, messages, add_generation_prompt=True)["input_ids"]
    except Exception as error:  # templates and tokenizers raise many types
        raise ValueError(
            f"the chat template or the tokenizer refuses the conversation: {first_line(error)}"
        ) from error


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    tools: list[Any] | None = None,
    **options: Any,
) -> Any:
    """Returns the chat template's encoding of a conversation, a mapping to lists of integers.

    With `tokenize=False` in `options` it is the text.
    """
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=tools,
        return_dict=True,
        tokenizer_kwargs={"verbose": False},  # no warning of more tokens than positions
        **options,
    )

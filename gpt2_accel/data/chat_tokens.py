"""Conversations as token ids, by a tokenizer's chat template: for training and for answers."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpt2_accel.runtime.files import first_line
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, special_tokens

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PIECES = (
    "{% for piece in messages %}{% if piece.role == 'assistant' %}"
    "{% generation %}{{ piece.content }}{% endgeneration %}{% else %}{{ piece.content }}"
    "{% endif %}{% endfor %}"
)


def conversation_tokens(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids of a conversation, (n,) int64, and a mask of assistant tokens, (n,) bool.

    The `training_template` marks the assistant's tokens. Without such a template they are found by
    prefixes, see `answer_pieces`.

    `messages` have a `role` and a `content`. Special tokens in them are encoded as such. Raises
    `ValueError` if such a prefix is not found or a message is not printed, and whatever the chat
    template raises.
    """
    template = training_template(tokenizer)
    # The mark tells a short message from the template's own text; templates may trim white space.
    marked = [
        {**message, "content": "".join(message["content"].split()) + "\0"} for message in messages
    ]
    text = "".join(_render(tokenizer, marked, chat_template=template, tokenize=False).split())
    if text.count("\0") < len(marked) or any(turn["content"] not in text for turn in marked):
        raise ValueError("the chat template leaves out a message, or a part of one")
    if template is None:
        template = PIECES
        messages = answer_pieces(tokenizer, messages)
    encoding = _render(
        tokenizer, messages, chat_template=template, return_assistant_tokens_mask=True
    )
    return np.array(encoding["input_ids"], np.int64), np.array(encoding["assistant_masks"], bool)


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
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """Returns a conversation's text in the tokenizer's chat template, as messages for `PIECES`.

    An answer is the text that the template adds to the prompt before it, up to the end of the turn.
    Raises `ValueError` if the prompt or the turn is not a prefix of the conversation.
    """
    whole = _render(tokenizer, messages, tokenize=False)
    end = 0
    pieces = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:number], tokenize=False, add_generation_prompt=True)
        after = _render(tokenizer, messages[: number + 1], tokenize=False)
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
        for token in special_tokens(tokenizer):
            if token in content:
                raise ValueError(
                    f"the message holds the special token {token}, which could forge a turn: "
                    "write it differently"
                )
    try:
        return _render(tokenizer, messages, add_generation_prompt=True)["input_ids"]
    except Exception as error:  # templates and tokenizers raise many types
        raise ValueError(
            f"the chat template or the tokenizer refuses the conversation: {first_line(error)}"
        ) from error


def _render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]], **options: Any
) -> Any:
    """Returns the chat template's encoding of a conversation, a mapping to lists of integers.

    With `tokenize=False` in `options` it is the text.
    """
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        return_dict=True,
        tokenizer_kwargs={"verbose": False},  # no warning of more tokens than positions
        **options,
    )

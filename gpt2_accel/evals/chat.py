"""Answers to questions: exact match, and whether answers end by themselves.

An item has a `prompt`, a text or a list of messages, an `answer`, and perhaps a `group`. The prompt
is read as a conversation of the training data and rendered by the model's chat template, and the
answer is generated greedily.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.data.messages import Problem, as_messages, read_messages
from gpt2_accel.evals.items import Item
from gpt2_accel.evals.metrics import combine
from gpt2_accel.generation.sampling import Prompt, Sampling, complete, encode_prompt
from gpt2_accel.models import ModelConfig
from gpt2_accel.runtime.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 256  # of an answer
TOGETHER = 64  # answers that are generated at once


class ChatQuestion(NamedTuple):
    """A prompt and its length in tokens, the expected answer, and the group, "" for none."""

    prompt: Prompt
    tokens: int
    answer: str
    group: str


class ChatAnswers:
    """The evaluation of a model of shape `config` on questions.

    Raises `ValueError`, naming the item, for one without a prompt or an answer, or with a prompt
    that leaves no room for an answer, and if the tokenizer has no chat template.
    """

    def __init__(
        self, items: Sequence[Item], tokenizer: "PreTrainedTokenizerBase", config: ModelConfig
    ):
        self.tokenizer = tokenizer
        self.n_positions = config.n_positions
        found = [read_question(item, tokenizer, config.n_positions) for item in items]
        self.questions = sorted(found, key=lambda question: question.tokens)
        self.notes = [f"chat: {len(items):,} items"]

    @torch.no_grad()
    def __call__(self, accelerator: Accelerator, model: torch.nn.Module) -> dict[str, float]:
        """Returns `chat/exact_match`, spaces at the ends apart, and `chat/stop_rate`, the share of
        answers that end by themselves, with standard errors. If items have groups, also
        `chat/exact_match_GROUP` of each.

        All ranks call it. The ranks share the batches, of `TOGETHER` questions of similar length.
        """
        plain = unwrap(accelerator, model)
        starts = range(0, len(self.questions), TOGETHER)
        batches = [self.questions[start : start + TOGETHER] for start in starts]
        own = batches[accelerator.process_index :: accelerator.num_processes]
        found: list[tuple[str, str, str, str | None]] = []  # group, expected, answer, how it ended
        for batch in progress(own, "answering", len(own), shown=accelerator.is_main_process):
            room = self.n_positions - batch[-1].tokens
            sampling = Sampling(max_new_tokens=min(MAX_NEW_TOKENS, room), temperature=0)
            prompts = [question.prompt for question in batch]
            answers = complete(plain, self.tokenizer, prompts, sampling)
            for question, answer in zip(batch, answers, strict=True):
                found.append((question.group, question.answer, answer.text, answer.ended))
        return chat_scores(gather_object(found))


def chat_scores(found: Sequence[tuple[str, str, str, str | None]]) -> dict[str, float]:
    """Returns the results for answers: the group, the expected answer, the answer, and how it
    ended."""
    ends = [answer[-1] for answer in found]
    parts: dict[str, dict[str, list[Any]]] = {
        "exact_match": matches(found),
        "stop_rate": {"predictions": ends, "references": ["end_of_text"] * len(ends)},
    }
    for name in sorted({group for group, *_ in found} - {""}):
        parts[f"exact_match_{name}"] = matches([own for own in found if own[0] == name])
    return combine("chat", "exact_match", parts)


def matches(found: Sequence[tuple[str, str, str, str | None]]) -> dict[str, list[Any]]:
    """Returns the columns of `exact_match` for answers, as in `chat_scores`."""
    _, expected, answers, _ = map(list, zip(*found, strict=True))
    return {"predictions": answers, "references": expected}


def read_question(
    item: Item, tokenizer: "PreTrainedTokenizerBase", n_positions: int
) -> ChatQuestion:
    """Checks an item and returns its question. Raises `ValueError` as `ChatAnswers`."""
    prompt = item.field("prompt", str | list)
    answer = item.field("answer", str)
    group = item.field("group", str) if "group" in item.fields else ""
    try:
        messages, _ = read_messages({"messages": as_messages(prompt, "user")}, item.place)
        tokens = len(encode_prompt(tokenizer, messages))
    except (Problem, ValueError) as error:
        raise ValueError(f"{item.place} has a prompt that cannot be answered: {error}") from error
    if tokens >= n_positions:
        raise ValueError(
            f"{item.place} has a prompt of {tokens:,} tokens, and the model reads {n_positions:,}: "
            "remove it"
        )
    return ChatQuestion(messages, tokens, answer, group)

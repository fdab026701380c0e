"""Chat evaluation: exact match of answers, and how often an answer ends by itself.

An item has a `prompt` (a text or a list of messages), an `answer`, and optionally a `group`. The
model's chat template renders the prompt, and the answer is generated greedily.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.data.messages import Problem, as_messages, read_messages
from gpt2_accel.evals.formulas import accuracy, exact_match
from gpt2_accel.evals.items import Item
from gpt2_accel.generation.sampling import Completion, Prompt, Sampling, complete, encode_prompt
from gpt2_accel.models import ModelConfig
from gpt2_accel.runtime.progress import progress
from gpt2_accel.tokenizer import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 256  # the longest answer
BATCH_SIZE = 64  # answers that are generated at once


class ChatQuestion(NamedTuple):
    """A prompt, its length in tokens, the expected answer, and the group, "" for none."""

    prompt: Prompt
    tokens: int
    answer: str
    group: str


class ChatAnswers:
    """The `Evaluation` on questions.

    Raises `ValueError` if an item has no prompt or answer, if a prompt fills the model's
    `n_positions`, or if the tokenizer has no chat template.
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
        """Returns `chat/exact_match`, which ignores spaces at both ends, and `chat/stop_rate`, the
        share of answers that end by themselves, with standard errors; also
        `chat/exact_match_GROUP` of each group.

        All ranks call it; each generates some of the batches of `BATCH_SIZE` questions of similar
        length.
        """
        plain = unwrap(accelerator, model)
        starts = range(0, len(self.questions), BATCH_SIZE)
        batches = [self.questions[start : start + BATCH_SIZE] for start in starts]
        own = batches[accelerator.process_index :: accelerator.num_processes]
        found: list[tuple[ChatQuestion, Completion]] = []
        for batch in progress(own, "answering", len(own), shown=accelerator.is_main_process):
            room = self.n_positions - batch[-1].tokens
            sampling = Sampling(max_new_tokens=min(MAX_NEW_TOKENS, room), temperature=0)
            prompts = [question.prompt for question in batch]
            answers = complete(plain, self.tokenizer, prompts, sampling)
            found += zip(batch, answers, strict=True)
        return chat_scores(gather_object(found))


def chat_scores(found: Sequence[tuple[ChatQuestion, Completion]]) -> dict[str, float]:
    """Returns the results of `ChatAnswers` for all questions and answers."""
    results: dict[str, float] = {}
    for group in sorted({""} | {question.group for question, _ in found}):
        own = [each for each in found if group in ("", each[0].group)]
        texts = [answer.text for _, answer in own]
        expected = [question.answer for question, _ in own]
        name = f"chat/exact_match_{group}" if group else "chat/exact_match"
        results |= exact_match(texts, expected, name)
    ended = [answer.ended == "end_of_text" for _, answer in found]
    return results | accuracy(ended, "chat/stop_rate")


def read_question(
    item: Item, tokenizer: "PreTrainedTokenizerBase", n_positions: int
) -> ChatQuestion:
    """Returns the question of an item. Raises `ValueError` if it has no prompt or answer."""
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
            f"{item.place} has a prompt of {tokens:,} tokens, and the model has {n_positions:,} "
            "positions: remove it"
        )
    return ChatQuestion(messages, tokens, answer, group)

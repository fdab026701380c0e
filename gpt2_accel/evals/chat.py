"""Chat evaluation: exact match of answers, and how often an answer ends by itself.

An item has a `prompt` (a text or a list of messages), an `answer`, and optionally a `group`. The
model's chat template renders the prompt, and the answer is generated greedily.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.data.messages import Problem, as_messages, read_messages
from gpt2_accel.evals.items import Item
from gpt2_accel.evals.metrics import combine
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
    def __call__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Returns `chat/exact_match`, which ignores spaces at both ends, and `chat/stop_rate`, the
        share of answers that end by themselves, with standard errors; also
        `chat/exact_match_GROUP` of each group.

        All ranks call it; each generates some of the batches of `BATCH_SIZE` questions of similar
        length. The result is empty if `interrupted`, which several ranks call before each round of
        batches, and one after each token.
        """
        plain = unwrap(accelerator, model)
        starts = range(0, len(self.questions), BATCH_SIZE)
        batches = [self.questions[start : start + BATCH_SIZE] for start in starts]
        ranks = accelerator.num_processes
        rounds = range(0, len(batches), ranks)
        between = interrupted if ranks == 1 else lambda: False
        found: list[tuple[ChatQuestion, Completion]] = []
        for first in progress(rounds, "answering", len(rounds), shown=accelerator.is_main_process):
            if interrupted():
                return {}
            number = first + accelerator.process_index
            if number >= len(batches):  # the last batches are those of other ranks
                break
            batch = batches[number]
            room = self.n_positions - batch[-1].tokens
            sampling = Sampling(min(MAX_NEW_TOKENS, room), temperature=0)
            prompts = [question.prompt for question in batch]
            answers = complete(plain, self.tokenizer, prompts, sampling, between)
            if not answers:
                return {}
            found += zip(batch, answers, strict=True)
        return chat_scores(gather_object(found))


def chat_scores(found: Sequence[tuple[ChatQuestion, Completion]]) -> dict[str, float]:
    """Returns the results of `ChatAnswers` for all answers. All ranks call it."""
    pairs: dict[str, list[tuple]] = {
        "exact_match": [(given.text, question.answer) for question, given in found],
        "stop_rate": [(given.ended, "end_of_text") for _, given in found],
    }
    for question, given in sorted(found, key=lambda pair: pair[0].group):
        if question.group:
            name = f"exact_match_{question.group}"
            pairs.setdefault(name, []).append((given.text, question.answer))
    parts = {}
    for name, both in pairs.items():
        predictions, references = zip(*both, strict=True)
        parts[name] = {"predictions": predictions, "references": references}
    return combine("chat", "exact_match", parts)


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

"""Answers to questions: exact match, and whether answers end by themselves.

An item has a `prompt`, a text or a list of messages, an `answer`, and perhaps a `group`. The prompt is rendered by the
model's chat template, and the answer is generated greedily.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.evals.formulas import accuracy
from gpt2_accel.evals.items import Item
from gpt2_accel.generation.sampling import Prompt, Sampling, complete, encode_prompt, user_turn
from gpt2_accel.models import ModelConfig
from gpt2_accel.progress import progress

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

    Raises `ValueError`, naming the item, for one without a prompt or an answer, or with a prompt that leaves no room for
    an answer, and if the tokenizer has no chat template.
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
        """Returns `chat/exact_match`, spaces at the ends apart, and `chat/stop_rate`, the share of answers that end by
        themselves, with standard errors. If items have groups, also `chat/exact_match_GROUP` of each."""
        plain = unwrap(accelerator, model)
        batches = [
            self.questions[i : i + TOGETHER] for i in range(0, len(self.questions), TOGETHER)
        ]
        results: list[tuple[str, bool, bool]] = []
        rounds = range(0, len(batches), accelerator.num_processes)
        for first in progress(rounds, "answering", len(rounds), shown=accelerator.is_main_process):
            if interrupted():
                return {}
            for batch in batches[first + accelerator.process_index :][:1]:
                room = self.n_positions - batch[-1].tokens
                sampling = Sampling(max_new_tokens=min(MAX_NEW_TOKENS, room), temperature=0)
                prompts = [question.prompt for question in batch]
                answers = complete(plain, self.tokenizer, prompts, sampling)
                for (*_, expected, group), answer in zip(batch, answers, strict=True):
                    right = answer.text.strip() == expected.strip()
                    results.append((group, right, answer.ended == "end_of_text"))
        results = gather_object(results)
        found = share("exact_match", [right for _, right, _ in results])
        found |= share("stop_rate", [ended for *_, ended in results])
        for group in sorted({group for group, *_ in results} - {""}):
            own = [right for name, right, _ in results if name == group]
            found |= share(f"exact_match_{group}", own)
        return found


def read_question(
    item: Item, tokenizer: "PreTrainedTokenizerBase", n_positions: int
) -> ChatQuestion:
    """Checks an item and returns its question. Raises `ValueError` as `ChatAnswers`."""
    prompt, answer = item.field("prompt", str | list), item.field("answer", str)
    group = item.field("group", str) if "group" in item.fields else ""
    prompt = user_turn(prompt) if isinstance(prompt, str) else prompt
    try:
        tokens = len(encode_prompt(tokenizer, prompt))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{item.place}: {error}") from error
    if tokens >= n_positions:
        raise ValueError(
            f"{item.place} has a prompt of {tokens:,} tokens, and the model reads {n_positions:,}: remove it"
        )
    return ChatQuestion(prompt, tokens, answer, group)


def share(name: str, right: Sequence[bool]) -> dict[str, float]:
    """Returns the share of True as `chat/NAME`, and its standard error."""
    return {
        f"chat/{key.replace('accuracy', name)}": value for key, value in accuracy(right).items()
    }

"""Chat evaluation: exact match of answers, and how often an answer ends by itself.

An item has a `prompt` (a text or a list of messages), an `answer`, and optionally a `group`. The
model's chat template renders the prompt, and the answer is generated greedily.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.data.messages import Problem, as_messages, read_messages
from gpt2_accel.data.order import hash64
from gpt2_accel.evals.formulas import exact_match
from gpt2_accel.evals.items import Item
from gpt2_accel.generation.sampling import Completion, Sampling, complete, encode_prompt
from gpt2_accel.models import LanguageModel, ModelConfig
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.tokenizer import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 256  # the longest answer
BATCH_SIZE = 64  # answers that are generated at once


class Question(NamedTuple):
    """A row, its prompt as messages, and the token ids of the prompt."""

    row: dict[str, Any]
    prompt: list[dict[str, str]]
    ids: list[int]


class ChatAnswers:
    """The `Evaluation` on questions.

    Raises `ValueError` if an item has no prompt or answer, if a prompt fills the model's
    `n_positions`, or if the tokenizer has no chat template.
    """

    def __init__(
        self, items: Sequence[Item], tokenizer: "PreTrainedTokenizerBase", config: ModelConfig
    ):
        self.tokenizer = tokenizer
        for item in items:
            item.fields["answer"] = str(item.field("answer", str | int | float))
            if "group" in item.fields:
                item.field("group", str)
        self.questions = [read_question(item, tokenizer) for item in items]
        longest = config.n_positions - 1
        for item, question in zip(items, self.questions, strict=True):
            if len(question.ids) > longest:
                raise ValueError(
                    f"{item.place} has a prompt of {len(question.ids):,} tokens; with an answer "
                    f"the model's positions allow {longest:,}: remove it"
                )
        self.notes = [f"chat: {len(items):,} items"]

    def __call__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Returns `chat/exact_match`, which ignores spaces at both ends, and `chat/stop_rate`, the
        share of answers that end by themselves, with standard errors; also
        `chat/exact_match_GROUP` of each group. All ranks call it. The result is empty if
        `interrupted`.
        """
        sampling = Sampling(MAX_NEW_TOKENS, temperature=0)
        found = answers(accelerator, model, self.tokenizer, self.questions, sampling, interrupted)
        return chat_scores([(question, given[0]) for question, given in found]) if found else {}


@torch.no_grad()
def answers(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    sampling: Sampling,
    interrupted: Callable[[], bool],
) -> list[tuple[Question, list[Completion]]]:
    """Returns the questions, each with its `sampling.num_samples` answers, on all ranks.

    The seed of an answer is a function of `sampling.seed`, the number of the question and that of
    the answer. All ranks call it; each generates some of the batches of `BATCH_SIZE` answers to
    questions of similar length. The result is empty if `interrupted`, which several ranks call
    before each round of batches, and one after each token.
    """
    plain: LanguageModel = unwrap(accelerator, model)
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].ids))
    size = max(1, BATCH_SIZE // sampling.num_samples)
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    ranks = accelerator.num_processes
    rounds = range(0, len(batches), ranks)
    between = interrupted if ranks == 1 else lambda: False
    found: list[tuple[Question, list[Completion]]] = []
    for first in Progress(
        "answering", len(rounds), rounds, disable=not accelerator.is_main_process
    ):
        if interrupted():
            return []
        number = first + accelerator.process_index
        if number >= len(batches):  # the last batches are those of other ranks
            break
        batch = [questions[i] for i in batches[number]]
        room = plain.config.n_positions - len(batch[-1].ids)
        own = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        prompts = [question.prompt for question in batch]
        seeds = hash64(sampling.seed, batches[number]).tolist()
        given = complete(plain, tokenizer, prompts, own, between, seeds)
        if not given:
            return []
        for question in batch:
            found.append((question, given[: sampling.num_samples]))
            given = given[sampling.num_samples :]
    return gather_object(found)


def chat_scores(found: Sequence[tuple[Question, Completion]]) -> dict[str, float]:
    """Returns the results of `ChatAnswers` for all answers. All ranks call it."""
    pairs: dict[str, list[tuple]] = {
        "exact_match": [(given.text, question.row["answer"]) for question, given in found],
        "stop_rate": [(given.ended, "end_of_text") for _, given in found],
    }
    for question, given in sorted(found, key=lambda pair: pair[0].row.get("group", "")):
        if question.row.get("group"):
            name = f"exact_match_{question.row['group']}"
            pairs.setdefault(name, []).append((given.text, question.row["answer"]))
    results: dict[str, float] = {}
    for name, both in pairs.items():
        predictions, references = zip(*both, strict=True)
        results |= exact_match(predictions, references, f"chat/{name}")
    return results


def read_question(item: Item, tokenizer: "PreTrainedTokenizerBase") -> Question:
    """Returns the question of an item, its field `prompt` or `question`, a text or messages.

    Raises `ValueError` if it has none, if the chat template refuses it or there is no template.
    """
    name = "question" if "question" in item.fields and "prompt" not in item.fields else "prompt"
    prompt = item.field(name, str | list)
    try:
        messages, _ = read_messages({"messages": as_messages(prompt, "user")}, item.place)
        ids = encode_prompt(tokenizer, messages)
    except (Problem, ValueError) as error:
        raise ValueError(f"{item.place} has a prompt that cannot be answered: {error}") from error
    return Question(item.fields, messages, ids)

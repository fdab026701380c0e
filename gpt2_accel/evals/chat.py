"""Answers to questions: exact match, and whether answers end by themselves.

An item has a `prompt`, a text or a list of messages, and an `answer`; or, as GSM8K, a `question` and an `answer` whose
last line is `#### NUMBER`; then only the number is compared. The prompt is rendered by the model's chat template, and the
answer is generated greedily.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.evals.formulas import accuracy
from gpt2_accel.evals.sources import field, place_of
from gpt2_accel.generation.sampling import Prompt, Sampling, complete, encode_prompt, user_turn
from gpt2_accel.models import ModelConfig
from gpt2_accel.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 256  # of an answer
TOGETHER = 64  # answers that are generated at once
GSM8K = re.compile(r"####\s*(-?[\d.,]*\d)")
GROUP = re.compile(r"(?!.*stderr)[\w -]*")  # the name of a metric
NUMBER = re.compile(r"-?\d[\d.,]*\d|-?\d")


@dataclass
class ChatItem:
    """A prompt, the expected answer, and the name of the group that the item belongs to, "" if it has none."""

    prompt: Prompt
    answer: str
    group: str = ""

    def matches(self, text: str) -> bool:
        """Whether an answer is right: equal but for spaces at its ends, or with GSM8K's mark the same number.

        The number of an answer is that after its mark, else its last one, lm-eval's `flexible-extract`."""
        if (expected := GSM8K.search(self.answer)) is None:
            return text.strip() == self.answer.strip()
        marked = GSM8K.search(text)
        numbers = [marked[1]] if marked else NUMBER.findall(text)
        return bool(numbers) and numbers[-1].replace(",", "") == expected[1].replace(",", "")


def load_chat(
    items: Sequence[dict], tokenizer: "PreTrainedTokenizerBase", config: ModelConfig
) -> list[ChatItem]:
    """Checks and returns the items. Raises `ValueError` for one without a prompt or an answer, or with a prompt that leaves
    no room for an answer, and if the tokenizer has no chat template."""
    found = []
    for number, item in enumerate(items):
        place = place_of(item, number, "chat")
        name = "prompt" if "prompt" in item else "question"
        prompt = field(item, name, str | list, place)
        group = field(item, "group", str, place) if "group" in item else ""
        if not GROUP.fullmatch(group):
            raise ValueError(
                f"{place} has the group {group!r}: use letters, digits, spaces, - and _, and not stderr"
            )
        item_of = ChatItem(
            user_turn(prompt) if isinstance(prompt, str) else prompt,
            field(item, "answer", str, place),
            group,
        )
        try:
            tokens = len(encode_prompt(tokenizer, item_of.prompt))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{place}: {error}") from error
        if tokens >= config.n_positions:
            raise ValueError(
                f"{place} has a prompt of {tokens:,} tokens, and the model reads {config.n_positions:,}: remove it"
            )
        found.append(item_of)
    return found


@torch.no_grad()
def chat(
    accelerator: Accelerator,
    model: torch.nn.Module,
    interrupted: Callable[[], bool] = lambda: False,
    *,
    items: Sequence[ChatItem],
    tokenizer: "PreTrainedTokenizerBase",
) -> dict[str, float]:
    """Returns `chat/exact_match` and `chat/stop_rate`, the share of answers that end by themselves, with standard errors.

    If items have groups, also `chat/exact_match_GROUP` of each. All ranks call it and answer a share each. `interrupted`
    is called before each round and must agree on all ranks; if True, the result is empty.
    """
    plain = unwrap(accelerator, model)
    lengths = [len(encode_prompt(tokenizer, item.prompt)) for item in items]
    order = sorted(range(len(items)), key=lengths.__getitem__)
    batches = [order[i : i + TOGETHER] for i in range(0, len(order), TOGETHER)]
    results: list[tuple[int, bool, bool]] = []
    rounds = range(0, len(batches), accelerator.num_processes)
    for first in progress(rounds, "answering", len(rounds), shown=accelerator.is_main_process):
        if interrupted():
            return {}
        mine = first + accelerator.process_index
        for number, answer in answers(plain, tokenizer, items, lengths, batches[mine : mine + 1]):
            ended = answer.ended == "end_of_text"
            results.append((number, items[number].matches(answer.text), ended))
    results = sorted(gather_object(results))
    found = share("exact_match", [right for _, right, _ in results])
    found |= share("stop_rate", [ended for _, _, ended in results])
    for group in dict.fromkeys(item.group for item in items if item.group):
        own = [right for number, right, _ in results if items[number].group == group]
        found |= share(f"exact_match_{group}", own)
    return found


def answers(model, tokenizer, items, lengths, batches):
    """Yields the numbers of the items in the batches, and a completion of each."""
    for batch in batches:
        room = model.config.n_positions - max(lengths[number] for number in batch)
        sampling = Sampling(max_new_tokens=min(MAX_NEW_TOKENS, room), temperature=0)
        prompts = [items[number].prompt for number in batch]
        yield from zip(batch, complete(model, tokenizer, prompts, sampling), strict=True)


def share(name: str, right: Sequence[bool]) -> dict[str, float]:
    """Returns the share of True, and its standard error."""
    return {
        f"chat/{key.replace('accuracy', name)}": value for key, value in accuracy(right).items()
    }

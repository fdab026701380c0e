"""HellaSwag (Zellers et al., 2019): which of four endings follows? Completion style: each is scored as text.

Two conventions, which read different texts:

- `plain`, as in build-nanogpt and llm.c: context and ending as the data set has them;
- `lm_eval`, as in lm-evaluation-harness: the activity's name before the context, the second half of which
  starts with a capital, and leftovers of the WikiHow articles' markup taken out.

`acc` takes the ending of highest likelihood. Longer endings are less likely, so `acc_norm` divides the log-
likelihood by the length: in tokens (`acc_norm_per_token`, what build-nanogpt and llm.c call acc_norm) or in
characters (`acc_norm_per_char`, what lm-evaluation-harness calls acc_norm).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from gpt2_accel.evals.scores import choice_accuracy
from gpt2_accel.evals.scoring import Question, encode_question, fit_rows, score
from gpt2_accel.evals.sources import field


@dataclass
class HellaSwag:
    """The items, tokenized for one model. `characters` is the length of each ending. Where the text is longer
    than the model can read, `cut` contexts lost their beginning, and the items `left_out`, by number, are
    those with an ending that is too long by itself."""

    questions: list[Question]
    characters: list[list[int]]
    labels: list[int]
    cut: int
    left_out: list[int]


def load_hellaswag(
    items: Sequence[dict],
    tokenizer: PreTrainedTokenizerBase,
    n_positions: int,
    style: str = "plain",
) -> HellaSwag:
    """Checks and tokenizes items with the fields `ctx`, `endings` and `label`; those of `lm_eval` also have
    `activity_label`, and `ctx_a` and `ctx_b` in place of `ctx` if their text is the original.

    Raises `ValueError`, naming the item, for a field that is missing or of the wrong type, an empty ending
    or context or a label out of range, and if no item has endings that fit into `n_positions`.
    """
    if not items:
        raise ValueError("there are no HellaSwag items: give at least one")
    data = HellaSwag([], [], [], cut=0, left_out=[])
    for number, item in enumerate(items):
        where = f"item {number} of HellaSwag"
        context, endings = STYLE_OF[style](item, where)
        label = read_label(item, len(endings), where)
        if not context.strip() or not all(ending.strip() for ending in endings):
            raise ValueError(f"{where} has an empty context or ending: take it out")
        question = encode_question(tokenizer, context, [f" {text}" for text in endings], where)
        if max(map(len, question.continuations)) > n_positions:
            data.left_out.append(number)
            continue
        data.questions.append(question)
        data.characters.append([len(text) for text in endings])
        data.labels.append(label)
    if not data.questions:
        raise ValueError(
            f"no HellaSwag item has endings that fit into the model's n_positions ({n_positions})"
        )
    data.cut = len(fit_rows(data.questions, n_positions)[1])
    return data


def plain(item: dict, where: str) -> tuple[str, list[str]]:
    """Context and endings as they are."""
    return field(item, "ctx", str, where), read_endings(item, where)


def lm_eval(item: dict, where: str) -> tuple[str, list[str]]:
    """Context and endings as lm-evaluation-harness writes them."""
    if "ctx_a" in item and "ctx_b" in item:
        second = field(item, "ctx_b", str, where).capitalize()
        context = f"{field(item, 'ctx_a', str, where)} {second}"
    else:
        context = field(item, "ctx", str, where)
    context = f"{field(item, 'activity_label', str, where)}: {context}"
    return without_markup(context), [without_markup(text) for text in read_endings(item, where)]


STYLE_OF = {"plain": plain, "lm_eval": lm_eval}


def without_markup(text: str) -> str:
    """The text without WikiHow's `[title]`, `[step]` and the like."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def read_endings(item: dict, where: str) -> list[str]:
    """The endings, two or more strings."""
    endings = field(item, "endings", list, where)
    if len(endings) < 2 or not all(isinstance(ending, str) for ending in endings):
        raise ValueError(f"{where} has endings = {endings!r}: expected two texts or more")
    return endings


def read_label(item: dict, choices: int, where: str) -> int:
    """The number of the right ending; the Hub's data set has it as text, empty in the test split."""
    label = field(item, "label", int | str, where)
    if not re.fullmatch(r"\d+", str(label)) or int(label) >= choices:
        raise ValueError(
            f"{where} has label = {label!r}: expected the number of an ending, 0 to {choices - 1}"
        )
    return int(label)


def hellaswag(
    accelerator: Accelerator,
    model: torch.nn.Module,
    interrupted: Callable[[], bool] = lambda: False,
    *,
    data: HellaSwag,
    prefix: str = "hellaswag",
) -> dict[str, float]:
    """`acc`, `acc_norm_per_token` and `acc_norm_per_char` of the model, and the standard error of each.

    All ranks call it, each scores its share. `interrupted` ends it without a result, as in `score`.
    """
    scores = score(accelerator, model, data.questions, interrupted)
    if not scores:
        return {}
    pairs = list(zip(scores, data.characters, strict=True))
    normalised = {
        "acc": [[-s.nats for s in row] for row in scores],
        "acc_norm_per_token": [[-s.nats / s.tokens for s in row] for row in scores],
        "acc_norm_per_char": [[-s.nats / n for s, n in zip(*p, strict=True)] for p in pairs],
    }
    results = {}
    for name, values in normalised.items():
        found = choice_accuracy(values, data.labels)
        results |= {f"{prefix}/{name}{key.removeprefix('accuracy')}": found[key] for key in found}
    return results

"""HellaSwag (Zellers et al., 2019): choose one of four endings. Completion style: each ending is scored as text.

Two conventions, with different texts:

- `plain`, as in build-nanogpt and llm.c: context and ending as in the data set;
- `lm_eval`, as in lm-evaluation-harness: the activity's name precedes the context, the second half of the context
  starts with a capital, and the remains of the WikiHow articles' markup are removed.

`acc` chooses the ending with the highest likelihood. Longer endings are less likely, so `acc_norm` divides the
log-likelihood by the length: in tokens (`acc_norm_per_token`, the acc_norm of build-nanogpt and llm.c) or in
characters (`acc_norm_per_char`, the acc_norm of lm-evaluation-harness).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from gpt2_accel.evals.formulas import choice_accuracy
from gpt2_accel.evals.likelihood import Question, encode_question, fit_rows, score
from gpt2_accel.evals.sources import field, place_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class HellaSwag:
    """The items, tokenized for one model.

    `characters` is the length of each ending. `cut` counts the contexts that are cut from the left to fit into
    `n_positions`. `left_out` are the numbers of the items with an ending that exceeds `n_positions` by itself.
    """

    questions: list[Question]
    characters: list[list[int]]
    labels: list[int]
    cut: int
    left_out: list[int]


def load_hellaswag(
    items: Sequence[dict],
    tokenizer: "PreTrainedTokenizerBase",
    n_positions: int,
    style: str = "plain",
) -> HellaSwag:
    """Checks and tokenizes items with the fields `ctx`, `endings` and `label`.

    The style `lm_eval` also needs `activity_label`, and uses `ctx_a` and `ctx_b` in place of `ctx` if there are both.

    Raises `ValueError`, naming the item, for a field that is missing or of the wrong type, an empty ending or context,
    or a label out of range; also if no item has endings that fit into `n_positions`.
    """
    if not items:
        raise ValueError("there are no HellaSwag items: give at least one")
    data = HellaSwag([], [], [], cut=0, left_out=[])
    for number, item in enumerate(items):
        where = place_of(item, number, "HellaSwag")
        context, endings = STYLE_OF[style](item, where)
        label = read_label(item, len(endings), where)
        if not context.strip() or not all(ending.strip() for ending in endings):
            raise ValueError(f"{where} has an empty context or ending: remove it")
        question = encode_question(tokenizer, context, [f" {text}" for text in endings], where)
        if max(map(len, question.continuations)) > n_positions:
            data.left_out.append(number)
            continue
        data.questions.append(question)
        data.characters.append([len(text) for text in endings])
        data.labels.append(label)
    if not data.questions:
        raise ValueError(
            f"no HellaSwag item has endings that fit into the model's n_positions ({n_positions}): use a model "
            "with more positions"
        )
    data.cut = len(fit_rows(data.questions, n_positions)[1])
    return data


def plain_text(item: dict, where: str) -> tuple[str, list[str]]:
    """Returns context and endings as in the data set."""
    return field(item, "ctx", str, where), read_endings(item, where)


def lm_eval_text(item: dict, where: str) -> tuple[str, list[str]]:
    """Returns context and endings as in lm-evaluation-harness."""
    if "ctx_a" in item and "ctx_b" in item:
        second = field(item, "ctx_b", str, where).capitalize()
        context = f"{field(item, 'ctx_a', str, where)} {second}"
    else:
        context = field(item, "ctx", str, where)
    context = f"{field(item, 'activity_label', str, where)}: {context}"
    return without_markup(context), [without_markup(text) for text in read_endings(item, where)]


STYLE_OF = {"plain": plain_text, "lm_eval": lm_eval_text}


def without_markup(text: str) -> str:
    """Removes WikiHow's markup, such as `[title]` and `[step]`."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def read_endings(item: dict, where: str) -> list[str]:
    """Returns the endings, two or more strings. Raises `ValueError` for anything else."""
    endings = field(item, "endings", list, where)
    if len(endings) < 2 or not all(isinstance(ending, str) for ending in endings):
        raise ValueError(f"{where} has endings = {endings!r}: expected two strings or more")
    return endings


def read_label(item: dict, choices: int, where: str) -> int:
    """Returns the index of the correct ending. The Hub's data set stores it as text, empty in the test split."""
    label = field(item, "label", int | str, where)
    if not re.fullmatch(r"\d+", str(label)) or int(label) >= choices:
        raise ValueError(
            f"{where} has label = {label!r}: expected the index of an ending, 0 to {choices - 1}"
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
    """Returns `acc`, `acc_norm_per_token` and `acc_norm_per_char` of the model, each with its standard error.

    All ranks call it and score a share each. If `interrupted`, the result is empty, as in `score`.
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

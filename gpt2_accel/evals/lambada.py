"""LAMBADA (Paperno et al., 2016): predict the last word of a passage, which needs the whole passage as context.

Two conventions, from the same passages and the same scores:

- last word, as in lm-evaluation-harness: all tokens after the last space; the word is correct if each token is the
  model's first choice; the perplexity is per word;
- last token: only the passage's last token is scored; the earlier tokens of the last word belong to the context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from gpt2_accel.evals.formulas import accuracy, perplexity
from gpt2_accel.evals.likelihood import Question, Score, encode_question, fit_rows, score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Lambada:
    """The passages, tokenized for one model. `cut` counts those that are cut from the left to fit `n_positions`."""

    questions: list[Question]
    cut: int


def load_lambada(
    passages: Sequence[str], tokenizer: "PreTrainedTokenizerBase", n_positions: int
) -> Lambada:
    """Splits each passage before its last word and tokenizes it.

    Raises `ValueError`, naming the passage, for fewer than two words; also if there are no passages.
    """
    if not passages:
        raise ValueError("there are no LAMBADA passages: give at least one")
    questions = []
    for number, passage in enumerate(passages):
        where = f"item {number} of LAMBADA"
        context, _, word = passage.rpartition(" ")
        if not context.strip() or not word.strip():
            raise ValueError(
                f"{where} needs at least two words with a space between them, got {passage!r}"
            )
        questions.append(encode_question(tokenizer, context, [f" {word}"], where))
    _, cut = fit_rows(questions, n_positions)
    return Lambada(questions, len(cut))


def lambada(
    accelerator: Accelerator,
    model: torch.nn.Module,
    interrupted: Callable[[], bool] = lambda: False,
    *,
    data: Lambada,
) -> dict[str, float]:
    """Returns accuracy and perplexity, with standard errors, of the last word and of the last token.

    All ranks call it and score a share each. If `interrupted`, the result is empty, as in `score`.
    """
    scores = [row[0] for row in score(accelerator, model, data.questions, interrupted)]
    if not scores:
        return {}
    ones = [1] * len(scores)
    kinds: dict[str, tuple[Callable[[Score], float], Callable[[Score], bool]]] = {
        "last_word": (lambda s: s.nats, lambda s: s.greedy),
        "last_token": (lambda s: s.last_nats, lambda s: s.last_greedy),
    }
    results = {}
    for kind, (nats, right) in kinds.items():
        found = accuracy([right(s) for s in scores]) | perplexity([nats(s) for s in scores], ones)
        for name, value in found.items():
            results[f"lambada/{kind}_{name.replace('accuracy', 'acc')}"] = value
    return results

"""LAMBADA (Paperno et al., 2016): the last word of a passage, which only the whole of it tells.

Two conventions, from the same passages and the same scores:

- last word, as in lm-evaluation-harness: the text after the last space, all of its tokens, is right if each
  is the model's first choice; the perplexity is per word;
- last token: only the last token counts, with what precedes it, the word's own beginning included, given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from gpt2_accel.evals.scores import accuracy, perplexity
from gpt2_accel.evals.scoring import Question, Score, encode_question, fit_rows, score


@dataclass
class Lambada:
    """The passages, tokenized for one model; `cut` of them lost their beginning, since they are longer than
    the model can read."""

    questions: list[Question]
    cut: int


def load_lambada(
    passages: Sequence[str], tokenizer: PreTrainedTokenizerBase, n_positions: int
) -> Lambada:
    """Cuts the passages before their last word, and tokenizes them.

    Raises `ValueError`, naming the passage, if it has fewer than two words, and if there are none.
    """
    if not passages:
        raise ValueError("there are no LAMBADA passages: give at least one")
    questions = []
    for number, passage in enumerate(passages):
        where = f"item {number} of LAMBADA"
        context, _, word = passage.rpartition(" ")
        if not context.strip() or not word.strip():
            raise ValueError(f"{where} has no last word after a space: {passage!r}")
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
    """Accuracy and perplexity, with standard errors, of the last word and of the last token.

    All ranks call it, each scores its share. `interrupted` ends it without a result, as in `score`.
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

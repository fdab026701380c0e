"""Log-likelihoods of continuations given a context.

A `LikelihoodTask` has questions and computes metrics from their log-likelihoods. A multiple choice
is a question with a row for each choice, a schema has a row for each context, a long text has a
question for each window.

A row is a context, cut from the left if it does not fit, and one continuation. Padding follows it:
attention is causal, so no mask is needed. A batch has rows of similar length. The model runs
uncompiled: compiling for each row length takes longer than the task.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.models import LanguageModel, evaluating
from gpt2_accel.runtime.device import to_device
from gpt2_accel.runtime.progress import Progress
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, encode, text_start

BATCH_TOKENS = 4096  # maximum positions of a batch; a single row may have more
LOGIT_VALUES = 2**27  # maximum logits of a batch with logits at all positions: 512 MiB in fp32


class Row(NamedTuple):
    """The token ids of a context and a continuation, neither of them empty, and the number of
    tokens of the continuation."""

    ids: list[int]
    predicted: int


Question = list[Row]  # one row for each possible continuation


def lengths_of(question: Question) -> list[int]:
    """Returns the number of tokens of each continuation."""
    return [row.predicted for row in question]


def encode_question(
    tokenizer: "PreTrainedTokenizerBase", context: str, continuations: Sequence[str], place: str
) -> Question:
    """Returns a question from texts. Context and continuation are tokenized together, as text in
    the middle of a document (see `text_start`).

    Spaces at the end of the context move to the continuations, as in lm-evaluation-harness. Raises
    `ValueError` with `place` if the context or a continuation is blank, has no tokens of its own or
    a character that is not in the vocabulary.
    """
    texts = [context + text for text in continuations]
    stem, *full = encode(tokenizer, [context.rstrip(), *texts])
    blank = not all(text.strip() for text in continuations)
    if not stem or blank or min(map(len, full)) <= len(stem):
        raise ValueError(f"{place} has an empty context or continuation: remove it")
    start = text_start(tokenizer, begins=False)
    return [Row(start + stem + ids[len(stem) :], len(ids) - len(stem)) for ids in full]


def build_batches(rows: Sequence[Row], vocab_size: int) -> list[list[int]]:
    """Groups row indices by row length into batches of at most `batch_tokens` positions, or one
    row."""
    indices = sorted(range(len(rows)), key=lambda index: len(rows[index].ids), reverse=True)
    batches = []
    while indices:
        count = max(1, batch_tokens(vocab_size) // len(rows[indices[0]].ids))
        batches.append(indices[:count])
        indices = indices[count:]
    return batches


def batch_tokens(vocab_size: int) -> int:
    """Returns the maximum number of positions of a batch, with `vocab_size` logits at each."""
    return min(BATCH_TOKENS, LOGIT_VALUES // vocab_size)


def token_scores(model: LanguageModel, batch: Sequence[Row], greedy: bool = False) -> torch.Tensor:
    """Returns the negative log-likelihoods of the last S tokens of each row in nats, (B, S), 0 for
    tokens of the context and padding.

    S covers the longest predicted part. With `greedy` the value is 1 for a predicted token that
    greedy decoding would not give, else 0.
    """
    ids = [torch.tensor(row.ids[-model.config.n_positions - 1 :]) for row in batch]
    input_ids = pad_sequence([row_ids[:-1] for row_ids in ids], batch_first=True)
    targets = pad_sequence([row_ids[1:] for row_ids in ids], batch_first=True, padding_value=-100)
    kept = 0
    for row_ids, target, row in zip(ids, targets, batch, strict=True):
        before = len(row_ids) - 1 - row.predicted
        target[:before] = -100
        kept = max(kept, targets.shape[1] - before)
    input_ids = to_device(input_ids, model.device)
    targets = to_device(targets[:, -kept:], model.device)
    if not greedy:
        return model(input_ids, targets, logits_to_keep=kept, reduction="none")
    predicted = model(input_ids, logits_to_keep=kept).argmax(dim=-1)
    return ((predicted != targets) & (targets != -100)).float()


@torch.no_grad()
def log_likelihoods(
    accelerator: Accelerator,
    model: torch.nn.Module,
    questions: Sequence[Question],
    interrupted: Callable[[], bool],
    greedy: bool = False,
) -> list[list[float]]:
    """Returns the log-likelihood in nats of each continuation of each question, on all ranks. All
    ranks call it.

    With `greedy` the value is 0 if greedy decoding gives the continuation, else minus the number of
    tokens that differ.

    `model` may be prepared or not; its mode is restored. A context that does not fit is cut from
    the left; the caller ensures that a continuation has at most `n_positions` tokens. Batch i runs
    on rank i modulo the number of ranks; the host waits for the device once, after the last batch.
    `interrupted`: see `evals`; if True, returns an empty list.
    """
    plain = unwrap(accelerator, model)
    rows = list(chain.from_iterable(questions))
    batches = build_batches(rows, plain.config.vocab_size)
    totals = torch.zeros(len(rows), device=accelerator.device)
    with evaluating(plain):
        rounds = range(0, len(batches), accelerator.num_processes)
        for first in Progress(
            "evaluating", len(rounds), rounds, disable=not accelerator.is_main_process
        ):
            if interrupted():
                return []
            number = first + accelerator.process_index
            # A rank without a batch repeats the last one: a sharded forward needs all ranks.
            batch = batches[min(number, len(batches) - 1)]
            nats = token_scores(plain, [rows[index] for index in batch], greedy)
            if number < len(batches):
                totals[batch] = -nats.float().sum(dim=1)
    sizes = [len(question) for question in questions]
    return [values.tolist() for values in accelerator.reduce(totals, "sum").cpu().split(sizes)]


class LikelihoodTask:
    """An `Evaluation` by log-likelihoods. A subclass sets `questions` and `notes`, texts about
    them, and defines `metrics`."""

    questions: list[Question]
    notes: list[str]

    def metrics(self, scores: list[list[float]]) -> dict[str, float]:
        """Returns the results, {"TASK/METRIC": value}. `scores` are the log-likelihoods of each
        question's continuations in nats. All ranks call it."""
        raise NotImplementedError

    def __call__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Returns the `metrics` of `model`; empty if interrupted."""
        scores = log_likelihoods(accelerator, model, self.questions, interrupted)
        return self.metrics(scores) if scores else {}

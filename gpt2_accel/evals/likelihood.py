"""Log-likelihoods of continuations given a context. Every task that compares or sums likelihoods asks the model here.

A task is a `LikelihoodTask`: its questions, and the metrics of their log-likelihoods. A multiple choice is a question
with all choices, a schema a question for each context, a long text a question for each window.

The continuations of a question share a row. Each attends to the context and to itself, so the context is read once:

    tokens     c0 c1 c2 | c3 a0 a1 | c3 b0        context c, continuations a0 a1 a2 and b0 b1
    position    0  1  2 |  3  4  5 |  3  4
    predicts            | a0 a1 a2 | b0 b1        the head is computed at these positions only

A batch has rows of similar length. The model always runs uncompiled: compiling for one row length takes longer than a
whole task.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.data.loader import to_device
from gpt2_accel.models import evaluating
from gpt2_accel.progress import progress
from gpt2_accel.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 4096  # maximum positions of a batch; a single row may have more
LOGIT_VALUES = 2**27  # maximum logits of a batch, likewise: 512 MiB in fp32


class Question(NamedTuple):
    """A context and its possible continuations, as token ids; none is empty."""

    context: list[int]
    continuations: list[list[int]]

    def fits(self, n_positions: int) -> bool:
        """Whether the model reads the whole context before each continuation; the last token is not read."""
        return len(self.context) + max(map(len, self.continuations)) - 1 <= n_positions


class Row(NamedTuple):
    """Consecutive continuations of question number `question` that share a row; `first` is the index of the first."""

    question: int
    first: int
    context: list[int]
    continuations: list[list[int]]

    @property
    def answers(self) -> int:
        """The number of tokens to predict."""
        return sum(map(len, self.continuations))


def encode_question(
    tokenizer: "PreTrainedTokenizerBase", context: str, continuations: Sequence[str], place: str
) -> Question:
    """Returns a question from texts. Context and continuation are tokenized together, as running text.

    Spaces at the end of the context move to the continuations, as in lm-evaluation-harness. Raises `ValueError`, naming
    the question by `place`, if the context or a continuation is blank or has no tokens of its own; also the errors of
    `encode`.
    """
    stem = context.rstrip()
    start, *whole = encode(tokenizer, [stem, *(context + text for text in continuations)])
    cut = [ids[len(start) :] for ids in whole]
    if not (start and all(cut) and all(text.strip() for text in continuations)):
        raise ValueError(f"{place} has an empty context or continuation: remove it")
    return Question(start, cut)


def build_rows(questions: Sequence[Question], n_positions: int) -> list[Row]:
    """Returns the rows of all questions.

    The continuations of a question that does not fit into `n_positions` have a row each, with the end of the context
    that fits. A continuation of more than `n_positions` tokens is a bug of the caller.
    """
    rows = []
    for number, question in enumerate(questions):
        context, continuations = question
        if question.fits(n_positions):
            rows.append(Row(number, 0, context, continuations))
            continue
        for place, ids in enumerate(continuations):
            assert len(ids) <= n_positions, f"question {number} has {len(ids)} tokens to predict"
            rows.append(Row(number, place, context[-(n_positions + 1 - len(ids)) :], [ids]))
    return rows


def shape(batch: Sequence[Row]) -> tuple[int, int]:
    """Returns the positions of a batch, and the number of last positions that predict."""
    answers = max(row.answers for row in batch)
    return max(len(row.context) for row in batch) - 1 + answers, answers


def build_batches(rows: Sequence[Row], vocab_size: int) -> list[list[Row]]:
    """Groups the rows by length into batches within `BATCH_TOKENS` and `LOGIT_VALUES`, or of a single row."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: (-(row.answers // 8), -len(row.context), row)):
        if batches:
            wider = [*batches[-1], row]
            width, answers = shape(wider)
            logits = len(wider) * answers * vocab_size
            if len(wider) * width <= BATCH_TOKENS and logits <= LOGIT_VALUES:
                batches[-1] = wider
                continue
        batches.append([row])
    return batches


def collate(batch: Sequence[Row], device: torch.device) -> dict[str, torch.Tensor | None]:
    """Returns the model's inputs: `input_ids` and `position_ids` (B, T) int64, `attention_mask` (B, 1, T, T) bool, and
    `targets` (B, S) int64 of the last S positions, -100 at padding.

    A row is the context, padding, the continuations, padding. Without padding, a batch of single continuations needs no
    mask: None.
    """
    width, answers = shape(batch)
    inputs = torch.zeros(3, len(batch), width, dtype=torch.int64)
    input_ids, position_ids, branch = inputs
    branch.fill_(-1)  # 0 context, 1 and up continuations, -1 padding
    targets = torch.full((len(batch), answers), -100)
    for i, row in enumerate(batch):
        *shared, last = row.context
        input_ids[i, : len(shared)] = torch.tensor(shared)
        position_ids[i, : len(shared)] = torch.arange(len(shared))
        branch[i, : len(shared)] = 0
        start = width - answers
        for number, ids in enumerate(row.continuations, start=1):
            span = slice(start, start + len(ids))
            input_ids[i, span] = torch.tensor([last, *ids[:-1]])
            position_ids[i, span] = torch.arange(len(shared), len(shared) + len(ids))
            branch[i, span] = number
            targets[i, start + answers - width :][: len(ids)] = torch.tensor(ids)
            start += len(ids)
    (input_ids, position_ids, branch), targets = to_device((inputs, targets), device)
    mask = None
    if any(len(row.continuations) > 1 or shape([row]) != (width, answers) for row in batch):
        seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        mask = (seen & causal)[:, None]
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": mask,
        "targets": targets,
    }


def token_nats(model: torch.nn.Module, batch: Sequence[Row]) -> torch.Tensor:
    """Returns the negative log-likelihood of each predicted token of the rows in nats, (B, S), 0 at padding."""
    inputs = collate(batch, model.device)
    return model(**inputs, reduction="none", logits_to_keep=inputs["targets"].shape[1])


@torch.no_grad()
def log_likelihoods(
    accelerator: Accelerator,
    model: torch.nn.Module,
    questions: Sequence[Question],
    interrupted: Callable[[], bool] = lambda: False,
) -> list[list[float]]:
    """Returns the log-likelihood in nats of every continuation of every question, on all ranks. All ranks call it.

    `model` may be prepared or not; its mode is restored. A context that does not fit is cut from the left. Batch i runs on
    rank i modulo the number of ranks, and the host waits for the device once, after the last batch. `interrupted` as in
    `Evaluation`.
    """
    plain = unwrap(accelerator, model)
    rows = build_rows(questions, plain.config.n_positions)
    batches = build_batches(rows, plain.config.vocab_size)
    own: list[Row] = []
    nats: list[torch.Tensor] = []
    with evaluating(plain):
        rounds = range(0, len(batches), accelerator.num_processes)
        for first in progress(rounds, "evaluating", len(rounds), shown=accelerator.is_main_process):
            if interrupted():
                return []
            number = first + accelerator.process_index
            # A rank without a batch repeats the last one: the forward of a sharded model needs all ranks.
            batch = batches[min(number, len(batches) - 1)]
            found = token_nats(plain, batch)
            if number < len(batches):
                own += batch
                nats += found.float()
    values = torch.cat(nats).cpu().split([len(row) for row in nats]) if nats else ()
    sums = []
    for row, row_nats in zip(own, values, strict=True):
        left = row_nats.tolist()
        for place, ids in enumerate(row.continuations, start=row.first):
            sums.append((row.question, place, -math.fsum(left[: len(ids)])))
            del left[: len(ids)]
    results: list[list[float]] = [[] for _ in questions]
    for question, _, value in sorted(gather_object(sums)):
        results[question].append(value)
    return results


class LikelihoodTask:
    """An `Evaluation` by log-likelihoods. A subclass sets `questions`, and `notes` on them, and has `metrics`."""

    questions: list[Question]
    notes: list[str]

    def metrics(self, scores: list[list[float]]) -> dict[str, float]:
        """Returns the results, from the log-likelihood of each continuation of each question in nats."""
        raise NotImplementedError

    def __call__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Returns the `metrics` of a model."""
        scores = log_likelihoods(accelerator, model, self.questions, interrupted)
        return self.metrics(scores) if scores else {}

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
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.models import evaluating
from gpt2_accel.runtime.device import to_device
from gpt2_accel.runtime.progress import progress
from gpt2_accel.tokenizer import encode, text_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 4096  # maximum positions of a batch; a single row may have more
LOGIT_VALUES = 2**27  # maximum logits of a batch, likewise: 512 MiB in fp32


class Question(NamedTuple):
    """A context and its possible continuations, as token ids; none is empty."""

    context: list[int]
    continuations: list[list[int]]

    @property
    def targets(self) -> int:
        """The number of tokens to predict."""
        return sum(map(len, self.continuations))

    def fits(self, n_positions: int) -> bool:
        """Whether the model reads the whole context before each continuation; the last token is not read."""
        return len(self.context) + max(map(len, self.continuations)) - 1 <= n_positions


def encode_question(
    tokenizer: "PreTrainedTokenizerBase", context: str, continuations: Sequence[str], place: str
) -> Question:
    """Returns a question from texts. Context and continuation are tokenized together, as running
    text, which does not begin a document (see `text_start`).

    Spaces at the end of the context move to the continuations, as in lm-evaluation-harness. Raises `ValueError`, naming
    the question by `place`, if the context or a continuation is blank or has no tokens of its own; also the errors of
    `encode`.
    """
    stem = context.rstrip()
    start, *whole = encode(tokenizer, [stem, *(context + text for text in continuations)])
    cut = [ids[len(start) :] for ids in whole]
    if not (start and all(cut) and all(text.strip() for text in continuations)):
        raise ValueError(f"{place} has an empty context or continuation: remove it")
    return Question(text_start(tokenizer, begins=False) + start, cut)


def build_rows(questions: Sequence[Question], n_positions: int) -> list[tuple[int, Question]]:
    """Returns the rows of all questions, each with the number of its question.

    A question that does not fit into `n_positions` has a row for each continuation, with the end of the context that
    fits. A continuation of more than `n_positions` tokens is a bug of the caller.
    """
    rows = []
    for number, question in enumerate(questions):
        if question.fits(n_positions):
            rows.append((number, question))
            continue
        for ids in question.continuations:
            assert len(ids) <= n_positions, f"question {number} has {len(ids)} tokens to predict"
            context = question.context[-(n_positions + 1 - len(ids)) :]
            rows.append((number, Question(context, [ids])))
    return rows


def shape(batch: Sequence[Question]) -> tuple[int, int]:
    """Returns the positions of a batch of rows, and the number of last positions that predict."""
    targets = max(row.targets for row in batch)
    return max(len(row.context) for row in batch) - 1 + targets, targets


def build_batches(rows: Sequence[Question], vocab_size: int) -> list[list[int]]:
    """Groups the rows, as indices, by length into batches within `BATCH_TOKENS` and `LOGIT_VALUES`, or of a single row."""
    batches: list[list[int]] = []
    for index in sorted(
        range(len(rows)), key=lambda i: (rows[i].targets // 8, len(rows[i].context)), reverse=True
    ):
        wider = [*batches[-1], index] if batches else [index]
        width, targets = shape([rows[i] for i in wider])
        logits = len(wider) * targets * vocab_size
        if batches and len(wider) * width <= BATCH_TOKENS and logits <= LOGIT_VALUES:
            batches[-1] = wider
        else:
            batches.append([index])
    return batches


def collate(batch: Sequence[Question], device: torch.device) -> dict[str, torch.Tensor | None]:
    """Returns the model's inputs: `input_ids` and `position_ids` (B, T) int64, `attention_mask` (B, 1, T, T) bool, and
    `targets` (B, S) int64 of the last S positions, -100 at padding.

    A row is the context, padding, the continuations, padding. Without padding, a batch of single continuations needs no
    mask: None.
    """
    width, predicted = shape(batch)
    padding = (0, 0, -1)  # token, position and branch: 0 context, 1 and up continuations
    inputs, targets = [], []
    for context, continuations in batch:
        *shared, last = context
        row = [(token, position, 0) for position, token in enumerate(shared)]
        row += [padding] * (width - predicted - len(shared))
        for branch, ids in enumerate(continuations, start=1):
            read = enumerate([last, *ids[:-1]], start=len(shared))
            row += [(token, position, branch) for position, token in read]
        inputs.append(row + [padding] * (width - len(row)))
        row = [token for ids in continuations for token in ids]
        targets.append(row + [-100] * (predicted - len(row)))
    inputs, targets = (to_device(torch.tensor(rows), device) for rows in (inputs, targets))
    input_ids, position_ids, branch = inputs.unbind(dim=2)
    mask = None
    if any(len(row.continuations) > 1 or shape([row]) != (width, predicted) for row in batch):
        seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        mask = (seen & causal)[:, None]
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": mask,
        "targets": targets,
    }


def token_scores(
    model: torch.nn.Module, batch: Sequence[Question], greedy: bool = False
) -> torch.Tensor:
    """Returns the negative log-likelihood of each predicted token of the rows in nats, (B, S), 0 at padding. With `greedy`
    it is 1 for a token that greedy decoding would not give, else 0."""
    inputs = collate(batch, model.device)
    targets = inputs["targets"]
    inputs["logits_to_keep"] = targets.shape[1]
    if not greedy:
        return model(**inputs, reduction="none")
    found = model(**inputs | {"targets": None}).argmax(dim=-1)
    return ((found != targets) & (targets != -100)).float()


@torch.no_grad()
def log_likelihoods(
    accelerator: Accelerator,
    model: torch.nn.Module,
    questions: Sequence[Question],
    interrupted: Callable[[], bool] = lambda: False,
    greedy: bool = False,
) -> list[list[float]]:
    """Returns the log-likelihood in nats of every continuation of every question, on all ranks. All ranks call it.

    With `greedy` it is 0 if greedy decoding gives the continuation, else minus the number of other tokens.

    `model` may be prepared or not; its mode is restored. A context that does not fit is cut from the left. Batch i runs on
    rank i modulo the number of ranks, and the host waits for the device after the last batch only. `interrupted` as in
    `Evaluation`.
    """
    plain = unwrap(accelerator, model)
    numbered = build_rows(questions, plain.config.n_positions)
    rows = [row for _, row in numbered]
    batches = build_batches(rows, plain.config.vocab_size)
    found: list[tuple[list[int], torch.Tensor]] = []
    with evaluating(plain):
        rounds = range(0, len(batches), accelerator.num_processes)
        for first in progress(rounds, "evaluating", len(rounds), shown=accelerator.is_main_process):
            if interrupted():
                return []
            number = first + accelerator.process_index
            # A rank without a batch repeats the last one: the forward of a sharded model needs all ranks.
            batch = batches[min(number, len(batches) - 1)]
            nats = token_scores(plain, [rows[index] for index in batch], greedy)
            if number < len(batches):
                found.append((batch, nats))
    sums = []  # of each own row: its index and the log-likelihoods of its continuations
    for batch, nats in found:
        for index, row in zip(batch, nats.tolist(), strict=True):
            values = iter(row)
            lengths = map(len, rows[index].continuations)
            sums.append((index, [-math.fsum(islice(values, length)) for length in lengths]))
    results: list[list[float]] = [[] for _ in questions]
    for index, values in sorted(gather_object(sums)):
        results[numbered[index][0]] += values
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

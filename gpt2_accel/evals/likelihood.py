"""Log-likelihoods of continuations given a context, in batches.

The continuations of a context share a row. Each attends to the context and to itself, so the context is read once:

    tokens     c0 c1 c2 | c3 a0 a1 | c3 b0        context c, continuations a0 a1 a2 and b0 b1
    position    0  1  2 |  3  4  5 |  3  4
    predicts            | a0 a1 a2 | b0 b1        logits are computed at these positions only

A batch has rows of similar length. The model always runs uncompiled: compiling for one row length takes longer than a
whole task.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.data.loader import to_device
from gpt2_accel.models import evaluating
from gpt2_accel.progress import progress
from gpt2_accel.tokenizer import encode, text_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
Batch = TypeVar("Batch")
Result = TypeVar("Result")
BATCH_TOKENS = 4096  # maximum positions of a batch; a single row may have more
LOGIT_VALUES = 2**27  # maximum logits of a batch, likewise: 512 MiB in fp32


class Question(NamedTuple):
    """A context and its possible continuations, as token ids; none is empty."""

    context: list[int]
    continuations: list[list[int]]


class Score(NamedTuple):
    """The score of one continuation.

    `nats` is the negative log-likelihood of all its `tokens`, and `last_nats` that of the last token, in nats. `greedy`
    and `last_greedy` say whether all tokens, or the last one, are the model's first choice.
    """

    nats: float
    tokens: int
    greedy: bool
    last_nats: float
    last_greedy: bool


class Row(NamedTuple):
    """Continuations of a question that share a row after `context`; `places` are their indices in the question."""

    question: int
    places: list[int]
    context: list[int]
    continuations: list[list[int]]

    @property
    def answers(self) -> int:
        """The number of tokens to predict."""
        return sum(map(len, self.continuations))


def encode_question(
    tokenizer: "PreTrainedTokenizerBase", context: str, continuations: Sequence[str], where: str
) -> Question:
    """Returns a question from texts. Context and continuation are tokenized together, as running text.

    Spaces at the end of the context move to the continuations, as in lm-evaluation-harness. An empty context becomes
    `<|endoftext|>`. Raises `ValueError`, naming the question by `where`, for a continuation without tokens, or for an
    empty context if the tokenizer has no `<|endoftext|>`; also the errors of `encode`.
    """
    stem = context.rstrip()
    rest = context[len(stem) :]
    whole = [stem + rest + continuation for continuation in continuations]
    start, *ids = encode(tokenizer, [stem, *whole])
    cut = [text[len(start) :] for text in ids]
    if not all(cut):
        raise ValueError(f"{where} has a continuation without tokens: remove it")
    if not start:
        if (begin := text_start(tokenizer)) is None:
            raise ValueError(
                f"{where} has no context, and the tokenizer has no token that starts a text: remove it"
            )
        start = [begin]
    return Question(start, cut)


def fit_rows(questions: Sequence[Question], n_positions: int) -> tuple[list[Row], list[int]]:
    """Returns the rows of all questions, and the numbers of the questions whose context is cut from the left.

    Each continuation of a cut question has its own row, with the longest context that fits. Raises `ValueError` for a
    continuation that exceeds `n_positions` by itself.
    """
    rows, cut = [], []
    for number, (context, continuations) in enumerate(questions):
        longest = max(map(len, continuations))
        if longest > n_positions:
            raise ValueError(
                f"question {number} has a continuation of {longest} tokens, more than the model's "
                f"n_positions ({n_positions}): remove it"
            )
        if len(context) + longest - 1 <= n_positions:
            rows.append(Row(number, list(range(len(continuations))), context, continuations))
            continue
        cut.append(number)
        for place, continuation in enumerate(continuations):
            kept = context[-(n_positions + 1 - len(continuation)) :]
            rows.append(Row(number, [place], kept, [continuation]))
    return rows, cut


def batched(items: Iterable[Item], fit: Callable[[list[Item]], bool]) -> list[list[Item]]:
    """Groups the items, in order, into batches that `fit`; each has at least one item."""
    batches: list[list[Item]] = []
    for item in items:
        if batches and fit([*batches[-1], item]):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def fits(rows: int, width: int, predicted: int, vocab_size: int) -> bool:
    """Whether a batch of `rows` x `width` positions, with logits at the last `predicted`, is within the limits."""
    return rows * width <= BATCH_TOKENS and rows * predicted * vocab_size <= LOGIT_VALUES


def shape(batch: Sequence[Row]) -> tuple[int, int]:
    """Returns the positions of a batch, and the number of last positions that need logits."""
    answers = max(row.answers for row in batch)
    return max(len(row.context) for row in batch) - 1 + answers, answers


def collate(batch: Sequence[Row], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the model's inputs: `input_ids` and `position_ids` (B, T) int64, `attention_mask` (B, 1, T, T) bool, and
    `targets` (B, S) int64 of the last S positions, -100 at padding.

    A row is the context, padding, the continuations, padding.
    """
    width, answers = shape(batch)
    input_ids = torch.zeros(len(batch), width, dtype=torch.int64)
    position_ids = torch.zeros_like(input_ids)
    targets = torch.full((len(batch), answers), -100)
    branch = torch.full_like(input_ids, -1)  # 0 context, 1 and up continuations, -1 padding
    for i, row in enumerate(batch):
        shared = len(row.context) - 1
        input_ids[i, :shared] = torch.tensor(row.context[:-1])
        position_ids[i, :shared] = torch.arange(shared)
        branch[i, :shared] = 0
        start = width - answers  # of the continuations
        for number, ids in enumerate(row.continuations, start=1):
            span = slice(start, start + len(ids))
            input_ids[i, span] = torch.tensor([row.context[-1], *ids[:-1]])
            position_ids[i, span] = torch.arange(shared, shared + len(ids))
            branch[i, span] = number
            targets[i, start + answers - width :][: len(ids)] = torch.tensor(ids)
            start += len(ids)
    input_ids, position_ids, targets, branch = to_device(
        (input_ids, position_ids, targets, branch), device
    )
    seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": (seen & causal)[:, None],
        "targets": targets,
    }


def score_batch(model: torch.nn.Module, batch: Sequence[Row]) -> torch.Tensor:
    """Returns the nats of each predicted token, and whether it is the model's first choice: (2, B, S)."""
    inputs = collate(batch, model.device)
    targets = inputs.pop("targets")
    logits = model(**inputs, logits_to_keep=targets.shape[1]).float()  # (B, S, V)
    first_choice = logits.argmax(dim=-1) == targets
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return torch.stack((nats.view_as(targets), first_choice.float()))


def batch_scores(batch: Sequence[Row], table: torch.Tensor) -> list[tuple[int, int, Score]]:
    """Returns (question, place, score) of each continuation of the rows; `table` is the result of `score_batch`."""
    scores = []
    for row, nats, first_choice in zip(batch, *table.tolist(), strict=True):
        start = 0
        for place, ids in zip(row.places, row.continuations, strict=True):
            end = start + len(ids)
            found = Score(
                nats=math.fsum(nats[start:end]),
                tokens=len(ids),
                greedy=all(first_choice[start:end]),
                last_nats=nats[end - 1],
                last_greedy=bool(first_choice[end - 1]),
            )
            scores.append((row.question, place, found))
            start = end
    return scores


def score(
    accelerator: Accelerator,
    model: torch.nn.Module,
    questions: Sequence[Question],
    interrupted: Callable[[], bool] = lambda: False,
) -> list[list[Score]]:
    """Returns the score of every continuation of every question, on all ranks. All ranks call it.

    `model` and `interrupted` are passed to `run_sharded`. Raises the error of `fit_rows`.
    """
    config = unwrap(accelerator, model).config
    rows, _ = fit_rows(questions, config.n_positions)
    rows.sort(key=lambda row: (-(row.answers // 8), -len(row.context), row.question, row.places))
    batches = batched(rows, lambda batch: fits(len(batch), *shape(batch), config.vocab_size))
    scored = run_sharded(accelerator, model, batches, score_batch, batch_scores, interrupted)
    results: list[list[Score]] = [[] for _ in questions]
    for question, _, found in sorted(scored):
        results[question].append(found)
    return results if scored else []


@torch.no_grad()
def run_sharded(
    accelerator: Accelerator,
    model: torch.nn.Module,
    batches: Sequence[Batch],
    run: Callable[[torch.nn.Module, Batch], torch.Tensor],
    read: Callable[[Batch, torch.Tensor], list[Result]],
    interrupted: Callable[[], bool],
) -> list[Result]:
    """Returns the results of `read(batch, values)` for all batches, unordered, on all ranks.

    `values` is what `run(model, batch)` returned, on the CPU. The host waits for the device once, after the last batch.
    `model` may be prepared or not; its mode is restored. Batch i runs on rank i modulo the number of ranks.
    `interrupted` is called before each round and must agree on all ranks; if True, the result is empty.
    """
    plain = unwrap(accelerator, model)
    found: list[tuple[Batch, torch.Tensor]] = []
    with evaluating(plain):
        rounds = range(0, len(batches), accelerator.num_processes)
        for first in progress(rounds, "evaluating", len(rounds), shown=accelerator.is_main_process):
            if interrupted():
                return []
            mine = first + accelerator.process_index
            # A rank without a batch repeats the last one: the forward of a sharded model needs all ranks.
            batch = batches[min(mine, len(batches) - 1)]
            values = run(plain, batch)
            if mine < len(batches):
                found.append((batch, values))
    sizes = [values.numel() for _, values in found]
    flat = torch.cat([values.flatten() for _, values in found]).cpu() if found else torch.empty(0)
    results: list[Result] = []
    for (batch, values), own in zip(found, flat.split(sizes), strict=True):
        results += read(batch, own.view(values.shape))
    return gather_object(results)

"""How likely a model finds continuations of contexts, many at once.

The continuations of one context share a row, in which each sees the context and itself, so that the
context is read once and not once for each:

    tokens     c0 c1 c2 | c3 a0 a1 | c3 b0        the context c, its continuations a0 a1 a2 and b0 b1
    position    0  1  2 |  3  4  5 |  3  4
    predicts            | a0 a1 a2 | b0 b1        the logits of these positions are all that is computed

Rows of like length make a batch. The model runs uncompiled, whatever the launch says: no length compiles
anything, and a whole task takes less time than the compiler needs for one of its lengths.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.tokenizer import encode

Item = TypeVar("Item")
Batch = TypeVar("Batch")
Result = TypeVar("Result")
BATCH_TOKENS = 4096  # positions of one batch, at most, unless a single row has more
LOGIT_VALUES = 2**27  # logits of one batch, at most, likewise: 512 MiB in fp32


@dataclass
class Question:
    """A context and what may follow it, as token ids; none of them empty."""

    context: list[int]
    continuations: list[list[int]]


class Score(NamedTuple):
    """What a model says of one continuation: negative log-likelihoods in nats, of all its `tokens` and of
    the last, and whether all of them, and the last, are the model's first choice."""

    nats: float
    tokens: int
    greedy: bool
    last_nats: float
    last_greedy: bool


class Row(NamedTuple):
    """Continuations of a question that are scored together: `places` in its list, after `context`."""

    question: int
    places: list[int]
    context: list[int]
    continuations: list[list[int]]

    @property
    def answers(self) -> int:
        """Tokens to predict."""
        return sum(map(len, self.continuations))


def encode_question(
    tokenizer: PreTrainedTokenizerBase, context: str, continuations: Sequence[str], where: str
) -> Question:
    """A question from texts, which are tokenized together, so that a word is cut as in running text.

    Spaces that end the context go to the continuations, as in lm-evaluation-harness. An empty context is
    the start of a text. Raises `ValueError`, with the question's place `where`, for a continuation without
    tokens or an empty context where the tokenizer has no `<|endoftext|>`; and as `encode`.
    """
    stem = context.rstrip()
    rest = context[len(stem) :]
    whole = [stem + rest + continuation for continuation in continuations]
    start, *ids = encode(tokenizer, [stem, *whole])
    cut = [text[len(start) :] for text in ids]
    if not all(cut):
        raise ValueError(f"{where} has a continuation without tokens: take it out")
    if not start:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"{where} has no context, and the tokenizer no token that starts a text: take it out"
            )
        start = [tokenizer.eos_token_id]
    return Question(start, cut)


def fit_rows(questions: Sequence[Question], n_positions: int) -> tuple[list[Row], list[int]]:
    """The rows of all questions, and the numbers of those whose context had to be cut from the left.

    There each continuation has a row of its own, with as much context as fits beside it. Raises
    `ValueError` for a continuation that does not fit by itself.
    """
    rows, cut = [], []
    for number, (context, continuations) in enumerate(
        (q.context, q.continuations) for q in questions
    ):
        longest = max(map(len, continuations))
        if longest > n_positions:
            raise ValueError(
                f"question {number} has a continuation of {longest} tokens, more than the model's "
                f"n_positions ({n_positions}): take it out"
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
    """The items in their order, as many to a batch as `fit` together, at least one."""
    batches: list[list[Item]] = []
    for item in items:
        if batches and fit([*batches[-1], item]):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def fits(rows: int, width: int, predicted: int, vocab_size: int) -> bool:
    """Whether a batch of so many rows and positions, with logits at the last `predicted`, is small enough."""
    return rows * width <= BATCH_TOKENS and rows * predicted * vocab_size <= LOGIT_VALUES


def shape(batch: Sequence[Row]) -> tuple[int, int]:
    """The positions of a batch, and how many of them, the last, have logits."""
    answers = max(row.answers for row in batch)
    return max(len(row.context) for row in batch) - 1 + answers, answers


def collate(batch: Sequence[Row], device: torch.device) -> dict[str, torch.Tensor]:
    """The batch as the model reads it: `input_ids` and `position_ids` (B, T) int64, `attention_mask`
    (B, 1, T, T) bool, and `targets` (B, S) int64 of the last S positions, -100 where there is none.

    Each row is its context, padding, its continuations, padding.
    """
    width, answers = shape(batch)
    input_ids = torch.zeros(len(batch), width, dtype=torch.int64)
    position_ids = torch.zeros_like(input_ids)
    targets = torch.full((len(batch), answers), -100)
    branch = torch.full_like(input_ids, -1)  # 0 the context, then the continuations; -1 padding
    for i, row in enumerate(batch):
        shared = len(row.context) - 1
        input_ids[i, :shared] = torch.tensor(row.context[:-1])
        position_ids[i, :shared] = torch.arange(shared)
        branch[i, :shared] = 0
        start = width - answers  # of the continuations
        for number, ids in enumerate(row.continuations, start=1):
            here = slice(start, start + len(ids))
            input_ids[i, here] = torch.tensor([row.context[-1], *ids[:-1]])
            position_ids[i, here] = torch.arange(shared, shared + len(ids))
            branch[i, here] = number
            targets[i, start + answers - width :][: len(ids)] = torch.tensor(ids)
            start += len(ids)
    branch = branch.to(device)
    seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return {
        "input_ids": input_ids.to(device),
        "position_ids": position_ids.to(device),
        "attention_mask": (seen & causal)[:, None],
        "targets": targets.to(device),
    }


def score_batch(model: torch.nn.Module, batch: Sequence[Row]) -> list[tuple[int, int, Score]]:
    """The scores of each row's continuations, each with its question and its place there."""
    inputs = collate(batch, model.device)
    targets = inputs.pop("targets")
    logits = model(**inputs, logits_to_keep=targets.shape[1]).float()  # (B, S, V)
    first_choice = logits.argmax(dim=-1) == targets
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    table = torch.stack((nats.view_as(targets), first_choice.float())).tolist()
    return [
        score
        for row, *figures in zip(batch, *table, strict=True)
        for score in row_scores(row, *figures)
    ]


def row_scores(
    row: Row, nats: list[float], first_choice: list[float]
) -> Iterator[tuple[int, int, Score]]:
    """The scores of one row from the figures of its predicted tokens."""
    start = 0
    for place, ids in zip(row.places, row.continuations, strict=True):
        end = start + len(ids)
        yield (
            row.question,
            place,
            Score(
                nats=math.fsum(nats[start:end]),
                tokens=len(ids),
                greedy=all(first_choice[start:end]),
                last_nats=nats[end - 1],
                last_greedy=bool(first_choice[end - 1]),
            ),
        )
        start = end


def score(
    accelerator: Accelerator,
    model: torch.nn.Module,
    questions: Sequence[Question],
    interrupted: Callable[[], bool] = lambda: False,
) -> list[list[Score]]:
    """The score of every continuation of every question, on all ranks, which all call it.

    `model` and `interrupted` are those of `run_sharded`. Raises as `fit_rows`.
    """
    config = unwrap(accelerator, model).config
    rows, _ = fit_rows(questions, config.n_positions)
    rows.sort(key=lambda row: (-(row.answers // 8), -len(row.context), row.question, row.places))
    batches = batched(rows, lambda batch: fits(len(batch), *shape(batch), config.vocab_size))
    scored = run_sharded(accelerator, model, batches, score_batch, interrupted)
    results: list[list[Score]] = [[] for _ in questions]
    for question, _, found in sorted(scored):
        results[question].append(found)
    return results if scored else []


@torch.no_grad()
def run_sharded(
    accelerator: Accelerator,
    model: torch.nn.Module,
    batches: Sequence[Batch],
    run: Callable[[torch.nn.Module, Batch], list[Result]],
    interrupted: Callable[[], bool],
) -> list[Result]:
    """The results of `run(model, batch)` for all batches, in no particular order, on all ranks.

    `model` is the `GPT`, prepared or not; its mode is left as it was. Batches go round the ranks by number,
    so that none is run twice. `interrupted`, asked before each round and the same on all ranks, ends it
    without results.
    """
    plain = unwrap(accelerator, model)
    was_training = plain.training
    plain.eval()
    results: list[Result] = []
    for first in range(0, len(batches), accelerator.num_processes):
        if interrupted():
            plain.train(was_training)
            return []
        mine = first + accelerator.process_index
        # A rank without a batch of its own runs the last one too: a sharded model takes all ranks.
        found = run(plain, batches[min(mine, len(batches) - 1)])
        results += found if mine < len(batches) else []
    plain.train(was_training)
    return gather_object(results)

"""The benchmarks by name. All items are checked and tokenized before the first is scored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator

from gpt2_accel.data.loader import EvalLoader, open_split
from gpt2_accel.data.shards import check_tokenizer, conversation_length
from gpt2_accel.evals.chat import chat, load_chat
from gpt2_accel.evals.hellaswag import hellaswag, load_hellaswag
from gpt2_accel.evals.lambada import lambada, load_lambada
from gpt2_accel.evals.likelihood import BATCH_TOKENS, LOGIT_VALUES
from gpt2_accel.evals.perplexity import (
    check_stride,
    corpus_perplexity,
    load_corpus,
    load_pages,
    page_perplexity,
)
from gpt2_accel.evals.sources import texts
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.models import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = (
    *("hellaswag", "hellaswag_lm_eval", "lambada", "wikitext2", "wikitext103", "ptb", "text"),
    "chat",
)


# (accelerator, model, interrupted) -> {"TASK/METRIC": value}; empty if interrupted.
Evaluation = Callable[..., dict[str, float]]


@dataclass
class Prepared:
    """Evaluations that are ready to run, and notes on their data."""

    evaluations: list[Evaluation]
    notes: list[str]


def prepare_task(
    tokenizer: "PreTrainedTokenizerBase",
    config: ModelConfig,
    task: str,
    items: Sequence[dict],
    stride: int | None = None,
) -> Prepared:
    """Prepares the evaluation of a model with this config on the items of `task`, one of `TASKS`.

    `stride` of the windows applies to the text corpora. Raises `ValueError` for items that cannot be scored.
    """
    notes = [f"{task}: {len(items):,} item{'s' * (len(items) != 1)}"]
    if task.startswith("hellaswag"):
        style = "lm_eval" if task.endswith("lm_eval") else "plain"
        data = load_hellaswag(items, tokenizer, config.n_positions, style)
        notes += note_of_cut(task, data.cut, len(items), config.n_positions)
        if data.left_out:
            more = " and more" if len(data.left_out) > 8 else ""
            notes.append(
                f"{task}: {len(data.left_out):,} of {len(items):,} items are skipped, because they have an ending of "
                f"more than {config.n_positions:,} tokens: {', '.join(map(str, data.left_out[:8]))}{more}"
            )
        return Prepared([partial(hellaswag, data=data, prefix=task)], notes)
    if task == "chat":
        questions = load_chat(items, tokenizer, config)
        return Prepared([partial(chat, items=questions, tokenizer=tokenizer)], notes)
    found = texts(task, items)
    if task == "lambada":
        passages = load_lambada(found, tokenizer, config.n_positions)
        notes += note_of_cut(task, passages.cut, len(items), config.n_positions)
        return Prepared([partial(lambada, data=passages)], notes)
    check_stride(stride, config.n_positions)
    shared = {"task": task, "stride": stride}
    corpus = load_corpus(task, found, tokenizer)
    evaluations = [partial(corpus_perplexity, documents=corpus, **shared)]
    if task.startswith("wikitext"):
        pages = load_pages(found, tokenizer)
        evaluations.append(partial(page_perplexity, documents=pages, **shared))
    notes.append(
        f"{task}: {corpus[0].words:,} words, {len(corpus[0].ids) - 1:,} tokens, read with a stride of "
        f"{stride or config.n_positions:,}"
    )
    return Prepared(evaluations, notes)


def note_of_cut(task: str, cut: int, items: int, n_positions: int) -> list[str]:
    """Returns the note on contexts that were cut, if there are any."""
    if not cut:
        return []
    return [
        f"{task}: {cut:,} of {items:,} contexts are too long for the model's {n_positions:,} positions and "
        "were cut from the left"
    ]


def prepare_loss(
    accelerator: Accelerator,
    tokenizer: "PreTrainedTokenizerBase",
    config: ModelConfig,
    data_dir: str | Path,
    max_tokens: int,
) -> Prepared:
    """Prepares `validation_loss` on the train and val splits of `data_dir`, at most `max_tokens` tokens each.

    Raises `ValueError` if the data was made with another tokenizer than the model's.
    """
    check_tokenizer(data_dir, tokenizer, "the model")
    evaluations, notes = [], []
    length = conversation_length(data_dir) or config.n_positions
    tokens = min(BATCH_TOKENS, LOGIT_VALUES // config.vocab_size, max_tokens)
    for split in ("train", "val"):
        loader = EvalLoader(
            open_split(data_dir, split),
            sequence_length=length,
            batch_size=max(1, tokens // length),
            max_tokens=max_tokens,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            device=accelerator.device,
        )
        evaluations.append(partial(validation_loss, loader=loader, prefix=split))
        notes.append(
            f"{split}: the first {loader.windows * length:,} of "
            f"{sum(s.tokens for s in loader.streams):,} tokens of {data_dir}, in windows of {length:,}"
        )
    return Prepared(evaluations, notes)

"""Perplexity of a model on a text.

Two conventions. In the GPT-2 paper's, a corpus is one long text, and the summed loss is divided by the number of words
before `detokenize`. In lm-evaluation-harness's, each document is separate, after `lm_eval_wikitext`, and the loss is
divided by the harness's own word count.

`<|endoftext|>` precedes each text. The text is read in windows: the first predicts `n_positions` tokens, each later one
the next `stride` tokens after the longest context that fits. Every token is predicted once. With a stride of
`n_positions`, the default here and in lm-evaluation-harness, windows do not overlap, except that the last one starts
earlier, to be full. A shorter stride gives tokens more context and costs more.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import Accelerator

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.data.loader import to_device
from gpt2_accel.evals.detokenize import count_words, detokenize, lm_eval_wikitext
from gpt2_accel.evals.formulas import bits_per_byte, mean_loss, perplexity
from gpt2_accel.evals.likelihood import batched, fits, run_sharded
from gpt2_accel.tokenizer import encode, text_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Task -> the corpus of `detokenize`.
CORPUS_OF = {"wikitext2": "wikitext", "wikitext103": "wikitext", "ptb": "ptb"}


@dataclass
class Document:
    """A text as token ids. The first token is context only; `words` and `bytes` divide the loss."""

    ids: list[int]
    words: int
    bytes: int


class Window(NamedTuple):
    """A window of a document: reads the tokens [start, end) and predicts `first` to `end`, inclusive."""

    document: int
    start: int
    first: int
    end: int

    @property
    def length(self) -> int:
        """The number of tokens read."""
        return self.end - self.start

    @property
    def context(self) -> int:
        """The number of tokens before the one that predicts `first`."""
        return self.first - 1 - self.start


def load_corpus(
    task: str, texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase"
) -> list[Document]:
    """Returns all texts as one document, in the GPT-2 paper's convention.

    The text is de-tokenized if `task` is in `CORPUS_OF`. `bytes` counts the text that the model reads. Raises
    `ValueError` if there is nothing to predict.
    """
    text = "\n".join(text.removesuffix("\n") for text in texts)
    written = detokenize(text, CORPUS_OF[task]) if task in CORPUS_OF else text
    words = sum(map(count_words, texts))
    return [to_document(tokenizer, written, words, len(written.encode()))]


def load_pages(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[Document]:
    """Returns each text as a document, in lm-evaluation-harness's convention.

    Words and bytes are counted before `lm_eval_wikitext`. Raises `ValueError` for a text with nothing to predict.
    """
    return [
        to_document(
            tokenizer, lm_eval_wikitext(text), len(re.split(r"\s+", text)), len(text.encode())
        )
        for text in texts
    ]


def to_document(tokenizer: "PreTrainedTokenizerBase", text: str, words: int, size: int) -> Document:
    """Tokenizes a text after `<|endoftext|>`; without that token, the text's first token is context only.

    Raises `ValueError` if there is nothing to predict.
    """
    begin = text_start(tokenizer)
    start = [] if begin is None else [begin]
    ids = start + encode(tokenizer, [text])[0]
    if len(ids) < 2:
        raise ValueError(
            f"there is nothing to predict in the text {text[:40]!r}: give a longer text"
        )
    return Document(ids, words, size)


def check_stride(stride: int | None, n_positions: int) -> None:
    """Raises `ValueError` for a stride that is not between 1 and `n_positions`."""
    if stride is not None and not 1 <= stride <= n_positions:
        raise ValueError(f"stride must be between 1 and n_positions ({n_positions}), got {stride}")


def windows(document: int, tokens: int, n_positions: int, stride: int | None) -> Iterator[Window]:
    """Yields the windows of document number `document`, which has `tokens` tokens."""
    stride = stride or n_positions
    first = 1
    while first < tokens:
        end = min(tokens - 1, first + (n_positions if first == 1 else stride) - 1)
        yield Window(document, max(0, end - n_positions), first, end)
        first = end + 1


def text_loss(
    accelerator: Accelerator,
    model: torch.nn.Module,
    documents: Sequence[Document],
    stride: int | None,
    interrupted: Callable[[], bool],
) -> tuple[list[Window], list[float]]:
    """Returns all windows in order and the loss of each in nats; empty lists if `interrupted`."""
    config = unwrap(accelerator, model).config
    check_stride(stride, config.n_positions)
    todo = [
        window
        for number, document in enumerate(documents)
        for window in windows(number, len(document.ids), config.n_positions, stride)
    ]

    def read(batch: Sequence[Window], nats: torch.Tensor) -> list[tuple[Window, float]]:
        return list(zip(batch, nats.cpu().double().sum(dim=1).tolist(), strict=True))

    batches = batched(
        sorted(todo, key=lambda window: (-window.length, window.context, window)),
        lambda batch: fits(len(batch), *shape(batch), config.vocab_size),
    )
    run = partial(window_loss, documents=documents)
    found = dict(run_sharded(accelerator, model, batches, run, read, interrupted))
    return (todo, [found[window] for window in todo]) if found else ([], [])


def shape(batch: Sequence[Window]) -> tuple[int, int]:
    """Returns the positions of a batch, and the number of last positions that need logits."""
    width = max(window.length for window in batch)
    return width, width - min(window.context for window in batch)


def window_loss(
    model: torch.nn.Module, batch: Sequence[Window], documents: Sequence[Document]
) -> torch.Tensor:
    """Returns the loss of each predicted token of the windows in nats, (B, S), 0 at padding."""
    width, kept = shape(batch)
    input_ids = torch.zeros(len(batch), width, dtype=torch.int64)
    targets = torch.full_like(input_ids, -100)
    for i, window in enumerate(batch):
        ids = torch.tensor(documents[window.document].ids[window.start : window.end + 1])
        input_ids[i, : window.length] = ids[:-1]
        targets[i, window.context : window.length] = ids[window.context + 1 :]
    inputs = to_device((input_ids, targets[:, -kept:]), model.device)
    return model(*inputs, reduction="none", logits_to_keep=kept)


def corpus_perplexity(
    accelerator: Accelerator,
    model: torch.nn.Module,
    interrupted: Callable[[], bool] = lambda: False,
    *,
    task: str,
    documents: Sequence[Document],
    stride: int | None = None,
) -> dict[str, float]:
    """Returns `loss` per token, with its standard error over windows, `perplexity_per_token`, `perplexity_per_word` and
    `bits_per_byte` of the documents.

    All ranks call it and read a share each. A `stride` of None is `n_positions`. If `interrupted`, the result is empty,
    as in `run_sharded`.
    """
    found, nats = text_loss(accelerator, model, documents, stride, interrupted)
    if not found:
        return {}
    tokens = [window.end - window.first + 1 for window in found]
    words = sum(document.words for document in documents)
    results = mean_loss(nats, tokens)
    results["perplexity_per_token"] = perplexity(nats, tokens)["perplexity"]
    results["perplexity_per_word"] = perplexity([sum(nats)], [words])["perplexity"]
    results |= bits_per_byte(nats, sum(document.bytes for document in documents))
    return {f"{task}/{name}": value for name, value in results.items()}


def page_perplexity(
    accelerator: Accelerator,
    model: torch.nn.Module,
    interrupted: Callable[[], bool] = lambda: False,
    *,
    task: str,
    documents: Sequence[Document],
    stride: int | None = None,
) -> dict[str, float]:
    """Returns `lm_eval_word_perplexity`, with its standard error over documents, `lm_eval_byte_perplexity` and
    `lm_eval_bits_per_byte`, named as in lm-evaluation-harness. Otherwise like `corpus_perplexity`."""
    found, nats = text_loss(accelerator, model, documents, stride, interrupted)
    if not found:
        return {}
    of_document = [0.0] * len(documents)
    for window, value in zip(found, nats, strict=True):
        of_document[window.document] += value
    sizes = [document.bytes for document in documents]
    words = perplexity(of_document, [document.words for document in documents])
    results = {f"word_{name}": value for name, value in words.items()}
    results["byte_perplexity"] = perplexity(of_document, sizes)["perplexity"]
    results |= bits_per_byte(of_document, sum(sizes))
    return {f"{task}/lm_eval_{name}": value for name, value in results.items()}

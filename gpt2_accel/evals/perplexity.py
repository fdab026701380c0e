"""Perplexity of a model on a text, read in windows with a stride.

The token that begins documents, `<|endoftext|>` or BOS, precedes the text. The first window
predicts `n_positions` tokens, each later one the next `stride` tokens after the longest context
that fits. Every token is predicted once. With a stride of `n_positions`, the default here and in
lm-evaluation-harness, windows do not overlap, except that the last one starts earlier, to be full.
A shorter stride gives tokens more context and costs more.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gpt2_accel.evals.items import Item
from gpt2_accel.evals.likelihood import LikelihoodTask, Row
from gpt2_accel.evals.metrics import combine
from gpt2_accel.models import ModelConfig
from gpt2_accel.tokenizer import encode, text_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextPerplexity(LikelihoodTask):
    """The evaluation of a model of shape `config` on one text: the items' `text`, joined by line
    ends.

    A `stride` of None is `n_positions`. If the tokenizer has no token that starts a text, the first
    token of the text is context only. Raises `ValueError` for a stride that is not between 1 and
    `n_positions`, and if there is nothing to predict.
    """

    def __init__(
        self,
        items: Sequence[Item],
        tokenizer: "PreTrainedTokenizerBase",
        config: ModelConfig,
        stride: int | None = None,
    ):
        n_positions = config.n_positions
        stride = n_positions if stride is None else stride
        if not 1 <= stride <= n_positions:
            raise ValueError(
                f"stride must be between 1 and n_positions ({n_positions}), got {stride}"
            )
        text = "\n".join(item.field("text", str).removesuffix("\n") for item in items)
        ids = text_start(tokenizer) + encode(tokenizer, [text])[0]
        if len(ids) < 2:
            raise ValueError(
                f"there is nothing to predict in the text {text[:40]!r}: give a longer text"
            )
        ends = [*range(1 + n_positions, len(ids), stride), len(ids)]
        self.questions = []
        for first, end in pairwise([1, *ends]):  # the first token is context only
            start = max(0, end - 1 - n_positions)
            self.questions.append([Row(ids[start:end], first - start)])
        self.bytes = len(text.encode())
        self.notes = [f"text: {len(ids) - 1:,} tokens, read with a stride of {stride:,}"]

    def metrics(self, scores: list[list[float]]) -> dict[str, float]:
        """Returns `text/loss` per token in nats, with its standard error over windows,
        `perplexity_per_token` and `bits_per_byte`."""
        columns: dict[str, list[Any]] = {
            "nats": [-value for (value,) in scores],
            "tokens": [window.predicted for (window,) in self.questions],
        }
        results = combine("text", "token_loss", {"loss": columns}, text_bytes=self.bytes)
        results["text/perplexity_per_token"] = results.pop("text/perplexity")
        return results

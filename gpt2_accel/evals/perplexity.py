"""Perplexity of a model on a text, read in windows with a stride.

The token that starts documents, `<|endoftext|>` or BOS, precedes the text. The first window
predicts `n_positions` tokens; each later window predicts the next `stride` tokens after the longest
context that fits. Every token is predicted once. With a stride of `n_positions`, the default here
and in lm-evaluation-harness, windows do not overlap, except that the last one starts earlier, to be
full. With `bos` that token replaces the first of each window. A shorter stride gives tokens more
context and takes longer.
"""

from collections.abc import Sequence

from gpt2_accel.evals.formulas import token_loss
from gpt2_accel.evals.items import Item
from gpt2_accel.evals.likelihood import LikelihoodTask, Row
from gpt2_accel.models import ModelConfig
from gpt2_accel.tokenizer import LOSSY, PreTrainedTokenizerBase, encode, lost_characters, text_start


class TextPerplexity(LikelihoodTask):
    """The `Evaluation` on one text: the `text` of all items, joined by newlines.

    `stride` is in tokens, default `config.n_positions`. If the tokenizer has no token that starts a
    text, the first token of the text is context only. Raises `ValueError` for a stride that is not
    between 1 and `n_positions`, and if there is nothing to predict.
    """

    def __init__(
        self,
        items: Sequence[Item],
        tokenizer: "PreTrainedTokenizerBase",
        config: ModelConfig,
        stride: int | None = None,
        bos: Sequence[int] = (),
    ):
        n_positions = config.n_positions
        stride = n_positions if stride is None else stride
        if not 1 <= stride <= n_positions:
            raise ValueError(
                f"stride must be between 1 and n_positions ({n_positions}), got {stride}"
            )
        text = "\n".join(item.field("text", str).removesuffix("\n") for item in items)
        ids = [*(bos or text_start(tokenizer)), *encode(tokenizer, [text])[0]]
        if len(ids) < 2:
            raise ValueError(
                f"there is nothing to predict in the text {text[:40]!r}: give a longer text"
            )
        self.questions = []
        first = 1  # the first token is context only
        for end in [*range(1 + n_positions, len(ids), stride), len(ids)]:
            start = max(0, end - 1 - n_positions)
            self.questions.append([Row([*bos, *ids[start + len(bos) : end]], end - first)])
            first = end
        self.bytes = len(text.encode())
        self.notes = [f"text: {len(ids) - 1:,} tokens, read with a stride of {stride:,}"]
        lost = lost_characters(tokenizer, text, ids)
        if lost:
            self.notes.append(f"text: {LOSSY.format(lost)}")

    def metrics(self, scores: list[list[float]]) -> dict[str, float]:
        """Returns `text/loss`, per token in nats, with its standard error over windows,
        `text/perplexity_per_token` and `text/bits_per_byte`."""
        nats = [-value for (value,) in scores]
        tokens = [window.predicted for (window,) in self.questions]
        results = token_loss(nats, tokens, self.bytes)
        results["perplexity_per_token"] = results.pop("perplexity")
        return {f"text/{name}": value for name, value in results.items()}

"""The formulas of all evaluation metrics, on plain lists of numbers.

A sample is a window of tokens, a document, or a question with its choices. Standard errors are over samples, which are
taken as independent; a single sample has no standard error.
"""

import math
from collections.abc import Sequence


def mean_loss(nats: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    """Returns `loss`, the mean negative log-likelihood per token in nats, and its standard error `loss_stderr`.

    nats: (n,), the sum of each sample; tokens: (n,), the number of tokens of each sample. Every token has the same
    weight. The standard error is that of a ratio of two sums (Cochran, Sampling Techniques, 1977, section 2.11).
    Raises `ValueError` if there are no tokens.
    """
    total = sum(tokens)
    if not total:
        raise ValueError("the mean loss of no tokens is undefined: give at least one token")
    loss = math.fsum(nats) / total
    n = len(nats)
    if n < 2:
        return {"loss": loss}
    squares = math.fsum((x - loss * t) ** 2 for x, t in zip(nats, tokens, strict=True))
    return {"loss": loss, "loss_stderr": math.sqrt(squares * n / (n - 1)) / total}


def perplexity(loss: float) -> float:
    """Returns the exponential of a mean loss in nats (per token or word); infinite if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(nats: Sequence[float], text_bytes: float) -> float:
    """Returns the code length of a text in bits per byte; comparable across tokenizers.

    nats: (n,), the sum of each sample; `text_bytes` is the length of all samples' text in UTF-8.
    """
    return math.fsum(nats) / math.log(2) / text_bytes


def choice_accuracy(
    scores: Sequence[Sequence[float]], labels: Sequence[int], name: str = "accuracy"
) -> dict[str, float]:
    """Returns the `accuracy` of samples whose choice with the highest score counts as their answer.

    The first of equal scores is chosen. A sample with a NaN score counts as wrong.

    scores: (n, choices), the number of choices may differ between samples; labels: (n,), in [0, choices). n is at least 1.
    """
    right = []
    for row, label in zip(scores, labels, strict=True):
        best = max(range(len(row)), key=row.__getitem__)
        right.append(best == label and not any(map(math.isnan, row)))
    return accuracy(right, name)


def accuracy(right: Sequence[bool], name: str = "accuracy") -> dict[str, float]:
    """Returns the share of correct samples, of one at least, as `name`, and its standard error as `name` + "_stderr"."""
    n = len(right)
    share = sum(right) / n
    error = {f"{name}_stderr": math.sqrt(share * (1 - share) / (n - 1))} if n > 1 else {}
    return {name: share, **error}

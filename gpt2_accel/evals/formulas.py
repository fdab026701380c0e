"""Formulas of the metrics, on plain lists; `metrics/` wraps them for the `evaluate` library.

A sample is a window of tokens, a document, or a question with its choices. Standard errors are over
samples, assumed to be independent; a single sample has no standard error. Sums are exact, so
results do not depend on the order.
"""

import math
from collections.abc import Sequence


def mean_loss(nats: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    """Returns `loss`, the mean negative log-likelihood per token in nats, and its standard error
    `loss_stderr`.

    nats: (n,), the sum of each sample; tokens: (n,), the number of tokens of each sample. Every
    token has the same weight. The standard error uses the formula for a ratio of two sums (Cochran,
    Sampling Techniques, 1977, section 2.11). Raises `ValueError` if there are no tokens.
    """
    total = sum(tokens)
    n = len(nats)
    if not total:
        raise ValueError("the mean loss of no tokens is undefined: give at least one token")
    loss = math.fsum(nats) / total
    if n < 2:
        return {"loss": loss}
    squares = math.fsum((x - loss * t) ** 2 for x, t in zip(nats, tokens, strict=True))
    return {"loss": loss, "loss_stderr": math.sqrt(squares * n / (n - 1)) / total}


def token_loss(
    nats: Sequence[float], tokens: Sequence[int], text_bytes: float | None = None
) -> dict[str, float]:
    """Returns `mean_loss`; `perplexity`, the exponential of the loss, infinite if it overflows; and
    `bits_per_byte`, the code length of the text, if `text_bytes` has the UTF-8 bytes of all
    samples' text."""
    results = mean_loss(nats, tokens)
    loss = results["loss"]
    results["perplexity"] = math.exp(loss) if loss < 709 else math.inf
    if text_bytes:
        results["bits_per_byte"] = math.fsum(nats) / math.log(2) / text_bytes
    return results


def choice_accuracy(
    scores: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    references: Sequence[int],
    name: str,
) -> dict[str, float]:
    """Returns the `accuracy` of multiple choices.

    The answer of a sample is the choice with the highest score divided by length, the first one if
    several are equal. A sample with a NaN score is wrong.

    scores: log-likelihoods of a sample's choices; lengths: their divisors; references: the index of
    the right choice.
    """
    right = []
    for row, divisors, label in zip(scores, lengths, references, strict=True):
        means = [score / length for score, length in zip(row, divisors, strict=True)]
        right.append(means.index(max(means)) == label and not math.isnan(sum(means)))
    return accuracy(right, name)


def exact_match(
    predictions: Sequence[str], references: Sequence[str], name: str
) -> dict[str, float]:
    """Returns the `accuracy` of texts that equal their references, without spaces at both ends."""
    pairs = zip(predictions, references, strict=True)
    return accuracy([answer.strip() == expected.strip() for answer, expected in pairs], name)


def accuracy(right: Sequence[bool], name: str) -> dict[str, float]:
    """Returns the share of right samples, as `name`, and its standard error, as `name` +
    "_stderr". There is at least one sample."""
    n = len(right)
    mean = sum(right) / n
    results = {name: mean}
    if n > 1:
        results[f"{name}_stderr"] = math.sqrt(mean * (1 - mean) / (n - 1))
    return results

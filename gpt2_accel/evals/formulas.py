"""Formulas of the metrics, on plain lists; `metrics/` wraps them for the `evaluate` library.

A sample is a window of tokens, a document, or a question with its choices. Standard errors are over
samples, assumed to be independent; a single sample has no standard error. Sums are exact, so
results do not depend on the order.

A mean has the entries `NAME`, `NAME_stderr`, its standard error, and `NAME_stderr_n`, the number of
samples. Files have all three; `formatted` makes an interval of them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

INTERVALS = "± and ranges are 95% intervals"
# The 0.975 quantile of Student's t with d degrees of freedom is this polynomial of 1/d (Abramowitz
# and Stegun, Handbook of Mathematical Functions, 1964, 26.7.5): to within 1% from 2 degrees on, 12%
# too small for one.
T = (1.58954, 2.55585, 2.82250, 2.37227, 1.95996)


def mean(sums: Sequence[float], counts: Sequence[int] = (), name: str = "loss") -> dict[str, float]:
    """Returns a mean, such as the loss per token, as `name`; with two samples or more its standard
    error, as `name` + "_stderr", and their number, as `name` + "_stderr_n".

    sums: (n,), the sum of each sample; counts: (n,), the number of terms of each, such as tokens,
    which all have the same weight. The standard error uses the formula for a ratio of two sums
    (Cochran, Sampling Techniques, 1977, section 2.11). If all samples are equal, it is 0, and the
    number is left out: they do not show how far others spread. Without counts a sample is a value,
    such as whether an answer is right, or a reward, and the number is there. Raises `ValueError` if
    there are no terms.
    """
    n = len(sums)
    terms = counts or [1] * n
    total = sum(terms)
    if not total:
        raise ValueError("the mean loss of no tokens is undefined: give at least one token")
    value = math.fsum(sums) / total
    results = {name: value}
    if n > 1:
        squares = math.fsum((x - value * t) ** 2 for x, t in zip(sums, terms, strict=True))
        results[f"{name}_stderr"] = math.sqrt(squares * n / (n - 1)) / total
        if squares or not counts:
            results[f"{name}_stderr_n"] = n
    return results


def token_loss(
    nats: Sequence[float], tokens: Sequence[int], text_bytes: float | None = None
) -> dict[str, float]:
    """Returns `mean`; `perplexity`, the exponential of the loss, infinite if it overflows; and
    `bits_per_byte`, the code length of the text, if `text_bytes` has the UTF-8 bytes of all
    samples' text."""
    results = mean(nats, tokens)
    loss = results["loss"]
    results["perplexity"] = math.exp(loss) if loss < 709 else math.inf
    if text_bytes:
        results["bits_per_byte"] = math.fsum(nats) / math.log(2) / text_bytes
    return results


def choice_accuracy(
    scores: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    references: Sequence[int],
    name: str = "acc",
) -> dict[str, float]:
    """Returns the `mean` of right answers as `name`.

    scores: log-likelihoods of a sample's choices; their number may differ between samples. lengths:
    divisors of the scores: 1, or the tokens or characters of each choice. references: the index of
    the right choice. The answer of a sample is the choice with the highest score divided by length,
    the first one if several are equal. A sample with a NaN score is wrong.
    """
    right = []
    for row, divisors, label in zip(scores, lengths, references, strict=True):
        means = np.divide(row, divisors)
        right.append(means.argmax() == label and not np.isnan(means).any())
    return mean(right, name=name)


def exact_match(
    predictions: Sequence[str], references: Sequence[str], name: str = "exact_match"
) -> dict[str, float]:
    """Returns the share of `predictions` that equal their `references`, without spaces at both
    ends, as `name`, with the entries of `mean`."""
    pairs = zip(predictions, references, strict=True)
    return mean([answer.strip() == expected.strip() for answer, expected in pairs], name=name)


def formatted(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns each result as text, by `number`, without entries for its standard error."""
    return {name: number(results, name) for name in results if "_stderr" not in name}


def number(values: Mapping[str, Any], name: str) -> str:
    """Formats a result with its 95% interval, if its standard error is known: 3.4742 ± 0.0669, or
    12,345; a share as 0.9270 (0.9114 to 0.9400). Empty for a result that is not in `values`.

    A share, a mean of zeros and ones, is known by its standard error, which other values between 0
    and 1 do not have. Its interval is Wilson's (1927), also if all samples are right, or all wrong.
    Files of release 0.6 have no number of samples: the interval is then that of many.

    The interval of another mean is Student's t. With 20 samples it holds the true mean in 95% of
    cases if they are normal, 92% if exponential, 86% if lognormal with sigma 1; with 200 samples in
    95, 95 and 93%.
    """
    value, error, n = (values.get(name + end) for end in ("", "_stderr", "_stderr_n"))
    if value is None:
        return ""
    known = [value]
    if error is not None:
        variance = value * (1 - value)
        if n and math.isclose(error**2 * (n - 1), variance):
            w = T[-1] ** 2 / n
            half = math.sqrt(w * (variance + w / 4))
            low, high = ((value + w / 2 + side) / (1 + w) for side in (-half, half))
            return f"{value:.4f} ({abs(low):.4f} to {high:.4f})"
        if error:  # equal values do not show how far others spread
            known.append(error * np.polyval(T, 1 / (n - 1) if n else 0))
    return " ± ".join(f"{x:.4f}" if x < 1000 else f"{x:,.0f}" for x in known)

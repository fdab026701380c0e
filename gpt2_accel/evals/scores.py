"""What an evaluation adds up to: the formulas, on plain lists of numbers.

A sample is what was scored as one: a window of tokens, a document, a question with its choices. Every
standard error is over samples and takes them as independent; it is left out where there is only one.
"""

import math
from collections.abc import Sequence


def mean_loss(nats: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    """`loss`, the mean negative log-likelihood per token in nats, and its standard error `loss_stderr`.

    nats: (n,), summed over each sample; tokens: (n,), how many each has. Every token counts the same,
    however the samples are cut. The error is that of a ratio of two sums (Cochran, Sampling Techniques,
    1977, section 2.11). Raises `ValueError` if there are no tokens.
    """
    total = sum(tokens)
    if not total:
        raise ValueError("there is nothing to take the mean of: give at least one token")
    loss = math.fsum(nats) / total
    n = len(nats)
    if n < 2:
        return {"loss": loss}
    squares = math.fsum((x - loss * t) ** 2 for x, t in zip(nats, tokens, strict=True))
    return {"loss": loss, "loss_stderr": math.sqrt(squares * n / (n - 1)) / total}


def perplexity(nats: Sequence[float], units: Sequence[int]) -> dict[str, float]:
    """`perplexity`, the exponential of the mean loss per unit (token, word or byte), infinite where that
    is too large for a float, and `perplexity_stderr` by the delta method. Raises as `mean_loss`."""
    mean = mean_loss(nats, units)
    try:
        value = math.exp(mean["loss"])
    except OverflowError:
        value = math.inf
    error = {"perplexity_stderr": value * mean["loss_stderr"]} if "loss_stderr" in mean else {}
    return {"perplexity": value, **error}


def bits_per_byte(nats: Sequence[float], text_bytes: float) -> dict[str, float]:
    """`bits_per_byte`: the code length of the text, which compares across tokenizers.

    `text_bytes` is the length of all samples' text in UTF-8. Raises `ValueError` if that is not positive.
    """
    if text_bytes <= 0:
        raise ValueError(f"a text of {text_bytes} bytes has no bits per byte: give at least one")
    return {"bits_per_byte": math.fsum(nats) / math.log(2) / text_bytes}


def choice_accuracy(scores: Sequence[Sequence[float]], labels: Sequence[int]) -> dict[str, float]:
    """`accuracy`, the share of samples whose choice of highest score is the right one, the first of equals;
    and `accuracy_stderr`. A sample with a score that is not a number counts as wrong.

    scores: (n, choices), where the number of choices may differ; labels: (n,), in [0, choices).
    Raises `ValueError` if there are none, and for a label out of range.
    """
    right = []
    for i, (row, label) in enumerate(zip(scores, labels, strict=True)):
        if not 0 <= label < len(row):
            raise ValueError(f"sample {i} has the label {label}, but {len(row)} choices")
        best = max(range(len(row)), key=row.__getitem__)
        right.append(best == label and not any(map(math.isnan, row)))
    return accuracy(right)


def accuracy(right: Sequence[bool]) -> dict[str, float]:
    """`accuracy`, the share of samples that are right, and `accuracy_stderr`. Raises `ValueError` if there
    are no samples."""
    n = len(right)
    if not n:
        raise ValueError("there are no samples to take the accuracy of: give at least one")
    share = sum(right) / n
    error = {"accuracy_stderr": math.sqrt(share * (1 - share) / (n - 1))} if n > 1 else {}
    return {"accuracy": share, **error}

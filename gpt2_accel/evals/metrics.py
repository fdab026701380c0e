"""The formulas of `scores.py` as metrics of the `evaluate` library, for use without the rest of this package.

    loss = TokenLoss()
    for batch in batches:
        loss.add_batch(nats=summed_losses, tokens=token_counts)  # one of each per sample
    loss.compute()  # {"loss": …, "loss_stderr": …}

Several processes count as one, as with every metric of that library: give each `num_process`, its
`process_id` and one `experiment_id`; process 0 gets the result over all samples, the others None. Each adds
at least one sample.
"""

from collections.abc import Sequence

import evaluate
from datasets import Features, Value
from datasets import Sequence as ListOf

from gpt2_accel.evals.scores import bits_per_byte, choice_accuracy, mean_loss, perplexity

NATS = "nats: of each sample, the negative log-likelihood summed over its tokens, in nats."
TOKENS = "tokens: of each sample, how many tokens (or words, or bytes) it has."


class Metric(evaluate.Metric):
    """A metric whose docstring, `inputs` and `columns` are what `evaluate` wants to know of it."""

    inputs = f"{NATS}\n{TOKENS}"
    columns = {"nats": Value("float64"), "tokens": Value("int64")}  # noqa: RUF012

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__ or "",
            citation="",
            inputs_description=self.inputs,
            features=Features(self.columns),
        )


class TokenLoss(Metric):
    """Mean loss per token, however the samples are cut: not the mean of batches' means."""

    def _compute(self, nats: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
        return mean_loss(nats, tokens)


class Perplexity(Metric):
    """The exponential of the mean loss per token."""

    def _compute(self, nats: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
        return perplexity(nats, tokens)


class BitsPerByte(Metric):
    """The code length of the text in bits by its length in bytes, which compares across tokenizers."""

    inputs = f"{NATS}\nbytes: of each sample, in UTF-8."
    columns = {"nats": Value("float64"), "bytes": Value("int64")}  # noqa: RUF012

    def _compute(self, nats: Sequence[float], bytes: Sequence[int]) -> dict[str, float]:
        return bits_per_byte(nats, sum(bytes))


class ChoiceAccuracy(Metric):
    """How often the choice of highest score is the right one."""

    inputs = (
        "predictions: of each sample, a score for each choice, the higher the likelier: log-"
        "likelihoods, or these by the choice's length.\nreferences: the number of the right choice."
    )
    columns = {"predictions": ListOf(Value("float64")), "references": Value("int64")}  # noqa: RUF012

    def _compute(
        self, predictions: Sequence[Sequence[float]], references: Sequence[int]
    ) -> dict[str, float]:
        return choice_accuracy(predictions, references)

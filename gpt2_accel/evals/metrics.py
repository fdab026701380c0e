"""The formulas of `formulas.py` as metrics of the `evaluate` library, for use without the rest of this package.

    loss = TokenLoss()
    for batch in batches:
        loss.add_batch(nats=summed_losses, tokens=token_counts)  # one of each per sample
    loss.compute()  # {"loss": …, "loss_stderr": …, "perplexity": …}

With several processes, give each `num_process`, its `process_id` and a shared `experiment_id`, as for every metric of
that library. Process 0 gets the result over all samples, the others None. Each process adds at least one sample.
"""

from collections.abc import Sequence

import evaluate
from datasets import Features, Value
from datasets import Sequence as ListOf

from gpt2_accel.evals.formulas import bits_per_byte, choice_accuracy, mean_loss, perplexity

NATS = "nats: the negative log-likelihood of each sample, summed over its tokens, in nats."
TOKENS = "tokens: the number of tokens (or words, or bytes) of each sample."


class Metric(evaluate.Metric):
    """A metric that `evaluate` describes by its docstring, `inputs` and `columns`."""

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
    """The mean loss per token and its exponential. Every token has the same weight: this is not the mean of the batches'
    means."""

    def _compute(self, nats: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
        found = mean_loss(nats, tokens)
        return {**found, "perplexity": perplexity(found["loss"])}


class BitsPerByte(Metric):
    """The code length of the text in bits per byte of text; comparable across tokenizers."""

    inputs = f"{NATS}\nbytes: the length of each sample in UTF-8."
    columns = {"nats": Value("float64"), "bytes": Value("int64")}  # noqa: RUF012

    def _compute(self, nats: Sequence[float], bytes: Sequence[int]) -> dict[str, float]:
        return {"bits_per_byte": bits_per_byte(nats, sum(bytes))}


class ChoiceAccuracy(Metric):
    """The share of samples whose choice with the highest score is the correct one."""

    inputs = (
        "predictions: a score for each choice of each sample, such as its log-likelihood, optionally "
        "divided by the choice's length.\nreferences: the index of the correct choice."
    )
    columns = {"predictions": ListOf(Value("float64")), "references": Value("int64")}  # noqa: RUF012

    def _compute(
        self, predictions: Sequence[Sequence[float]], references: Sequence[int]
    ) -> dict[str, float]:
        return choice_accuracy(predictions, references)

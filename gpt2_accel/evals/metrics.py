"""The mean loss of `formulas.py` as a metric of the `evaluate` library, for use without the rest of this package.

    loss = TokenLoss()
    for batch in batches:
        loss.add_batch(nats=summed_losses, tokens=token_counts)  # one of each per sample
    loss.compute()  # {"loss": …, "loss_stderr": …, "perplexity": …}

With several processes, give `num_process`, its `process_id` and a shared `experiment_id`, as for every metric of that
library. Process 0 gets the result over all samples, the others None. Each process adds at least one sample.
"""

from collections.abc import Sequence

import evaluate
from datasets import Features, Value

from gpt2_accel.evals.formulas import mean_loss, perplexity

INPUTS = """nats: the negative log-likelihood of each sample, summed over its tokens, in nats.
tokens: the number of tokens (or words, or bytes) of each sample."""


class TokenLoss(evaluate.Metric):
    """The mean loss per token and its exponential. Every token has the same weight: this is not the mean of the batches'
    means."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description=INPUTS,
            features=Features({"nats": Value("float64"), "tokens": Value("int64")}),
        )

    def _compute(self, nats: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
        found = mean_loss(nats, tokens)
        return {**found, "perplexity": perplexity(found["loss"])}

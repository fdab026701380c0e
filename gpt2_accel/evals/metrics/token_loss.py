"""Loss, perplexity and bits per byte of a text, a metric for the `evaluate` library.

    loss = evaluate.load("gpt2_accel/evals/metrics/token_loss.py")
    for batch in batches:
        loss.add_batch(nats=summed_losses, tokens=token_counts)  # one of each per sample
    loss.compute()  # {"loss": …, "loss_stderr": …, "perplexity": …}

With several processes, give each `num_process`, its `process_id` and the same `experiment_id`, as
for every metric of that library. Process 0 gets the result over all samples, the others None. Each
process adds at least one sample.
"""

from typing import Any

import evaluate.info
import evaluate.module
from datasets import Features, Value

from gpt2_accel.evals.formulas import token_loss


class TokenLoss(evaluate.module.Metric):
    """Mean loss per token, its standard error over samples, and its exponential. Every token has
    the same weight: this is not the mean over batches. `compute(text_bytes=…)`, the UTF-8 bytes of
    all samples' text, adds bits per byte.

    nats: the negative log-likelihood of each sample, summed over its tokens, in nats.
    tokens: the number of tokens (or words, or bytes) of each sample."""

    def _info(self) -> evaluate.info.MetricInfo:
        features = Features({"nats": Value("float64"), "tokens": Value("int64")})
        return evaluate.info.MetricInfo(self.__doc__, "", features)

    def _compute(self, **columns: Any) -> dict[str, float]:
        return token_loss(**columns)

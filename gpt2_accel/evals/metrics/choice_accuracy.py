"""The accuracy of multiple choices, as a metric of the `evaluate` library.

    accuracy = evaluate.load("gpt2_accel/evals/metrics/choice_accuracy.py")
    accuracy.compute(scores=…, lengths=…, references=…)  # {"acc": …, "acc_stderr": …}

"acc_norm" as the second argument of `load` is another name of the result.
"""

import math
from collections.abc import Sequence

import evaluate
from datasets import Features, List, Value

from gpt2_accel.evals.formulas import accuracy


class ChoiceAccuracy(evaluate.Metric):
    """The accuracy of samples whose choice with the highest score for its length counts as their
    answer, and its standard error. The first of equal choices counts. A sample with a NaN score is
    wrong.

    scores: the log-likelihoods of a sample's choices; their number may differ between samples.
    lengths: what they are divided by: 1, or to normalise them the tokens or characters of the
    choices. references: the index of the right choice."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features(
            scores=List(Value("float64")),
            lengths=List(Value("int64")),
            references=Value("int64"),
        )
        return evaluate.MetricInfo(self.__doc__, "", features)

    def _compute(
        self,
        scores: Sequence[Sequence[float]],
        lengths: Sequence[Sequence[int]],
        references: Sequence[int],
    ) -> dict[str, float]:
        right = []
        for row, divisors, label in zip(scores, lengths, references, strict=True):
            means = [score / length for score, length in zip(row, divisors, strict=True)]
            chosen = means.index(max(means))
            right.append(chosen == label and not math.isnan(sum(means)))
        return accuracy(right, self.config_name.replace("default", "acc"))

"""Accuracy of multiple choices, a metric for the `evaluate` library.

    accuracy = evaluate.load("gpt2_accel/evals/metrics/choice_accuracy.py")
    accuracy.compute(scores=…, lengths=…, references=…)  # {"acc": …, "acc_stderr": …}

A second argument of `load`, such as "acc_norm", renames the result.
"""

from collections.abc import Sequence

import evaluate.info
import evaluate.module
from datasets import Features, List, Value

from gpt2_accel.evals.formulas import choice_accuracy


class ChoiceAccuracy(evaluate.module.Metric):
    """Accuracy and its standard error. The answer of a sample is the choice with the highest score
    divided by length, the first one if several are equal. A sample with a NaN score is wrong.

    scores: log-likelihoods of a sample's choices; their number may differ between samples.
    lengths: divisors of the scores: 1, or the tokens or characters of each choice. references: the
    index of the right choice."""

    def _info(self) -> evaluate.info.MetricInfo:
        features = Features(
            scores=List(Value("float64")),
            lengths=List(Value("int64")),
            references=Value("int64"),
        )
        return evaluate.info.MetricInfo(self.__doc__, "", features)

    def _compute(self, **columns: Sequence) -> dict[str, float]:
        return choice_accuracy(**columns, name=self.config_name.replace("default", "acc"))

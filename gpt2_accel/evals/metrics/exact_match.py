"""Share of answers that equal the expected ones, a metric for the `evaluate` library.

match = evaluate.load("gpt2_accel/evals/metrics/exact_match.py")
match.compute(predictions=…, references=…)  # {"exact_match": …, "exact_match_stderr": …}
"""

from collections.abc import Sequence

import evaluate.info
import evaluate.module
from datasets import Features, Value

from gpt2_accel.evals.formulas import exact_match


class ExactMatch(evaluate.module.Metric):
    """The share of `predictions` that equal their `references`, without spaces at both ends, and
    its standard error. `config_name` is the name of the result."""

    def _info(self) -> evaluate.info.MetricInfo:
        features = Features(predictions=Value("string"), references=Value("string"))
        return evaluate.info.MetricInfo(self.__doc__, "", features)

    def _compute(self, **columns: Sequence[str]) -> dict[str, float]:
        return exact_match(**columns, name=self.config_name.replace("default", "exact_match"))

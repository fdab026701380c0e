"""HellaSwag (Zellers et al., 2019): choose one of four endings. Completion style: each ending is
scored as text.

Context and ending are the data set's, unedited, as in build-nanogpt and llm.c. `acc` chooses the
ending with the highest likelihood. Longer endings are less likely, so `acc_norm` divides the
log-likelihood by the length in tokens (`acc_norm_per_token`, the acc_norm of build-nanogpt and
llm.c) or in characters (`acc_norm_per_char`, as in lm-evaluation-harness, which edits the texts).
"""

from collections.abc import Sequence

from gpt2_accel.evals.formulas import choice_accuracy
from gpt2_accel.evals.items import Item
from gpt2_accel.evals.likelihood import LikelihoodTask, encode_question, lengths_of
from gpt2_accel.models import ModelConfig
from gpt2_accel.tokenizer import PreTrainedTokenizerBase


class HellaSwag(LikelihoodTask):
    """The `Evaluation` on HellaSwag items, with the fields `ctx`, `endings` and `label`.

    Skips items with an ending of more than `config.n_positions` tokens; `notes` has their number
    and the number of contexts that are cut. Raises `ValueError` for a field that is missing or
    wrong, and if all items are skipped.
    """

    def __init__(
        self, items: Sequence[Item], tokenizer: "PreTrainedTokenizerBase", config: ModelConfig
    ):
        limit = config.n_positions
        self.questions = []
        self.characters: list[list[int]] = []
        self.labels: list[int] = []
        cut = 0
        for item in items:
            context = item.field("ctx", str)
            endings, label = item.choices("endings", "label")
            texts = [f" {text}" for text in endings]
            question = encode_question(tokenizer, context, texts, item.place)
            if max(lengths_of(question)) <= limit:
                self.questions.append(question)
                self.characters.append([len(ending) for ending in endings])
                self.labels.append(label)
                cut += max(len(row.ids) for row in question) > limit + 1
        skipped = len(items) - len(self.questions)
        if not self.questions:
            raise ValueError(
                f"every HellaSwag item has an ending longer than n_positions ({limit}): use a "
                "model with more positions"
            )
        self.notes = [
            f"hellaswag: {len(items):,} items; {cut:,} contexts are cut from the left to fit "
            f"{limit:,} positions; {skipped:,} items are skipped since an ending has more than "
            f"{limit:,} tokens"
        ]

    def metrics(self, scores: list[list[float]]) -> dict[str, float]:
        """Returns `hellaswag/acc`, `acc_norm_per_token` and `acc_norm_per_char`, each with its
        standard error."""
        lengths = {
            "acc": [[1] * len(row) for row in scores],
            "acc_norm_per_token": [lengths_of(question) for question in self.questions],
            "acc_norm_per_char": self.characters,
        }
        results: dict[str, float] = {}
        for name, divisors in lengths.items():
            results |= choice_accuracy(scores, divisors, self.labels, f"hellaswag/{name}")
        return results

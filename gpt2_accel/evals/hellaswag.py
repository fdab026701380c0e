"""HellaSwag (Zellers et al., 2019): choose one of four endings. Completion style: each ending is
scored as text.

Context and ending are read as in the data set, as in build-nanogpt and llm.c. `acc` chooses the
ending with the highest likelihood. Longer endings are less likely, so `acc_norm` divides the
log-likelihood by the length: in tokens (`acc_norm_per_token`, the acc_norm of build-nanogpt and
llm.c) or in characters (`acc_norm_per_char`, as lm-evaluation-harness, whose texts differ).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpt2_accel.evals.items import Item
from gpt2_accel.evals.likelihood import LikelihoodTask, encode_question, lengths_of
from gpt2_accel.evals.metrics import combine
from gpt2_accel.models import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class HellaSwag(LikelihoodTask):
    """The evaluation of a model of shape `config` on HellaSwag's items, with the fields `ctx`,
    `endings` and `label`.

    Items with an ending of more than `n_positions` tokens are skipped; `notes` say how many, and
    how many contexts are cut. Raises `ValueError`, naming the item, for a field that is missing or
    wrong; also if all items are skipped.
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
            context, endings, label = read_fields(item)
            texts = [f" {text}" for text in endings]
            question = encode_question(tokenizer, context, texts, item.place)
            if max(row.predicted for row in question) <= limit:
                self.questions.append(question)
                self.characters.append(list(map(len, endings)))
                self.labels.append(label)
                cut += max(len(row.ids) for row in question) > limit + 1
        skipped = len(items) - len(self.questions)
        if not self.questions:
            raise ValueError(
                f"no HellaSwag item has endings that fit into the model's n_positions ({limit}): "
                "use a model with more positions"
            )
        self.notes = [
            f"hellaswag: {len(items):,} items: {cut:,} contexts are too long for {limit:,} "
            f"positions and cut from the left, {skipped:,} items are skipped as an ending has more "
            f"than {limit:,} tokens"
        ]

    def metrics(self, scores: list[list[float]]) -> dict[str, float]:
        """Returns `hellaswag/acc`, `acc_norm_per_token` and `acc_norm_per_char`, each with its
        standard error."""
        lengths = {
            "acc": [[1] * len(row) for row in scores],
            "acc_norm_per_token": list(map(lengths_of, self.questions)),
            "acc_norm_per_char": self.characters,
        }
        columns: dict[str, list[Any]] = {"scores": scores, "references": self.labels}
        parts = {name: columns | {"lengths": divisors} for name, divisors in lengths.items()}
        return combine("hellaswag", "choice_accuracy", parts)


def read_fields(item: Item) -> tuple[str, list[str], int]:
    """Returns context, endings and the index of the correct ending. Raises `ValueError` for wrong
    ones.

    The Hub's data set stores the label as text, empty in the test split.
    """
    context = item.field("ctx", str)
    endings = item.field("endings", list)
    if len(endings) < 2 or not all(isinstance(ending, str) for ending in endings):
        raise ValueError(f"{item.place} has endings = {endings!r}: expected two strings or more")
    label = item.field("label", int | str)
    if str(label) not in map(str, range(len(endings))):
        raise ValueError(
            f"{item.place} has label = {label!r}: expected the index of an ending, 0 to "
            f"{len(endings) - 1}"
        )
    return context, endings, int(label)

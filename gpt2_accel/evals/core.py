"""CORE of DataComp-LM (Li et al., 2024, arXiv:2406.11794): 22 tasks for base models, with examples
in the prompt.

A bundle holds them: `core.yaml` lists the tasks, `eval_meta_data.csv` has the accuracy of guessing
in percent, and `eval_data/` the items as JSON lines. CORE is the mean over the tasks of (accuracy -
guessing) / (1 - guessing). A task is of one of three types:

- multiple_choice: a `query` with `choices`, of which `gold` is right. The answer is the choice with the lowest loss per token.
- schema: `context_options` with one `continuation`. The answer is the context after which its loss per token is lowest.
- language_modeling: a `context` and a `continuation`, which greedy decoding has to give exactly.

As in nanochat, `Random(1337)` shuffles the items of a task, and `Random(1234 + i)` draws the
examples before item i. What is scored is found in tokens: those after the common beginning of all
choices, the common end of a schema's prompts, and those after the tokens of the prompt without its
continuation. Where these do not begin the whole prompt's tokens, all tokens after the common
beginning are scored, and the results count such items.
"""

import csv
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from gpt2_accel.evals.items import read_items
from gpt2_accel.evals.likelihood import Question, Row, lengths_of, log_likelihoods
from gpt2_accel.evals.metrics import combine
from gpt2_accel.models import ModelConfig
from gpt2_accel.runtime.files import first_line
from gpt2_accel.runtime.options import load_yaml
from gpt2_accel.tokenizer import encode, text_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"  # DCLM's, as nanochat has it

PUBLISHED = "0.1139, 0.1849, 0.2146 and 0.2565"  # dev/estimate_gpt3_core.ipynb


@dataclass(frozen=True)
class Task:
    """A task of a bundle, of the `type` multiple_choice, schema or language_modeling. `examples`
    precede each item. `guessing` is the accuracy of a random answer, from 0 to 1."""

    name: str
    type: str
    examples: int
    delimiter: str
    guessing: float
    items: Sequence[dict[str, Any]]

    def texts(self, item: dict[str, Any]) -> list[str]:
        """Returns an item with each of its options; language modeling has one."""
        if self.type == "multiple_choice":
            return [item["query"] + self.delimiter + choice for choice in item["choices"]]
        contexts = item.get("context_options") or [item["context"].strip()]
        return [context + self.delimiter + item["continuation"] for context in contexts]

    def prompts(self, number: int) -> list[str]:
        """Returns the `texts` of an item, after the examples with their right options."""
        others = [i for i in range(len(self.items)) if i != number]
        drawn = random.Random(1234 + number).sample(others, min(self.examples, len(others)))
        examples = [self.texts(self.items[i])[self.items[i].get("gold", 0)] for i in drawn]
        return ["\n\n".join([*examples, text]) for text in self.texts(self.items[number])]


def open_bundle(source: str | Path | None = None) -> Path:
    """Returns the folder of a bundle: of a folder, or of a ZIP file or its URL, unpacked into the
    cache of `datasets`.

    None is `BUNDLE`. Raises `FileNotFoundError` if there is none.
    """
    folder = place = source or BUNDLE
    try:
        if not Path(place).is_dir():
            from datasets import DownloadManager

            folder = DownloadManager().download_and_extract(str(place))
        return next(Path(folder).rglob("core.yaml")).parent
    except (OSError, ValueError, StopIteration) as error:
        raise FileNotFoundError(
            f"{place} cannot be read as DCLM's bundle, with core.yaml ({first_line(error)}): give "
            "its folder, ZIP file or URL"
        ) from error


def read_tasks(folder: Path, limit: int | None = None) -> list[Task]:
    """Reads the tasks of a bundle, with the first `limit` of the shuffled items of each. Raises
    `ValueError` for a bundle of another form, and the errors of `read_items`."""
    with open(folder / "eval_meta_data.csv", newline="", encoding="utf-8") as file:
        guessing = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
    tasks = []
    for entry in load_yaml(str(folder / "core.yaml"), "core.yaml")["icl_tasks"]:
        items = [item.fields for item in read_items(folder / "eval_data" / entry["dataset_uri"])]
        random.Random(1337).shuffle(items)
        task = Task(
            name=entry["label"],
            type=entry["icl_task_type"],
            examples=entry["num_fewshot"][0],
            delimiter=entry.get("continuation_delimiter", " "),
            guessing=guessing[entry["label"]] / 100,
            items=items[:limit],
        )
        tasks.append(task)
    return tasks


class Core:
    """The evaluation of a model of shape `config` on the tasks of the bundle in a folder, with at
    most `limit` items of each.

    Of a prompt that exceeds the model's positions, `n_positions` tokens are kept, its last ones.
    Raises the errors of `read_tasks` and `question`.
    """

    def __init__(
        self,
        bundle: Path,
        tokenizer: "PreTrainedTokenizerBase",
        config: ModelConfig,
        limit: int | None = None,
    ):
        self.tasks = read_tasks(bundle, limit)
        self.tokenizer = tokenizer
        self.n_positions = config.n_positions
        self.notes = [f"core: OpenAI's four models have {PUBLISHED}, in nanochat"]

    def __call__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Returns `core/core`, and `core/TASK`, the accuracy of each task, with their standard
        errors; also the numbers that `question` counts."""
        parts: dict[str, dict[str, list]] = {}
        counts: Counter[str] = Counter()
        for task in self.tasks:
            greedy = task.type == "language_modeling"
            questions = [self.question(task, i, counts) for i in range(len(task.items))]
            scores = log_likelihoods(accelerator, model, questions, interrupted, greedy)
            if not scores:
                return {}
            lengths = list(map(lengths_of, questions))
            if greedy:  # 0 is right, -1 or less is wrong
                scores = [[score, -0.5] for (score,) in scores]
                lengths = [[1, 1]] * len(scores)
            gold = [item.get("gold", 0) for item in task.items]
            parts[task.name] = {"scores": scores, "lengths": lengths, "references": gold}
        results = combine("core", "choice_accuracy", parts)
        core = variance = 0.0
        for task in self.tasks:
            name = f"core/{task.name}"
            scale = len(self.tasks) * (1 - task.guessing)
            core += (results[name] - task.guessing) / scale
            variance += (results.get(f"{name}_stderr", 0) / scale) ** 2
        return {"core/core": core, "core/core_stderr": math.sqrt(variance)} | results | counts

    def question(self, task: Task, number: int, counts: Counter) -> Question:
        """Returns an item with a row for each prompt.

        Adds to `counts` the "cut_prompts", which exceed the model's positions, and an item to the
        "unaligned_items" if its prompt without the continuation has other tokens at its end.
        """
        texts = task.prompts(number)
        if task.type == "language_modeling":
            texts.append(texts[0].removesuffix(task.items[number]["continuation"]).rstrip())
        start = text_start(self.tokenizer)
        ids = [start + own for own in encode(self.tokenizer, texts)]
        if task.type == "schema":
            same = shared([own[::-1] for own in ids])
            contexts = [len(own) - same for own in ids]
        elif task.type == "multiple_choice":
            contexts = [shared(ids)] * len(ids)
        else:
            before = ids.pop()
            contexts = [shared([ids[0], [*before, -1]])]  # all tokens of `before` may be shared
            counts["core/unaligned_items"] += contexts[0] < len(before)
        if not min(contexts):
            raise ValueError(
                f"an item of {task.name} has nothing before its answer, and the tokenizer has no "
                "token that begins a text: remove the item, or use a model with another tokenizer"
            )
        rows = []
        for own, context in zip(ids, contexts, strict=True):
            cut = max(0, len(own) - self.n_positions)
            counts["core/cut_prompts"] += cut > 0
            rows.append(Row(own[cut:], max(1, context - cut)))
        return rows


def shared(sequences: Sequence[list[int]]) -> int:
    """Returns the number of tokens with which all sequences begin, but for one of the shortest,
    which is left to predict."""
    same = 0
    shortest = min(map(len, sequences))
    while same < shortest - 1 and len({own[same] for own in sequences}) == 1:
        same += 1
    return same

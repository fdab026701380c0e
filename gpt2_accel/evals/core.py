"""CORE of DataComp-LM (Li et al., 2024, arXiv:2406.11794): 22 tasks for base models, with examples in the prompt.

A bundle holds them: `core.yaml` lists the tasks, `eval_meta_data.csv` has the accuracy of guessing in percent, and `eval_data/`
the items as JSON lines. CORE is the mean over the tasks of (accuracy - guessing) / (1 - guessing). A task is of one of
three types:

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from gpt2_accel.evals.formulas import accuracy, choice_accuracy
from gpt2_accel.evals.items import read_items
from gpt2_accel.evals.likelihood import Question, log_likelihoods
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
    """A task of a bundle, of the `type` multiple_choice, schema or language_modeling. `examples` precede each item. `guessing` is the accuracy of a
    random answer, from 0 to 1."""

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
    """Returns the folder of a bundle: of a folder, or of a ZIP file or its URL, unpacked into the cache of `datasets`.

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
            f"{place} cannot be read as DCLM's bundle, with core.yaml ({first_line(error)}): give its folder, ZIP file or URL"
        ) from error


def read_tasks(folder: Path, limit: int | None = None) -> list[Task]:
    """Reads the tasks of a bundle, with the first `limit` of the shuffled items of each. Raises `ValueError` for a bundle of
    another form, and the errors of `read_items`."""
    listed = load_yaml(str(folder / "core.yaml"), "core.yaml")
    with open(folder / "eval_meta_data.csv", newline="", encoding="utf-8") as file:
        guessing = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
    tasks = []
    for entry in listed["icl_tasks"]:
        name, [examples] = entry["label"], entry["num_fewshot"]
        items = [item.fields for item in read_items(folder / "eval_data" / entry["dataset_uri"])]
        random.Random(1337).shuffle(items)
        delimiter = entry.get("continuation_delimiter", " ")
        shown = name, entry["icl_task_type"], examples, delimiter, guessing[name] / 100
        tasks.append(Task(*shown, items[:limit]))
    return tasks


class Core:
    """The evaluation of a model of shape `config` on the tasks of the bundle in a folder, with at most `limit` items of each.

    Of a prompt that exceeds the model's positions, `n_positions` tokens are kept, its last ones.
    Raises the errors of `read_tasks` and `questions`.
    """

    def __init__(
        self,
        bundle: Path,
        tokenizer: "PreTrainedTokenizerBase",
        config: ModelConfig,
        limit: int | None = None,
    ):
        self.tasks, self.tokenizer = read_tasks(bundle, limit), tokenizer
        self.n_positions = config.n_positions
        self.notes = [f"core: OpenAI's four models have {PUBLISHED}, in nanochat"]

    def __call__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Returns `core/core`, and `core/TASK`, the accuracy of each task, with their standard
        errors; also the number of `core/unaligned_items`, if there are any (see `questions`)."""
        results, centred, variance = {}, [], 0.0
        counts: Counter[str] = Counter()
        for task in self.tasks:
            greedy, name = task.type == "language_modeling", f"core/{task.name}"
            asked = [list(self.questions(task, i, counts)) for i in range(len(task.items))]
            questions = list(chain.from_iterable(asked))
            scores = log_likelihoods(accelerator, model, questions, interrupted, greedy)
            if not scores:
                return {}
            rows = zip(scores, questions, strict=True)
            means = (score / len(question.continuations[0]) for (score,), question in rows)
            found = [list(islice(means, len(prompts))) for prompts in asked]
            if greedy:
                results |= accuracy([own == [0] for own in found], name)
            else:
                results |= choice_accuracy(found, [item["gold"] for item in task.items], name)
            centred.append((results[name] - task.guessing) / (1 - task.guessing))
            variance += (results.get(f"{name}_stderr", 0) / (1 - task.guessing)) ** 2
        if counts["cut"]:
            accelerator.print(
                f"core: {counts['cut']:,} prompts exceed the model's positions and are cut from the left"
            )
        if counts["unaligned"]:
            results["core/unaligned_items"] = counts["unaligned"]
        count = len(centred)
        core = {"core/core": sum(centred) / count, "core/core_stderr": math.sqrt(variance) / count}
        return core | results

    def questions(self, task: Task, number: int, counts: Counter) -> Iterator[Question]:
        """Yields the questions of an item, one for each prompt.

        Adds to `counts` the prompts that are "cut" to the model's positions, and an item as
        "unaligned" if its prompt without the continuation has other tokens at its end.
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
            counts["unaligned"] += contexts[0] < len(before)
        if not min(contexts):
            raise ValueError(
                f"an item of {task.name} has nothing before its answer, and the tokenizer has no token "
                "that begins a text: remove the item, or use a model with another tokenizer"
            )
        for own, context in zip(ids, contexts, strict=True):
            cut = max(0, len(own) - self.n_positions)
            counts["cut"] += cut > 0
            context = max(1, context - cut)
            yield Question(own[cut:][:context], [own[cut:][context:]])


def shared(sequences: Sequence[list[int]]) -> int:
    """Returns the number of tokens with which all sequences begin, but for one of the shortest, which is left to predict."""
    columns = zip(*sequences, strict=False)  # as many as the shortest has tokens
    same = list(takewhile(lambda column: len(set(column)) == 1, columns))
    return min(len(same), min(map(len, sequences)) - 1)

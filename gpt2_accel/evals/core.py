"""CORE of DataComp-LM (Li et al., 2024, arXiv:2406.11794): 22 few-shot tasks for base models.

A bundle contains them: `core.yaml` lists the tasks, `eval_meta_data.csv` has the accuracy of
guessing in percent, and `eval_data/` has the items as JSON lines. CORE is the mean over the tasks
of (accuracy - guessing) / (1 - guessing). There are three types of tasks:

- multiple_choice: a `query` and `choices`; `gold` is the index of the right one. The model
  chooses the choice with the lowest loss per token.
- schema: `context_options` and one `continuation`. The model chooses the context after which the
  loss per token of the continuation is lowest.
- language_modeling: a `context` and a `continuation`, which greedy decoding must give exactly.

As in nanochat, `Random(1337)` shuffles the items of a task, and `Random(1234 + i)` draws the
examples before item i. The scored tokens are: the tokens after the common prefix of all choices;
the common suffix of all prompts of a schema; the tokens after the prompt without its continuation.
If those are not a prefix of the full prompt's tokens, all tokens after the common prefix are
scored, and `core/unaligned_items` counts the item.
"""

import csv
import math
import random
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator

from gpt2_accel.evals.formulas import choice_accuracy, mean
from gpt2_accel.evals.items import Item, read_items
from gpt2_accel.evals.likelihood import Question, Row, lengths_of, log_likelihoods
from gpt2_accel.models import ModelConfig
from gpt2_accel.runtime.files import first_line
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, encode, text_start

# DCLM's tasks, in nanochat's bundle.
BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
# Of OpenAI's 124M, 355M, 774M and 1558M, in nanochat's dev/estimate_gpt3_core.ipynb.
PUBLISHED = "0.1139, 0.1849, 0.2146 and 0.2565"
TYPES = ("multiple_choice", "schema", "language_modeling")

Bundle = Path | zipfile.Path


@dataclass(frozen=True)
class Task:
    """A task of a bundle. `type` is one of `TYPES`, `examples` the number of examples before each
    item, `guessing` the accuracy of a random answer, 0 to 1. `items` are from `read_options`."""

    name: str
    type: str
    examples: int
    delimiter: str
    guessing: float
    items: list[tuple[list[str], int]]

    def prompts(self, number: int) -> list[str]:
        """Returns the texts of item `number`, each after the examples with their right options."""
        others = [i for i in range(len(self.items)) if i != number]
        examples = ""
        for i in random.Random(1234 + number).sample(others, min(self.examples, len(others))):
            texts, gold = self.items[i]
            examples += texts[gold] + "\n\n"
        return [examples + text for text in self.items[number][0]]


def open_bundle(source: str | Path | None = None) -> Bundle:
    """Returns the folder of a bundle. `source` is a folder, or a ZIP file or its URL, which is
    downloaded into the cache of `datasets`; default `BUNDLE`. A ZIP file is read in place.

    Raises `FileNotFoundError` if it cannot be read or has no core.yaml.
    """
    source = source or BUNDLE
    try:
        if Path(source).is_dir():
            return next(Path(source).rglob("core.yaml")).parent
        if not Path(source).exists():
            from datasets import DownloadManager

            source = DownloadManager().download(str(source))
        archive = zipfile.ZipFile(source)
        name = next(name for name in archive.namelist() if f"/{name}".endswith("/core.yaml"))
        return zipfile.Path(archive, name.removesuffix("core.yaml"))
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile) as error:
        raise FileNotFoundError(
            f"{source} is not a readable CORE bundle with a core.yaml ({first_line(error)}): give "
            "its folder, ZIP file or URL"
        ) from error


def read_tasks(folder: Bundle, limit: int | None = None) -> list[Task]:
    """Reads the tasks of a bundle, each with the first `limit` of its shuffled items.

    Raises `OSError` or `ValueError` if a file or an item is missing, damaged or wrong.
    """
    tasks = {}
    try:
        with (folder / "eval_meta_data.csv").open(newline="", encoding="utf-8") as file:
            lines = {row["Eval Task"]: row["Random baseline"] for row in csv.DictReader(file)}
        text = (folder / "core.yaml").read_text(encoding="utf-8")
        for entry in yaml.safe_load(text)["icl_tasks"]:
            task = Task(
                name=entry["label"],
                type=entry["icl_task_type"],
                examples=entry["num_fewshot"][0],
                delimiter=entry.get("continuation_delimiter", " "),
                guessing=float(lines[entry["label"]]) / 100,
                items=[],
            )
            known = task.type in TYPES and task.name not in tasks
            if not known or task.examples < 0 or not 0 <= task.guessing < 1:
                raise ValueError(f"the type, examples or random baseline of {task.name} is wrong")
            tasks[task.name] = task, folder / "eval_data" / entry["dataset_uri"]
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        yaml.YAMLError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(
            f"{folder} has a wrong core.yaml or eval_meta_data.csv ({first_line(error)}): restore "
            "the files of the bundle"
        ) from error
    for task, path in tasks.values():
        items = [read_options(item, task) for item in read_items(path)]
        random.Random(1337).shuffle(items)
        task.items.extend(items[:limit])
    return [task for task, _ in tasks.values()]


def read_options(item: Item, task: Task) -> tuple[list[str], int]:
    """Returns the item's text with each of its options, and the index of the right option. Language
    modeling has one option; its second text is without the continuation.

    Raises `ValueError` if a field is missing, wrong or empty.
    """
    gold = 0
    contexts = []
    if task.type == "multiple_choice":
        contexts = [item.field("query", str)]
        endings, gold = item.choices("choices", "gold")
    else:
        endings = [item.field("continuation", str)]
    if task.type == "schema":
        contexts, gold = item.choices("context_options", "gold")
    if not all(map(str.strip, contexts + endings)):
        raise ValueError(f"{item.place} has an empty text: remove it")
    if task.type == "language_modeling":  # the context may be empty
        contexts = [item.field("context", str).strip()]
        endings.append("")
    return [context + task.delimiter + end for context in contexts for end in endings], gold


class Core:
    """The `Evaluation` on the tasks of the bundle in a folder, at most `limit` items of each.

    A prompt of more than `config.n_positions` tokens is cut from the left. Raises `OSError` or
    `ValueError` if a file is missing, damaged or empty.
    """

    def __init__(
        self,
        bundle: Bundle,
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
        """Returns `core/core` and each task's accuracy `core/TASK`, with standard errors, and the
        counts of `question`. Raises `ValueError` if nothing precedes scored tokens."""
        results: dict[str, float] = {}
        counts: Counter[str] = Counter()
        for task in self.tasks:
            greedy = task.type == "language_modeling"
            questions = [self.question(task, i, counts) for i in range(len(task.items))]
            scores = log_likelihoods(accelerator, model, questions, interrupted, greedy)
            if not scores:
                return {}
            name = f"core/{task.name}"
            if greedy:  # the number of tokens that differ
                results |= mean([score == 0 for (score,) in scores], name=name)
            else:
                lengths = [lengths_of(question) for question in questions]
                gold = [right for _, right in task.items]
                results |= choice_accuracy(scores, lengths, gold, name)
        return core_of(self.tasks, results) | results | counts

    def question(self, task: Task, number: int, counts: Counter) -> Question:
        """Returns the question of item `number`: a row for each prompt.

        Counts prompts that are cut in `core/cut_prompts`, and items of language modeling that do
        not split at a token in `core/unaligned_items`. Raises `ValueError` if nothing precedes the
        scored tokens.
        """
        texts = task.prompts(number)
        if task.type == "language_modeling":
            texts[1] = texts[1].rstrip()
        start = text_start(self.tokenizer)
        ids = [start + own for own in encode(self.tokenizer, texts)]
        if task.type == "schema":
            suffix = common_prefix([own[::-1] for own in ids])
            contexts = [len(own) - suffix for own in ids]
        elif task.type == "multiple_choice":
            contexts = [common_prefix(ids)] * len(ids)
        else:
            before = ids.pop()
            # -1 differs from any token, so that all of `before` may be common.
            contexts = [common_prefix([ids[0], [*before, -1]])]
            counts["core/unaligned_items"] += contexts[0] < len(before)
        if not min(contexts):
            raise ValueError(
                f"an item of {task.name} has nothing before its answer, and the tokenizer has no "
                "token that starts a text: remove the item, or use a model with another tokenizer"
            )
        rows = []
        for own, context in zip(ids, contexts, strict=True):
            cut = max(0, len(own) - self.n_positions)
            counts["core/cut_prompts"] += cut > 0
            rows.append(Row(own[cut:], len(own) - max(context, cut + 1)))
        return rows


def core_of(tasks: Sequence[Task], results: Mapping[str, float]) -> dict[str, float]:
    """Returns `core/core` and its standard error from the results of the tasks.

    Its interval holds the true value in 95% of cases; with 20 items of each task in 88% if the
    accuracy of each is 0.01 or 0.99.
    """
    core = variance = 0.0
    for task in tasks:
        name = f"core/{task.name}"
        scale = len(tasks) * (1 - task.guessing)
        core += (results[name] - task.guessing) / scale
        variance += (results.get(f"{name}_stderr", 0) / scale) ** 2
    return {"core/core": core, "core/core_stderr": math.sqrt(variance)}


def common_prefix(sequences: Sequence[list[int]]) -> int:
    """Returns the length of the common prefix of the sequences, at most the shortest length - 1, so
    that one token is left to predict."""
    same = 0
    shortest = min(map(len, sequences))
    while same < shortest - 1 and len({own[same] for own in sequences}) == 1:
        same += 1
    return same

"""Evaluate models: the loss on prepared data, CORE, HellaSwag, the perplexity of a text, chat.

    python recipes/evaluate.py --model runs/quickstart --data_dir data/python_stdlib
    python recipes/evaluate.py --model runs/a runs/b openai-community/gpt2 --tasks hellaswag
    accelerate launch recipes/evaluate.py --model USER/NAME --tasks core
    python recipes/evaluate.py --model runs/mine --tasks text --data my_text.txt --stride 256

`--model` takes folders of runs, directories of any causal language model, and Hub ids. The recipe
prints a table of the results, with a row per model if there are several, and notes on how they are
measured. docs/evaluation.md has the published results of GPT-2. `--data TASK=FILE` gives local
items: `core` takes the bundle of DCLM, as a folder, a ZIP file or its URL; `hellaswag` takes JSON
lines with `ctx`, `endings` and `label`; `chat` takes JSON lines with `prompt` and `answer`, `rl`
the tasks of `chat_rl.py`; `text` takes a text file. lm-evaluation-harness has other tasks: its
`lm_eval` reads the same directories (docs/evaluation.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_accel import cli
from gpt2_accel.config import check_ranges, parse_config, setting
from gpt2_accel.runtime.files import write_json
from gpt2_accel.runtime.options import load_saved, run_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from gpt2_accel.evals.core import Bundle
    from gpt2_accel.evals.items import Item
    from gpt2_accel.models import LanguageModel

TASKS = ("core", "hellaswag", "text", "chat", "rl")
SPLITS = ("val", "train")  # splits of --data_dir


@dataclass
class Evaluate:
    model: list[str] = setting(
        ["runs/quickstart"], "run folders, HF model directories or Hub ids: one table of all"
    )
    model_class: str | None = setting(
        None, "code of a model that transformers does not have, FILE.py:CLASS"
    )
    verify: bool = setting(True, "compare the model's files with their checksums first")
    base: str | None = setting(None, "base of an adapter, in place of the one that it names")
    tasks: list[str] = setting(
        [],
        f"{', '.join(TASKS + SPLITS)}; default val with --data_dir or the data of a run, else "
        "hellaswag",
    )
    data: list[str] = setting([], "local items: TASK=FILE, or FILE if there is only one task")
    limit: int | None = setting(None, "evaluate only the first N items of each task")
    reward: str = setting("number", "for rl: number, exact, or FILE.py:FUNCTION")
    samples: int = setting(1, "for rl: answers to each task; above 1 at temperature 1, for pass@k")
    stride: int | None = setting(None, "tokens between windows of a text; default n_positions")
    data_dir: str | None = setting(
        None,
        "prepared data, for the loss on its splits: val, or the splits in --tasks; without tasks "
        "and data by default the run's own, where it is there",
    )
    eval_tokens: int = setting(10_485_760, "tokens per split, at most")
    output: str | None = setting(
        None, "JSON file to write; default evaluation.json of each local --model"
    )

    def __post_init__(self) -> None:
        check_ranges(self, positive="limit eval_tokens samples")
        names = dict.fromkeys(",".join(self.tasks).split(","))  # each once
        names.pop("", None)
        self.tasks = [name for name in names if name in TASKS]
        self.splits = [name for name in names if name in SPLITS]
        for name in names:
            if name not in TASKS + SPLITS:
                raise ValueError(
                    f"--tasks {name}: the tasks are {', '.join(TASKS + SPLITS)}; for other tasks "
                    "use lm_eval, see docs/evaluation.md"
                )
        if self.splits and not self.data_dir:
            raise ValueError(
                f"--tasks {self.splits[0]} needs prepared data: give --data_dir FOLDER"
            )
        if not (self.tasks or self.splits or self.data_dir or self.data):
            self.data_dir = own_data(self.model)
        if self.data_dir and not self.splits:
            self.splits = ["val"]
        if not (self.tasks or self.splits):
            self.tasks = ["hellaswag"]


def own_data(models: list[str]) -> str | None:
    """Returns the folder of text or conversations on which all models were trained, None if it is
    not there or they have different ones. A model is a run's folder, or a checkpoint in it."""
    from gpt2_accel.data.shards import DATA_MANIFEST, read_manifest

    folders = {run_of(name)[0].get("data_dir") for name in models}
    folder = folders.pop()
    if folders or not folder or not (Path(folder) / DATA_MANIFEST).is_file():
        return None
    return None if read_manifest(folder).get("pairs") else folder


def local_files(config: Evaluate) -> dict[str, str]:
    """Returns the files of `--data` by task. Raises `ValueError` if one is not for a task, or if a
    task without data on the Hub has none."""
    files = {}
    for entry in config.data:
        task, equals, path = entry.partition("=")
        if not equals and len(config.tasks) == 1:
            task = config.tasks[0]
            path = entry
        if task not in config.tasks:
            raise ValueError(f"--data {entry} is for none of the --tasks: write TASK=FILE")
        files[task] = path
    for task in config.tasks:
        if task in ("text", "chat", "rl") and task not in files:
            raise ValueError(f"the task {task} has no data on the Hub: give --data {task}=FILE")
    return files


def evaluate(
    config: Evaluate,
    accelerator: "Accelerator",
    data: "dict[str, list[Item] | Bundle]",
    model: "LanguageModel",
    tokenizer: "PreTrainedTokenizerBase",
    bos: list[int],
    length: int | None,
) -> tuple[dict[str, float], list[str]]:
    """Returns the results of a model by metric, and notes on them. `data` has the items of each
    task, for CORE the folder of its bundle. The others are those of `open_model`. All ranks call
    it."""
    from gpt2_accel.data.source import open_data
    from gpt2_accel.evals.chat import MAX_NEW_TOKENS, ChatAnswers
    from gpt2_accel.evals.core import Core
    from gpt2_accel.evals.hellaswag import HellaSwag
    from gpt2_accel.evals.perplexity import TextPerplexity
    from gpt2_accel.evals.validation import prepare_loss
    from gpt2_accel.rewards import Solved, load_reward, read_tasks

    shape = model.config
    evaluations: list[Callable[..., dict[str, float]]] = []
    notes: list[str] = []
    for name, own in data.items():
        task: Core | HellaSwag | TextPerplexity | ChatAnswers | Solved
        if not isinstance(own, list):
            task = Core(own, tokenizer, shape, config.limit)
        elif name == "hellaswag":
            task = HellaSwag(own, tokenizer, shape)
        elif name == "text":
            task = TextPerplexity(own, tokenizer, shape, config.stride, bos)
        elif name == "chat":
            task = ChatAnswers(own, tokenizer, shape)
        else:
            reward = load_reward(config.reward)
            tasks = read_tasks(own, tokenizer, shape.n_positions - 1, reward)
            task = Solved(tasks, reward, tokenizer, MAX_NEW_TOKENS, config.samples)
        evaluations.append(task)
        notes += task.notes
    for split in config.splits:
        assert config.data_dir is not None  # checked by Evaluate
        prepared = open_data(config.data_dir)
        evaluation, note = prepare_loss(
            accelerator, tokenizer, shape, prepared, split, config.eval_tokens, bos, length
        )
        evaluations.append(evaluation)
        notes.append(note)
    if bos and (config.splits or "text" in config.tasks):
        notes.append(f"each window of text begins with {tokenizer.bos_token}")
    for name in config.tasks:
        if config.limit and name != "text":
            notes.append(f"{name}: the first {config.limit} items only")
    accelerator.print(*notes, sep="\n", flush=True)
    results: dict[str, float] = {}
    model = accelerator.prepare_model(model, evaluation_mode=True)
    for evaluation in evaluations:
        results |= evaluation(accelerator, model)
    return results, notes


def open_model(
    name: str | Path, model_class: str | None, base: str | None
) -> "tuple[dict, LanguageModel, PreTrainedTokenizerBase, list[int], int | None]":
    """Opens a model. All ranks call it, and all fail if one does.

    Returns its `step`, None if it is unknown, and the SHA-256 of its `weights`; the model and its
    tokenizer; the token that replaces the first of each window of text, at most one, and the
    windows' length. A run has recorded these; for other models they are `added_bos` and None.
    """
    from gpt2_accel import from_pretrained
    from gpt2_accel.checkpoint.find import STATE, read_state, read_status
    from gpt2_accel.hf.convert import local_directory
    from gpt2_accel.hf.safetensors_files import weights_digest
    from gpt2_accel.hf.tensors import check_finite
    from gpt2_accel.runtime.processes import all_or_none
    from gpt2_accel.tokenizer import added_bos, check_vocabulary, load_tokenizer

    with all_or_none():
        directory = local_directory(name)
        if (directory / STATE).is_dir():
            record = read_state(directory)
        else:
            record = load_saved(directory / "run.json") | read_status(directory)
        entry = {"step": record.get("step"), "weights": weights_digest(directory)}
        tokenizer = load_tokenizer(directory)
        model = from_pretrained(directory, model_class=model_class, base=base)
        check_finite(model, directory)
        check_vocabulary(tokenizer, model.config.vocab_size, directory)
        bos = record.get("bos", []) if record else added_bos(tokenizer)
    return entry, model, tokenizer, bos, record.get("sequence_length")


def output_file(config: Evaluate, name: str) -> Path | None:
    """Returns the file for the results of a model, or None for a model on the Hub. The results of a
    checkpoint are stored in the folder of its run, because training may remove the checkpoint."""
    if config.output is not None:
        return Path(config.output)
    folder = Path(name).resolve()
    if (folder.parent / "run.json").is_file():  # of a checkpoint
        folder = folder.parent
    return folder / "evaluation.json" if folder.is_dir() else None


def table(entries: dict[str, dict]) -> str:
    """Returns a Markdown table of the results of each model: a row per metric for one model, a row
    per model for several."""
    from gpt2_accel.evals.formulas import formatted
    from gpt2_accel.evals.results import markdown, rows_of

    cells = {"parameters": [f"{entry['parameters']:,}" for entry in entries.values()]}
    cells |= rows_of([formatted(entry["results"]) for entry in entries.values()])
    if len(entries) == 1:
        return markdown(("metric", *entries), cells)
    rows = zip(*cells.values(), strict=True)
    return markdown(("model", *cells), dict(zip(entries, rows, strict=True)))


def main() -> None:
    config = parse_config(Evaluate)
    files = local_files(config)
    from gpt2_accel.checkpoint.find import verified_directory
    from gpt2_accel.evals.core import open_bundle
    from gpt2_accel.evals.formulas import INTERVALS
    from gpt2_accel.evals.items import hub_items, read_items
    from gpt2_accel.evals.results import add_entry, read_record
    from gpt2_accel.runtime.accelerator import build_accelerator
    from gpt2_accel.runtime.processes import main_process_first, on_main_process

    accelerator = build_accelerator()
    outputs = {name: output_file(config, name) for name in config.model}
    records = {output: read_record(output) for output in outputs.values() if output}
    data: dict[str, list[Item] | Bundle] = {}
    for task, path in files.items():
        if task != "core":
            data[task] = read_items(path)[: config.limit]
    with main_process_first():
        if "core" in config.tasks:
            data["core"] = open_bundle(files.get("core"))
        if "hellaswag" in config.tasks and "hellaswag" not in data:
            option = "--data hellaswag=FILE, or --data_dir FOLDER for the loss on prepared data"
            data["hellaswag"] = hub_items(option)[: config.limit]
    entries = {}
    for name in config.model:
        accelerator.print(f"evaluating {name}", flush=True)
        directory = on_main_process(partial(verified_directory, name, config.verify))
        entry, model, tokenizer, bos, length = open_model(
            directory, config.model_class, config.base
        )
        entry["parameters"] = model.config.parameter_count
        entry["precision"] = accelerator.mixed_precision
        outcome = evaluate(config, accelerator, data, model, tokenizer, bos, length)
        results, entry["notes"] = outcome
        del model
        accelerator.free_memory()
        entries[name] = entry | {"results": results}
        output = outputs[name]
        if output and accelerator.is_main_process:
            finite = {key: x if math.isfinite(x) else None for key, x in results.items()}
            add_entry(records[output], name, entry | {"results": finite})
            write_json(output, records[output])
            print(f"The results are in {output}.")
    accelerator.print("", table(entries), "", f"{INTERVALS}.", sep="\n")
    accelerator.end_training()


if __name__ == "__main__":
    cli.run(main)

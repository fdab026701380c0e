"""Evaluate models: the loss on prepared data, CORE, HellaSwag, a text, chat.

    python recipes/evaluate.py --model runs/quickstart --data_dir data/python_stdlib
    python recipes/evaluate.py --model runs/first runs/second openai-community/gpt2 --tasks hellaswag
    accelerate launch recipes/evaluate.py --model USER/NAME --tasks core
    python recipes/evaluate.py --model runs/mine --tasks text --data my_text.txt --stride 256

`--model` takes runs' folders, directories of any causal language model, and Hub ids. Prints a
table, of several models a row for each, with conventions; docs/evaluation.md has GPT-2's published
results. `--data TASK=FILE` gives local items: for `core` DCLM's bundle, a folder, a ZIP file or its
URL, for `hellaswag` JSON lines with `ctx`, `endings` and `label`, for `chat` with `prompt` and
`answer`, for `text` a text file. Other tasks are lm-evaluation-harness's, whose `lm_eval` takes the
same directories (docs/evaluation.md).
"""

import hashlib
import math
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator

from gpt2_accel import cli, from_pretrained
from gpt2_accel.checkpoint.find import (
    STATE,
    list_checkpoints,
    read_state,
    read_status,
    verified_directory,
)
from gpt2_accel.config import ModelChoice, check_ranges, parse_config, setting
from gpt2_accel.evals.chat import ChatAnswers
from gpt2_accel.evals.core import Core, open_bundle
from gpt2_accel.evals.hellaswag import HellaSwag
from gpt2_accel.evals.items import Item, hub_items, read_items
from gpt2_accel.evals.perplexity import TextPerplexity
from gpt2_accel.evals.results import add_entry, markdown, read_record, result_rows
from gpt2_accel.evals.validation import prepare_loss
from gpt2_accel.hf.convert import local_directory
from gpt2_accel.hf.safetensors_files import weight_files
from gpt2_accel.hf.tensors import check_finite
from gpt2_accel.models import LanguageModel
from gpt2_accel.runtime.accelerator import build_accelerator
from gpt2_accel.runtime.files import digest, write_json
from gpt2_accel.runtime.processes import all_or_none, main_process_first, on_main_process
from gpt2_accel.tokenizer import check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = ("core", "hellaswag", "text", "chat")
SPLITS = ("val", "train")  # of --data_dir


@dataclass
class Evaluate(ModelChoice):
    model: list[str] = setting(
        ["runs/quickstart"], "runs' folders, HF model directories or Hub ids: a table of all"
    )
    tasks: list[str] = setting(
        [], f"{', '.join((*TASKS, *SPLITS))}; default val with --data_dir, else hellaswag"
    )
    data: list[str] = setting([], "local items: TASK=FILE, or FILE where there is one task")
    limit: int | None = setting(None, "evaluate the first N items of each task")
    stride: int | None = setting(None, "tokens between a text's windows; default n_positions")
    data_dir: str | None = setting(
        None, "prepared data, to get the loss of its splits: val, or those of --tasks"
    )
    eval_tokens: int = setting(10_485_760, "tokens of each split, at most")
    output: str | None = setting(
        None, "JSON file to write; default evaluation.json of each local --model"
    )

    def __post_init__(self) -> None:
        check_ranges(self, positive="limit eval_tokens")
        names = dict.fromkeys(name for given in self.tasks for name in given.split(",") if name)
        if other := next((name for name in names if name not in TASKS + SPLITS), None):
            raise ValueError(
                f"--tasks {other}: the tasks are {', '.join(TASKS + SPLITS)}; "
                "lm-evaluation-harness has others: pip install 'lm-eval>=0.4.9', and lm_eval "
                "--model hf --model_args "
                f"{shlex.quote(f'pretrained={self.model[0]},dtype=float32')} --tasks "
                f"{shlex.quote(other)}"
            )
        self.tasks = [name for name in names if name in TASKS]
        self.splits = [name for name in names if name in SPLITS]
        if self.splits and not self.data_dir:
            raise ValueError(
                f"--tasks {self.splits[0]} needs prepared data: give --data_dir FOLDER"
            )
        if self.data_dir and not self.splits:
            self.splits = ["val"]
        if not (self.tasks or self.splits):
            self.tasks = ["hellaswag"]


def local_files(config: Evaluate) -> dict[str, str]:
    """Returns the local file of each task that has one."""
    found = {}
    for entry in config.data:
        task, equals, path = entry.partition("=")
        if not equals and len(config.tasks) == 1:
            task = config.tasks[0]
            path = entry
        if task not in config.tasks:
            raise ValueError(f"--data {entry} is for none of the --tasks: write TASK=FILE")
        found[task] = path
    for task in config.tasks:
        if task in ("text", "chat") and task not in found:
            raise ValueError(f"the task {task} has no data on the Hub: give --data {task}=FILE")
    return found


def evaluate(
    config: Evaluate,
    accelerator: Accelerator,
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    data: dict[str, list[Item] | Path],
) -> tuple[dict[str, float], list[str]]:
    """Returns the results of a model, and notes on them. `data` holds the items of each task, for
    CORE its bundle."""
    build = {
        "core": partial(Core, limit=config.limit),
        "hellaswag": HellaSwag,
        "text": partial(TextPerplexity, stride=config.stride),
        "chat": ChatAnswers,
    }
    evaluations = [build[task](own, tokenizer, model.config) for task, own in data.items()]
    notes = [note for task in evaluations for note in task.notes]
    for split in config.splits:
        evaluation, note = prepare_loss(
            accelerator, tokenizer, model.config, config.data_dir, split, config.eval_tokens
        )
        evaluations.append(evaluation)
        notes.append(note)
    if config.limit:
        limited = [task for task in config.tasks if task != "text"]
        notes += [f"{task}: the first {config.limit} items only" for task in limited]
    accelerator.print(*notes, sep="\n", flush=True)
    results: dict[str, float] = {}
    model = accelerator.prepare_model(model, evaluation_mode=True)
    for evaluation in evaluations:
        results |= evaluation(accelerator, model)
    return results, notes


def open_model(
    name: str | Path, model_class: str | None
) -> "tuple[dict, LanguageModel, PreTrainedTokenizerBase]":
    """Returns what `describe_weights` does, the model and its tokenizer. All ranks call it, and all
    fail if one does."""
    with all_or_none():
        directory = local_directory(name)
        entry = describe_weights(directory)
        tokenizer = load_tokenizer(directory)
        model = from_pretrained(directory, model_class=model_class)
        check_finite(model, directory)
        check_vocabulary(tokenizer, model.config.vocab_size, directory)
    return entry, model, tokenizer


def output_file(config: Evaluate, name: str) -> Path | None:
    """Returns the file for a model's results, or None. That of a checkpoint is in its run's folder:
    it may be removed."""
    if config.output is not None:
        return Path(config.output)
    folder = Path(name).resolve()
    if not folder.is_dir():
        return None
    if folder.name.startswith("checkpoint-") and folder in list_checkpoints(folder.parent):
        folder = folder.parent
    return folder / "evaluation.json"


def table(entries: dict[str, dict]) -> str:
    """Returns the results of models as a table: of one model a row for each metric, of several a
    row for each model."""
    cells = result_rows([entry["results"] for entry in entries.values()])
    counts = [f"{entry['parameters']:,}" for entry in entries.values()]
    cells = {"parameters": counts} | cells
    if len(entries) == 1:
        return markdown(("metric", *entries), cells)
    rows = zip(*cells.values(), strict=True)
    return markdown(("model", *cells), dict(zip(entries, rows, strict=True)))


def describe_weights(directory: Path) -> dict[str, str | int | None]:
    """Returns the checksum of a model's weights and their update, None if it is unknown."""
    if (directory / STATE).is_dir():
        step = read_state(directory)["step"]
    else:
        step = read_status(directory).get("step")
    files = hashlib.sha256("".join(map(digest, weight_files(directory))).encode())
    return {"step": step, "weights": files.hexdigest()}


def main() -> None:
    config = parse_config(Evaluate)
    files = local_files(config)
    accelerator = build_accelerator()
    outputs = {name: output_file(config, name) for name in config.model}
    records = {output: read_record(output) for output in outputs.values() if output}
    data = {
        task: read_items(path)[: config.limit] for task, path in files.items() if task != "core"
    }
    with main_process_first():
        if "core" in config.tasks:
            data["core"] = open_bundle(files.get("core"))
        if "hellaswag" in config.tasks and "hellaswag" not in data:
            without = "--data hellaswag=FILE, or --data_dir FOLDER for the loss on prepared data"
            data["hellaswag"] = hub_items(without)[: config.limit]
    entries = {}
    for name in config.model:
        accelerator.print(f"evaluating {name}", flush=True)
        directory = on_main_process(partial(verified_directory, name, config.verify))
        entry, *loaded = open_model(directory, config.model_class)
        entry["parameters"] = loaded[0].config.parameter_count
        entry["precision"] = accelerator.mixed_precision
        results, entry["notes"] = evaluate(config, accelerator, *loaded, data)
        entries[name] = entry | {"results": results}
        finite = {key: x if math.isfinite(x) else None for key, x in results.items()}
        output = outputs[name]
        if output and accelerator.is_main_process:
            add_entry(records[output], name, entry | {"results": finite})
            write_json(output, records[output])
            print(f"The results are in {output}.")
        del loaded
        accelerator.free_memory()
    accelerator.print("", table(entries), sep="\n")
    accelerator.end_training()


if __name__ == "__main__":
    cli.run(main)

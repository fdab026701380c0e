"""Evaluate a model: loss, HellaSwag, LAMBADA, WikiText, Penn Treebank, beside GPT-2's published figures.

    python recipes/evaluate.py --model runs/quickstart --data_dir data/python_stdlib
    python recipes/evaluate.py --model openai-community/gpt2 --tasks hellaswag lambada
    python recipes/evaluate.py --model runs/mine --tasks hellaswag --data my_items.jsonl
    accelerate launch recipes/evaluate.py --baselines --data_dir data/openwebtext

`--model` is a run's folder, any Hugging Face GPT-2, Llama or Qwen3 directory, or a Hub id; `--baselines` takes OpenAI's four.
Prints a table with each convention, and GPT-2's published figures for the same items. Items come from the Hub, or by
`--data TASK=FILE` from a JSONL or text file: HellaSwag's fields are `ctx`, `endings` and `label`, LAMBADA's
and the corpora's `text`, those of `chat`, answers through the chat template, `prompt` or `question`, and `answer`. `--lm_eval` runs tasks of lm-evaluation-harness (`pip install 'lm-eval>=0.4.9'`).
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from gpt2_accel import cli, from_pretrained
from gpt2_accel.checkpoint.find import (
    list_checkpoints,
    model_directory,
    read_status,
    verified_directory,
)
from gpt2_accel.checkpoint.manifest import STATE, read_state
from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.config import check_ranges, parse_config, setting
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.evals.harness import run_harness
from gpt2_accel.evals.results_file import add_entry, read_record
from gpt2_accel.evals.results_table import BASELINES, convention, markdown_table
from gpt2_accel.evals.sources import SOURCES, read_items
from gpt2_accel.evals.tasks import TASKS, prepare_loss, prepare_task
from gpt2_accel.files import digest, write_json
from gpt2_accel.generation.sampling import Sampling, complete, user_turn, whole_text
from gpt2_accel.hf.convert import describe, local_directory, read_config
from gpt2_accel.hf.model_card import add_results
from gpt2_accel.hf.safetensors_files import weight_files
from gpt2_accel.options import check_separate
from gpt2_accel.runtime.accelerator import build_accelerator
from gpt2_accel.runtime.processes import main_process_first
from gpt2_accel.tokenizer import GPT2_FINGERPRINT, check_vocabulary, load_tokenizer


@dataclass
class Evaluate:
    model: str = setting("runs/quickstart", "run's folder, HF model directory or Hub id")
    baselines: bool = setting(False, "OpenAI's four checkpoints in place of --model")
    tasks: list[str] = setting(
        [], f"of {', '.join(TASKS)}; if nothing else is asked for, all that the Hub has data for"
    )
    data: list[str] = setting([], "local items: TASK=FILE, or FILE where there is one task")
    limit: int | None = setting(None, "evaluate the first N items of each task")
    stride: int | None = setting(None, "tokens between a corpus's windows; default n_positions")
    data_dir: str | None = setting(
        None, "prepared data, to get the loss of its train and val splits"
    )
    eval_tokens: int = setting(10_485_760, "tokens of each split, at most")
    lm_eval: list[str] = setting([], "tasks of lm-evaluation-harness, by its names")
    chat_template: bool = setting(
        False, "render the harness's prompts by the model's chat template"
    )
    lm_eval_tasks: str | None = setting(
        None, "folder of YAML files that add tasks to the harness's"
    )
    sample_prompts: list[str] = setting([], "prompts to continue")
    seed: int = setting(1337, "of the samples")
    output: str | None = setting(
        None, "JSON file to write; default evaluation.json of a local --model"
    )
    update_card: bool = setting(False, "add the results to the model card of a local --model")
    verify: bool = setting(True, "compare a checkpoint's files with their checksums first")

    def __post_init__(self) -> None:
        check_ranges(self, positive="limit eval_tokens", not_negative="seed")
        check_separate("tasks", self.tasks, TASKS)
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(
                    f"there is no task {task!r}: choose one of {', '.join(TASKS)}, or give a task of "
                    "lm-evaluation-harness by --lm_eval"
                )
        if self.update_card and (self.baselines or not Path(self.model).is_dir()):
            raise ValueError("update_card needs a local --model, whose card it can change")
        if self.update_card and (model_directory(self.model) / Path("training_state")).is_dir():
            raise ValueError(
                f"update_card would change {model_directory(self.model)}, and a checkpoint that has changed "
                "counts as damaged: give the run's folder, when training has ended"
            )
        if not (self.tasks or self.data_dir or self.lm_eval or self.sample_prompts):
            self.tasks = list(SOURCES)


def local_files(config: Evaluate) -> dict[str, str]:
    """Returns the local file of each task that has one."""
    found = {}
    for entry in config.data:
        task, equals, path = entry.partition("=")
        if not equals and len(config.tasks) == 1:
            task, path = config.tasks[0], entry
        if task not in config.tasks:
            raise ValueError(f"--data {entry} is for none of the --tasks: write TASK=FILE")
        found[task] = path
    for task in ("text", "chat"):
        if task in config.tasks and task not in found:
            raise ValueError(f"the task {task} has no data on the Hub: give --data {task}=FILE")
    return found


def evaluate(
    config: Evaluate,
    accelerator: Accelerator,
    name: str,
    directory: Path,
    items: dict[str, list[dict]],
) -> tuple[dict[str, float], list[str]]:
    """Returns the results of the model `name` in `directory`, and notes on them."""
    accelerator.print(f"evaluating {name}", flush=True)
    tokenizer = load_tokenizer(directory)
    model = from_pretrained(directory)
    shape = model.config
    check_vocabulary(tokenizer, shape.vocab_size, name)
    prepared = [
        prepare_task(tokenizer, shape, task, items[task], config.stride) for task in config.tasks
    ]
    if config.data_dir:
        prepared.append(
            prepare_loss(accelerator, tokenizer, shape, config.data_dir, config.eval_tokens)
        )
    model = accelerator.prepare_model(model, evaluation_mode=True)
    results: dict[str, float] = {}
    notes = [note for part in prepared for note in part.notes]
    if config.limit:
        limited = [*config.tasks, *(f"lm_eval:{task}" for task in config.lm_eval)]
        notes += [f"{task}: the first {config.limit} items only" for task in limited]
    accelerator.print(*(f"{name}: {note}" for note in notes), sep="\n", flush=True)
    if config.lm_eval:
        options = {"task_folder": config.lm_eval_tasks, "limit": config.limit}
        options["chat_template"] = config.chat_template
        results |= run_harness(accelerator, directory, config.lm_eval, **options)
    for run in [run for part in prepared for run in part.evaluations]:
        results |= run(accelerator, model)
    if accelerator.is_main_process:
        sampling = Sampling(max_new_tokens=100, seed=config.seed)
        plain = unwrap(accelerator, model)
        prompts = config.sample_prompts
        if tokenizer.chat_template:
            prompts = [user_turn(prompt) for prompt in prompts]
        for sample in complete(plain, tokenizer, prompts, sampling):
            notes.append(f"sample: {whole_text(tokenizer, sample)}")
            print(f"{name}: {notes[-1]}")
    return results, notes


def comparable(config: Evaluate, files: dict[str, str]) -> set[str]:
    """The tasks whose published figures compare: the Hub's items, all of them, and OpenWebText in GPT-2's tokens."""
    tasks = set() if config.limit else {*config.tasks} - {*files}
    if config.data_dir:
        manifest = read_manifest(config.data_dir)
        gpt2s = manifest["tokenizer"]["fingerprint"] == GPT2_FINGERPRINT
        if gpt2s and "openwebtext" in str(manifest.get("source")).lower():
            tasks |= {"train", "val"}
    return tasks


def output_file(config: Evaluate) -> Path | None:
    """Returns the file for the results, or None. That of a run is in its folder: a checkpoint may be removed."""
    if config.output is not None:
        return Path(config.output)
    named = Path(config.model)
    directory = named if list_checkpoints(named) else Path(model_directory(named)).resolve()
    return None if config.baselines or not directory.is_dir() else directory / "evaluation.json"


def save(
    output: Path,
    record: dict[str, dict],
    accelerator: Accelerator,
    weights: dict[str, dict],
    found: dict[str, tuple],
) -> None:
    """Adds the results to `record`, those of earlier evaluations, and writes the JSON file.

    If the run has removed the checkpoint meanwhile, the file goes into the run's folder."""
    if not output.parent.exists() and output.parent.name.startswith("checkpoint-"):
        output = output.parent.with_name(output.name)
        record = read_record(output)
    for name, (results, notes) in found.items():
        entry = {
            **weights[name],
            "precision": accelerator.mixed_precision,
            "results": {key: x if math.isfinite(x) else None for key, x in results.items()},
            "conventions": {key: convention(key) for key in results},
            "notes": notes,
        }
        add_entry(record, name, entry)
    write_json(output, record)
    print(f"\nThe results are in {output}.")


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
    output = output_file(config)
    record = {} if output is None else read_record(output)
    with main_process_first():
        items = {
            task: read_items(task, files.get(task), f"--data {task}=FILE")[: config.limit]
            for task in config.tasks
        }
    names = BASELINES if config.baselines else (config.model,)
    # Before the evaluation: a run that trains meanwhile saves newer checkpoints and removes this one.
    directories = {n: local_directory(verified_directory(n, config.verify)) for n in names}
    weights = {name: describe_weights(directory) for name, directory in directories.items()}
    found = {
        name: evaluate(config, accelerator, name, directory, items)
        for name, directory in directories.items()
    }
    if accelerator.is_main_process:
        table = {name: results for name, (results, _) in found.items()}
        print("", markdown_table(table, comparable(config, files)), sep="\n")
        if output is not None:
            save(output, record, accelerator, weights, found)
        if config.update_card:
            directory = directories[config.model]
            add_results(directory, found[config.model][0], describe(read_config(directory)))
            print(f"The card {directory / 'README.md'} has them too.")
    accelerator.end_training()


if __name__ == "__main__":
    cli.run(main)

"""Runs tasks of EleutherAI's lm-evaluation-harness on a checkpoint: `pip install 'lm-eval>=0.4.9'`.

The harness evaluates the transformers model in fp32 with the checkpoint's tokenizer, independently of this package's
model and evaluations.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH_SIZE = 16


def run_harness(
    accelerator: Accelerator,
    directory: str | Path,
    tasks: Sequence[str],
    *,
    task_folder: str | Path | None = None,
    limit: int | None = None,
    chat_template: bool = False,
) -> dict[str, float]:
    """Returns the harness's metrics for the HF model in `directory`, named `lm_eval:TASK/METRIC`.

    All ranks call it and evaluate a share each. The main process gets the result; the others get an empty dict.

    `tasks` are names of the harness's tasks; YAML files in `task_folder` add others, such as tasks on local data.
    `limit` is the number of items of each task, at least one per rank. With `chat_template` the prompts are rendered by
    the model's chat template. Raises `ImportError` if the extra is not
    installed and `ValueError` for an unknown task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(
            f"lm-evaluation-harness is not installed ({error}): pip install 'lm-eval>=0.4.9'"
        ) from error
    manager = TaskManager(include_path=task_folder and str(task_folder), include_defaults=False)
    if not set(tasks) <= set(manager.all_subtasks):  # reading all default tasks takes 10 seconds
        manager = TaskManager(include_path=task_folder and str(task_folder))
    for name in tasks:
        if not manager.match_tasks([name]):
            raise ValueError(
                f"lm-evaluation-harness has no task {name!r}: `lm-eval ls tasks` lists its tasks"
            )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    harness_model = HFLM(
        model.to(accelerator.device),
        tokenizer=AutoTokenizer.from_pretrained(directory),
        batch_size=BATCH_SIZE,
    )
    # HFLM does not set up processes for a model that it did not load.
    harness_model.accelerator = accelerator
    harness_model._rank = accelerator.process_index
    harness_model._world_size = accelerator.num_processes
    found = simple_evaluate(
        harness_model,
        tasks=manager.match_tasks(list(tasks)),
        task_manager=manager,
        limit=limit,
        apply_chat_template=chat_template,
        log_samples=False,
    )
    return {} if found is None else flatten(found["results"])


def flatten(results: dict[str, dict]) -> dict[str, float]:
    """Flattens the harness's results, task -> "metric,filter" -> value; the filter "none" is not named."""
    flat = {}
    for task, figures in results.items():
        for key, value in figures.items():
            if isinstance(value, (int, float)) and "," in key:
                flat[f"lm_eval:{task}/{key.removesuffix(',none')}"] = float(value)
    return flat

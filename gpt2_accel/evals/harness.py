"""Any task of EleutherAI's lm-evaluation-harness on a checkpoint: `pip install 'gpt2_accel[eval]'`.

The harness gets the model as transformers opens it, in fp32, and its own tokenizer, so that its numbers owe
nothing to the code here.
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
) -> dict[str, float]:
    """The harness's figures for the HF model in `directory`, as `lm_eval:TASK/METRIC`.

    All ranks call it, each takes its share; the first gets the result, the others none.

    `tasks` are names that the harness knows; YAML files in `task_folder` add more, such as tasks on local
    data. `limit` takes the first items of each; each rank needs one at least. Raises `ImportError` if the
    extra is not installed, `ValueError` for an unknown task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(
            f"lm-evaluation-harness is not installed ({error}): pip install 'gpt2_accel[eval]'"
        ) from error
    manager = TaskManager(include_path=task_folder and str(task_folder), include_defaults=False)
    if not set(tasks) <= set(manager.all_subtasks):  # to read all of its own takes 10 seconds
        manager = TaskManager(include_path=task_folder and str(task_folder))
    for name in tasks:
        if not manager.match_tasks([name]):
            raise ValueError(
                f"lm-evaluation-harness knows no task {name!r}: `lm-eval ls tasks` lists them"
            )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    harness_model = HFLM(
        model.to(accelerator.device),
        tokenizer=AutoTokenizer.from_pretrained(directory),
        batch_size=BATCH_SIZE,
    )
    # Given a model, it leaves processes to the caller.
    harness_model.accelerator = accelerator
    harness_model._rank = accelerator.process_index
    harness_model._world_size = accelerator.num_processes
    found = simple_evaluate(
        harness_model,
        tasks=manager.match_tasks(list(tasks)),
        task_manager=manager,
        limit=limit,
        log_samples=False,
    )
    return {} if found is None else flatten(found["results"])


def flatten(results: dict[str, dict]) -> dict[str, float]:
    """The harness's table by task and "metric,filter" as one level; the filter "none" is left out."""
    flat = {}
    for task, figures in results.items():
        for key, value in figures.items():
            if isinstance(value, (int, float)) and "," in key:
                flat[f"lm_eval:{task}/{key.removesuffix(',none')}"] = float(value)
    return flat

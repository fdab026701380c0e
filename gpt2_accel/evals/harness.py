"""Runs tasks of EleutherAI's lm-evaluation-harness on a model directory: `pip install 'lm-eval>=0.4.9'`.

The harness evaluates the transformers model in fp32 with the directory's tokenizer, independently of this package's
model and evaluations.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from gpt2_accel.tokenizer import load_tokenizer

BATCH_SIZE = 16


class Harness:
    """Tasks of the harness by name; YAML files in `task_folder` add others, such as tasks on local data.

    `limit` is the number of items of each task, at least one per rank. With `chat_template` the prompts are rendered by
    the model's chat template. Raises `ImportError` if the harness is not installed and `ValueError` for an unknown task.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        task_folder: str | Path | None = None,
        limit: int | None = None,
        chat_template: bool = False,
    ):
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ImportError(
                f"{', '.join(tasks)}: tasks other than hellaswag, text and chat need lm-evaluation-harness ({error}): "
                "pip install 'lm-eval>=0.4.9'"
            ) from error
        self.manager = TaskManager(include_path=task_folder and str(task_folder))
        for name in tasks:
            if not self.manager.match_tasks([name]):
                raise ValueError(
                    f"lm-evaluation-harness has no task {name!r}: `lm-eval ls tasks` lists its tasks"
                )
        self.options = {
            "tasks": self.manager.match_tasks(list(tasks)),
            "limit": limit,
            "apply_chat_template": chat_template,
        }

    def __call__(self, accelerator: Accelerator, directory: str | Path) -> dict[str, float]:
        """Returns the harness's metrics for the model in `directory`, named `lm_eval:TASK/METRIC`.

        All ranks call it and evaluate a share each. The main process gets the result; the others get an empty dict. Raises
        `ValueError` if a chat template is asked for and the model has none.
        """
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokenizer = load_tokenizer(directory)
        if self.options["apply_chat_template"] and not tokenizer.chat_template:
            raise ValueError(f"{directory} has no chat template: leave out --chat_template")
        wrapped = HFLM(model.to(accelerator.device), tokenizer=tokenizer, batch_size=BATCH_SIZE)
        # HFLM does not set up processes for a model that it did not load.
        wrapped.accelerator = accelerator
        wrapped._rank = accelerator.process_index
        wrapped._world_size = accelerator.num_processes
        found = simple_evaluate(
            wrapped, task_manager=self.manager, log_samples=False, **self.options
        )
        return {} if found is None else flatten(found["results"])


def flatten(results: dict[str, dict]) -> dict[str, float]:
    """Flattens the harness's results, task -> "metric,filter" -> value. The filter "none" is not named, and `_stderr` is
    at the end."""
    flat = {}
    for task, figures in results.items():
        for key, value in figures.items():
            if isinstance(value, (int, float)) and "," in key:
                metric, _, rule = key.partition(",")
                name = metric.removesuffix("_stderr") + (f",{rule}" if rule != "none" else "")
                error = "_stderr" if metric.endswith("_stderr") else ""
                flat[f"lm_eval:{task}/{name}{error}"] = float(value)
    return flat

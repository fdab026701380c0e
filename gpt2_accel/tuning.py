"""Defaults for training on from a model: which rate a pretrained model survives.

A model that was trained here on few tokens takes a rate for new weights. A pretrained model loses
what it knows at such a rate, while the validation loss falls: docs/chat.md has the study.
"""

from contextlib import suppress
from pathlib import Path

from gpt2_accel.checkpoint.find import find_checkpoint, read_state
from gpt2_accel.config import TrainConfig
from gpt2_accel.runtime.options import run_of

PRETRAINED_RATE = 2e-5  # AdamW's peak
PRETRAINED_LORA_RATE = 2e-4
# Training tokens per parameter of a model with little to lose: compute-optimal training takes more
# (Hoffmann et al., 2022, arXiv:2203.15556).
FEW_TOKENS = 20
# Settings that have no effect unless another one is set.
NEEDS = {
    "lora_alpha": "lora",
    "lora_dropout": "lora",
    "hellaswag_data": "hellaswag_every",
    "core_data": "core_every",
}
FAR = 5  # times the rate: a given rate above that is remarked on


def is_pretrained(model: str | Path) -> bool:
    """Whether a model is from elsewhere, or was trained here on more than `FEW_TOKENS`."""
    tokens = tokens_per_parameter(model)
    return tokens is None or tokens > FEW_TOKENS


def tokens_per_parameter(model: str | Path) -> float | None:
    """Returns the training tokens per parameter of a model that began here with new weights.

    Counts the tokens of all runs that led to it: the `config.yaml` of a run names the model that it
    began from. None for a model from elsewhere, such as the Hub, or if one of the runs is gone.
    """
    tokens = 0
    known = set()
    with suppress(OSError, ValueError, KeyError, TypeError):  # a file is missing or damaged
        while model not in known:
            known.add(model)
            settings, about = run_of(model)
            tokens += about["tokens"]
            model = settings["init_from"]
            if model is None:
                return tokens / about["parameters"]
    return None


def pretrained_rate(config: TrainConfig) -> float:
    """Returns the default peak rate of AdamW for a pretrained model."""
    return PRETRAINED_LORA_RATE if config.lora else PRETRAINED_RATE


def remarks(config: TrainConfig) -> list[str]:
    """Returns lines about settings without an effect, and a rate that a pretrained model does not
    survive."""
    lines = [
        f"--{name} has no effect without --{needed}"
        for name, needed in NEEDS.items()
        if getattr(config, name) != getattr(TrainConfig, name) and not getattr(config, needed)
    ]
    if config.keep_best and config.eval_every and config.eval_every % (config.save_every or 2**62):
        lines.append(
            "best/ is the best of the checkpoints: set --save_every to --eval_every, or to a part "
            "of it, to keep the best of all evaluations"
        )
    rate = pretrained_rate(config)
    if config.init_from and config.learning_rate > FAR * rate and is_pretrained(config.init_from):
        lines.append(
            f"a learning rate of {config.learning_rate:g} is {config.learning_rate / rate:.0f} "
            f"times {rate:g}, which a pretrained model survives: it may forget what it knows"
        )
    return lines


def saved_settings(config: TrainConfig) -> dict:
    """Returns the settings of the checkpoint that the run resumes, empty for a new run.

    Raises as `find_checkpoint` does.
    """
    checkpoint = find_checkpoint(config.resume_from, config.output_dir)
    return read_state(checkpoint)["settings"] if checkpoint else {}

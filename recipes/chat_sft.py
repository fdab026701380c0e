"""Fine-tune a base model on conversations, so that it answers: supervised fine-tuning (SFT).

    python recipes/prepare_data.py chat HuggingFaceTB/smoltalk --config all --model runs/pretrain_124m \\
        --sequence_length 1024 --data_dir data/chat
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/chat_sft.py --data_dir data/chat

Data: conversations that `prepare_data.py chat` packed; its `--model` is the model to start from. Only what the assistant
writes counts in the loss, and the token that ends its turn. Attention stays inside a conversation.
Batch: 64 sequences x 1,024 tokens = 65,536 tokens per update with windows of 1,024 tokens; `--epochs` passes over the data.
With few conversations lower `--total_batch_size`, so that an epoch is many updates.
Settings: those with which SmolLM2-135M and -360M became SmolLM2-Instruct (Allal et al., 2025, arXiv:2502.02737, and the
recipe in huggingface/alignment-handbook): learning rate 1e-3, cosine, a tenth of the updates warmup, two epochs. The
batch is this recipe's own. It stops early, after three evaluations without a lower loss on held-out answers; the best
model is in best/ of the run's folder. A model of several hundred million parameters or more takes a lower rate, such as
2e-5, TRL's default.
Expected: answers that end by themselves. A model of 124M answers in whole sentences, and knows little.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, check_ranges, parse_config, setting
from gpt2_accel.data.shards import MANIFEST, conversation_length, mixture_parts, read_manifest
from gpt2_accel.recipe_command import recipe_command

WARMUP_SHARE = 0.1
FEW_UPDATES = 20  # fewer are hardly enough for a schedule


@dataclass
class ChatSFT(TrainConfig):
    epochs: float = setting(2.0, "passes over the data, unless max_steps is given")

    data_dir: str = "data/chat"
    output_dir: str = "runs/chat_sft"
    resume_from: str | None = "latest"
    init_from: str | None = setting(
        None, "HF model directory or Hub id to start from; default the --model of the data"
    )
    sequence_length: int | None = setting(None, "default, and the only one, that of the data")

    total_batch_size: int = 64 * 1024
    max_steps: int | None = setting(None, "updates of the full batch; default `epochs` of them")

    learning_rate: float = 1e-3
    warmup_steps: int | None = setting(
        None, "updates of linear warmup; default a tenth of all updates"
    )
    min_lr_ratio: float = 0.0

    eval_every: int = 50
    patience: int = 3
    sample_every: int = 50
    sample_prompts: list[str] = setting(
        ["Who are you?", "What is the capital of France?"], "questions that the samples answer"
    )
    save_every: int = 50
    keep_best: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, above_zero="epochs")


def fit_to_data(config: ChatSFT) -> None:
    """Sets what follows from the data: the model, the length of a sequence, the number of updates and the warmup.

    Raises `ValueError` if the data holds no conversations, `FileNotFoundError` if it or its model is not there.
    """
    folder, command = Path(config.data_dir), f"{recipe_command('prepare_data')} chat"
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(
            f"{folder} holds no prepared conversations: make them by {command} FILE_OR_HUB_ID --model MODEL "
            f"--sequence_length 1024 --data_dir {folder}"
        )
    length = conversation_length(folder)
    if length is None:
        raise ValueError(f"{folder} holds text, not conversations: prepare some by {command}")
    parts = [folder, *(part for part, _ in mixture_parts(folder))]
    if config.init_from is None:
        config.init_from = model_of(parts)
    if config.sequence_length is None:
        config.sequence_length = length
    if config.max_steps is None:
        tokens = read_manifest(folder)["splits"]["train"]["tokens"]
        config.max_steps = max(1, round(config.epochs * tokens / config.total_batch_size))
        if config.max_steps < FEW_UPDATES:
            from gpt2_accel.runtime.processes import processes

            fitting = config.epochs * tokens / FEW_UPDATES // length * length
            processes().print(
                f"{config.epochs:g} epochs of {tokens:,} tokens are only {config.max_steps} updates of "
                f"{config.total_batch_size:,} tokens: lower --total_batch_size, to {max(length, int(fitting)):,} for instance"
            )
    if config.warmup_steps is None:
        config.warmup_steps = round(WARMUP_SHARE * config.max_steps)


def model_of(folders: list[Path]) -> str:
    """Returns the model that the first of the folders with conversations was prepared for: a directory, or a Hub id.

    Raises `FileNotFoundError` for a directory that is not there."""
    found = ((folder, read_manifest(folder).get("model")) for folder in folders)
    folder, name = next((folder, name) for folder, name in found if name)
    if (folder / name).is_dir():
        return os.path.relpath(folder / name)
    if name.startswith(".") or name.count("/") != 1:
        raise FileNotFoundError(
            f"{folder / name}, the model that {folder} was prepared for, is not there: give it by --init_from"
        )
    return name


def main() -> None:
    config = parse_config(ChatSFT)
    fit_to_data(config)
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.runtime.processes import processes
    from gpt2_accel.train import train

    if train(config):
        processes().print(
            f"\nThe model is in {config.output_dir}, the one of the lowest validation loss in "
            f"{config.output_dir}/best"
        )


if __name__ == "__main__":
    cli.run(main)

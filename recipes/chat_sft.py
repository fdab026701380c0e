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

from dataclasses import dataclass

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.data.shards import conversation_length, mixture_parts, read_manifest
from gpt2_accel.recipe_command import recipe_command
from gpt2_accel.runtime.processes import processes
from gpt2_accel.train import train

WARMUP_SHARE = 0.1


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
        if not self.epochs > 0:
            raise ValueError(f"epochs must be above 0, got {self.epochs}")


def fit_to_data(config: ChatSFT) -> None:
    """Sets what follows from the data: the model, the length of a sequence, the number of updates and the warmup.

    Raises `ValueError` if the data holds no conversations.
    """
    length = conversation_length(config.data_dir)
    if length is None:
        raise ValueError(
            f"{config.data_dir} holds text, not conversations: prepare some by {recipe_command('prepare_data')} chat"
        )
    manifests = [read_manifest(config.data_dir)]
    manifests += [read_manifest(folder) for folder, _ in mixture_parts(config.data_dir)]
    if config.init_from is None:
        config.init_from = next(filter(None, (found.get("model") for found in manifests)))
    if config.sequence_length is None:
        config.sequence_length = length
    tokens = manifests[0]["splits"]["train"]["tokens"]
    if config.total_batch_size > tokens:
        processes().print(
            f"an update of {config.total_batch_size:,} tokens reads the {tokens:,} tokens of {config.data_dir} more than "
            "once: lower --total_batch_size"
        )
    if config.max_steps is None:
        config.max_steps = max(1, round(config.epochs * tokens / config.total_batch_size))
    if config.warmup_steps is None:
        config.warmup_steps = round(WARMUP_SHARE * config.max_steps)


def main() -> None:
    config = parse_config(ChatSFT)
    fit_to_data(config)
    if train(config):
        processes().print(
            f"\nThe model is in {config.output_dir}, the one of the lowest validation loss in "
            f"{config.output_dir}/best"
        )


if __name__ == "__main__":
    cli.run(main)

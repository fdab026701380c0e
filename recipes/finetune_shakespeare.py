"""Fine-tune one of OpenAI's GPT-2 models on tiny Shakespeare, as nanoGPT does.

    accelerate launch --config_file accelerate_configs/1xgpu.yaml recipes/finetune_shakespeare.py
    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/finetune_shakespeare.py \\
        --init_from gpt2

`cpu_bf16.yaml` is faster on a CPU with AMX or AVX512-BF16, and far slower on other CPUs.

`--init_from` is any GPT-2 on the Hub, or a directory. `--input FILE` trains on another text; by
default tiny Shakespeare is downloaded. Data: the first 90% of the text, 301,966 GPT-2 tokens.
Batch: 1 sequence x 1,024 tokens x 32 micro-batches = 32,768 tokens per update. nanoGPT runs 20
updates with gpt2-xl. This recipe stops after three evaluations without a lower validation loss, or
after 100 updates; the best model is in best/ of the run's folder. Settings: nanoGPT's constant
learning rate of 3e-5, and dropout 0.1 against overfitting. Expected: text in Shakespeare's style
after 20 updates. nanoGPT's readme shows samples, but no loss. This recipe was not tested with
OpenAI's weights.
"""

from dataclasses import dataclass

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config, setting


@dataclass
class FinetuneShakespeare(TrainConfig):
    input: str | None = setting(None, "text file; default tiny Shakespeare, downloaded")

    data_dir: str = "data/shakespeare"
    output_dir: str = "runs/finetune_shakespeare"
    init_from: str = setting(
        "openai-community/gpt2-xl",
        "HF GPT-2 directory or Hub id to start from; gpt2 is the smallest",
    )
    dropout: float = 0.1

    micro_batch_size: int = 1
    total_batch_size: int = 32 * 1024
    max_steps: int = 100

    learning_rate: float = 3e-5
    lr_schedule: str = "constant"
    warmup_steps: int = 0

    eval_every: int = 5
    patience: int = 3
    sample_every: int = 20
    save_every: int = 5
    keep_last: int = 1
    keep_best: bool = True


def main() -> None:
    config = parse_config(FinetuneShakespeare)
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.checkpoint.find import verified_directory
    from gpt2_accel.data.prepare import prepare_text
    from gpt2_accel.hf.convert import model_tokenizer
    from gpt2_accel.runtime.processes import main_process_first
    from gpt2_accel.train import train

    with main_process_first():
        prepare_text(
            config.input,
            config.data_dir,
            lambda text: model_tokenizer(verified_directory(config.init_from)),
        )
    train(config)


if __name__ == "__main__":
    cli.run(main)

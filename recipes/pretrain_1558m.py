"""Train GPT-2 1558M from scratch. See `pretrain_124m.py` for the explanations.

    python recipes/prepare_data.py fineweb-edu --config sample-100BT \\
        --data_dir data/fineweb_edu_100bt
    accelerate launch --config_file accelerate_configs/8xa100_fsdp2.yaml recipes/pretrain_1558m.py

Batch: 1,024 sequences x 1,024 tokens = 1,048,576 tokens per update; 32,000 updates, 33.6B tokens.
Settings: the GPT-3 paper's for its XL model, a batch of 1M tokens and a peak learning rate of 2e-4.
The config shards weights, gradients and optimizer state over the GPUs (FSDP2). Expected: close to
OpenAI's 1558M, HellaSwag .4889 per token (measured by llm.c). Not run in full here.
"""

from dataclasses import dataclass

from pretrain_124m import Pretrain124M, main

from gpt2_accel import cli


@dataclass
class Pretrain1558M(Pretrain124M):
    data_dir: str = "data/fineweb_edu_100bt"
    output_dir: str = "runs/pretrain_1558m"

    n_layer: int = 48
    n_head: int = 25
    n_embd: int = 1600

    total_batch_size: int = 1_048_576
    max_steps: int = 32_000

    learning_rate: float = 2e-4


if __name__ == "__main__":
    cli.run(lambda: main(Pretrain1558M))

"""Train GPT-2 355M from scratch. See `pretrain_124m.py` for the explanations.

    python recipes/prepare_data.py fineweb-edu --config sample-100BT \\
        --data_dir data/fineweb_edu_100bt
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/pretrain_355m.py

Batch: 512 sequences x 1,024 tokens = 524,288 tokens per update; 57,220 updates, 30.0B tokens.
Settings: the GPT-3 paper's for its medium model, peak learning rate 3e-4. Expected: better than
OpenAI's 355M, HellaSwag .3752 per token (measured by llm.c). Not run in full here.
"""

from dataclasses import dataclass

from pretrain_124m import Pretrain124M, main

from gpt2_accel import cli


@dataclass
class Pretrain355M(Pretrain124M):
    data_dir: str = "data/fineweb_edu_100bt"
    output_dir: str = "runs/pretrain_355m"

    n_layer: int = 24
    n_head: int = 16
    n_embd: int = 1024

    max_steps: int = 57_220

    learning_rate: float = 3e-4


if __name__ == "__main__":
    cli.run(lambda: main(Pretrain355M))

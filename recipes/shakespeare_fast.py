"""Train a character-level GPT on tiny Shakespeare in seconds on a CPU, past nanoGPT's CPU example.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/shakespeare_fast.py

`cpu_bf16.yaml` is faster on a CPU with AMX or AVX512-BF16, and far slower on other CPUs.

Data: as in `shakespeare_char.py`; `--input FILE` trains on your own text. Batch: 48 sequences x 32
characters = 1,536 tokens per update; 300 updates, 0.46M tokens, less than half of the text.
Settings: Muon needs fewer tokens than AdamW. Two layers and short sequences allow many small
updates, which matter most early in training. The learning rate is the best of 1e-2, 1.5e-2, 1.8e-2
and 2.2e-2, and is close to the best one for this width in docs/results.md. Expected: a loss of 1.83
to 1.89 over all validation data, over five seeds, each with all instructions of an Intel Xeon and
with AVX2 alone; nanoGPT's CPU settings reach 1.9.
"""

from dataclasses import dataclass

from shakespeare_char import ShakespeareChar, train_on_characters

from gpt2_accel import cli
from gpt2_accel.config import parse_config


@dataclass
class ShakespeareFast(ShakespeareChar):
    output_dir: str = "runs/shakespeare_fast"

    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 128
    n_positions: int = 32
    dropout: float = 0.0

    micro_batch_size: int = 48
    total_batch_size: int = 48 * 32
    max_steps: int = 300

    optimizer: str = "muon"
    learning_rate: float = 1.8e-2
    lr_schedule: str = "linear"
    min_lr_ratio: float = 0.0
    warmup_steps: int = 3
    beta2: float = 0.95

    eval_every: int = 300
    sample_every: int = 300
    sample_tokens: int = 200


def main() -> None:
    train_on_characters(parse_config(ShakespeareFast))


if __name__ == "__main__":
    cli.run(main)

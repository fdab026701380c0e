"""Train nanoGPT's first example: a character-level GPT on tiny Shakespeare or your own text.

    accelerate launch --config_file accelerate_configs/1xgpu.yaml recipes/shakespeare_char.py
    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/shakespeare_char.py \\
        --cpu_settings

`--input FILE` trains on your own text; by default tiny Shakespeare is downloaded. Data: the first
90% of the characters are for training, the rest for validation. Batch: 64 sequences x 256
characters = 16,384 tokens per update; 5,000 updates. Settings: nanoGPT's for a GPU, six layers.
Expected: nanoGPT reports a validation loss of 1.4697. `--cpu_settings`: nanoGPT's settings for a
CPU: four layers, 12 x 64 = 768 tokens per update, 2,000 updates; a loss of about 1.9.
"""

from dataclasses import dataclass

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config, setting


@dataclass
class ShakespeareChar(TrainConfig):
    input: str | None = setting(None, "text file; default tiny Shakespeare, downloaded")
    cpu_settings: bool = setting(False, "nanoGPT's smaller settings for a CPU")

    data_dir: str = "data/shakespeare_char"
    output_dir: str = "runs/shakespeare_char"

    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    n_positions: int = 256
    bias: bool = False
    dropout: float = 0.2

    micro_batch_size: int = 64
    total_batch_size: int = 64 * 256
    max_steps: int = 5000

    learning_rate: float = 1e-3
    warmup_steps: int = 100
    beta2: float = 0.99

    sample_every: int = 1000
    sample_tokens: int = 300


@dataclass
class ShakespeareCharOnCPU(ShakespeareChar):
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    n_positions: int = 64
    dropout: float = 0.0

    micro_batch_size: int = 12
    total_batch_size: int = 12 * 64
    max_steps: int = 2000


def train_on_characters(config: ShakespeareChar) -> None:
    """Prepares the text and trains."""
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.data.prepare import prepare_text
    from gpt2_accel.runtime.processes import main_process_first
    from gpt2_accel.tokenizer import char_tokenizer
    from gpt2_accel.train import train

    with main_process_first():
        prepare_text(config.input, config.data_dir, char_tokenizer)
    train(config)


def main() -> None:
    config = parse_config(ShakespeareChar)
    if config.cpu_settings:
        config = parse_config(ShakespeareCharOnCPU)
    train_on_characters(config)


if __name__ == "__main__":
    cli.run(main)

"""Train a nanochat model of any depth with Muon: all other settings follow from the depth.

    python recipes/prepare_data.py hf karpathy/climbmix-400b-shuffle --tokenizer gpt2 \\
        --data_dir data/climbmix
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/speedrun.py --depth 24

The goal is the CORE score of OpenAI's GPT-2 1558M, .2565. nanochat reports .257 (March 2026) with a
later version of its model: fp8, value embeddings, windowed attention and its own tokenizer. This
recipe was not run at this size.

Data: ClimbMix (nvidia), shuffled, as text. Its license, CC BY-NC 4.0, allows research only; the
card of the final model names it. Settings, from `base_train.py` of karpathy/nanochat, July 2026:
- width 64 x depth, rounded up to heads of 128 channels; 2,048 positions;
- D = 12 tokens per weight of the blocks' matrices and of the head;
- batch B = 2^round(log2(2^19 (D / D at depth 12)^0.383)); the exponent is from Power Lines (Bergsma
  et al., 2025, arXiv:2505.13738);
- learning rate 0.1 / sqrt(width) x sqrt(B / 2^19), which is nanochat's 0.02 for its own Muon; the
  square root of B is from Malladi et al. (2022, arXiv:2205.10287, for Adam). AdamW's parameters
  have the same rate;
- weight decay 0.1 x sqrt(B / 2^19) x D at depth 12 / D, which keeps the time scale of the decay at
  the same share of a run (Wang and Aitchison, 2024, arXiv:2405.13698). 0.1 was not searched;
- 40 updates of warmup, a constant rate, and over the last 65% of the run a linear decay to 5%.

Time on 8 H100s at 45% of 989 TFLOP/s, and its price at 24 dollars an hour:

| depth | parameters | tokens | batch | updates | FLOPs | hours | dollars |
|---|---|---|---|---|---|---|---|
| 20 | 0.52B | 5.5B | 1,048,576 | 5,236 | 1.85e19 | 1.4 | 35 |
| 24 | 0.83B | 9.1B | 1,048,576 | 8,659 | 4.94e19 | 3.9 | 93 |
| 26 | 1.03B | 11.4B | 1,048,576 | 10,843 | 7.67e19 | 6.0 | 144 |

A trial on a CPU, three minutes:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/speedrun.py --depth 2 \\
        --total_batch_size 8192 --max_steps 40 --data_dir data/python_stdlib
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, derived, parse_config, setting
from gpt2_accel.rounding import round_up
from gpt2_accel.runtime.recipe_command import recipe_command

if TYPE_CHECKING:
    from gpt2_accel.run import Run

DATA = "karpathy/climbmix-400b-shuffle"
LICENSE = "cc-by-nc-4.0"  # ClimbMix's license
VOCAB_SIZE = 50257  # size of GPT-2's vocabulary, used by a dry run without data
HEAD = 128  # channels
TOKENS_PER_WEIGHT = 12
REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19
BATCH_EXPONENT = 0.383
RATE_TIMES_ROOT = 0.1  # the rate at the reference batch, times the square root of the width
WEIGHT_DECAY = 0.1  # the value at the reference depth


@dataclass
class Speedrun(TrainConfig):
    data_dir: str = "data/climbmix"
    output_dir: str = "runs/speedrun"
    resume_from: str | None = "latest"

    architecture: str | None = "nanochat"
    depth: int = setting(20, "layers; width, batch, updates, rate and decay follow from it")
    n_positions: int = 2048
    micro_batch_size: int = 0  # the largest that fits
    residual_dtype: str = "bfloat16"
    total_batch_size: int = derived("tokens per update; default by the depth")
    max_steps: int = derived("updates; default by the depth")

    optimizer: str = "muon"
    learning_rate: float = derived("peak learning rate; default by the depth")
    weight_decay: float = derived("weight decay; default by the depth")
    warmup_steps: int = 40
    lr_schedule: str = derived("default wsd_linear; a resumed run keeps its own")
    decay_share: float = 0.65
    min_lr_ratio: float = 0.05

    sample_prompts: list[str] = setting(
        ["The capital of France is"], "prompts that the samples continue"
    )
    sample_tokens: int = 32


def width_of(depth: int) -> int:
    """Returns the width of a depth: 64 channels per layer, in heads of 128."""
    return round_up(64 * depth, HEAD)


def tokens_of(depth: int, vocab_size: int) -> int:
    """Returns the training tokens: 12 per weight of the blocks' matrices and of the head."""
    width = width_of(depth)
    return TOKENS_PER_WEIGHT * (12 * depth * width**2 + vocab_size * width)


def follow_depth(config: Speedrun, vocab_size: int) -> None:
    """Sets the settings that follow from the depth, unless they are given: batch, updates, learning
    rate and weight decay."""
    tokens = tokens_of(config.depth, vocab_size)
    ratio = tokens / tokens_of(REFERENCE_DEPTH, vocab_size)
    batch = 2 ** round(math.log2(REFERENCE_BATCH * ratio**BATCH_EXPONENT))
    config.derive(total_batch_size=batch)
    batch = config.total_batch_size
    root = math.sqrt(batch / REFERENCE_BATCH)
    rate = RATE_TIMES_ROOT / math.sqrt(width_of(config.depth)) * root
    decay = WEIGHT_DECAY * root / ratio
    config.derive(
        max_steps=tokens // batch,
        learning_rate=float(f"{rate:.3g}"),
        weight_decay=float(f"{decay:.3g}"),
    )


class License:
    """A callback that writes the license of ClimbMix into the card of the final model."""

    def on_train_end(self, run: "Run", finished: bool) -> None:
        from huggingface_hub import ModelCard

        path = Path(run.config.output_dir, "README.md")
        if finished and run.accelerator.is_main_process:
            card = ModelCard.load(path)
            card.data.license = LICENSE
            card.save(path)


def main() -> None:
    config = parse_config(Speedrun)
    from gpt2_accel.data.shards import read_manifest

    exists = Path(config.data_dir).exists()
    if not exists and not config.dry_run:
        arguments = ["hf", DATA, "--tokenizer", "gpt2", "--data_dir", config.data_dir]
        command = recipe_command("prepare-data", *arguments)
        raise FileNotFoundError(f"{config.data_dir} does not exist: make it by {command}")
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.train import train

    vocab_size = VOCAB_SIZE
    if exists:
        vocab_size = read_manifest(config.data_dir)["tokenizer"]["vocab_size"]
    follow_depth(config, vocab_size)
    config.derive(lr_schedule="wsd_linear")
    callbacks = [License()] if config.data_dir == Speedrun.data_dir else []
    train(config, callbacks=callbacks)


if __name__ == "__main__":
    cli.run(main)

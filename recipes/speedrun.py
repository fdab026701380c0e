"""Train a nanochat of any depth with Muon: one dial, from which all other settings follow.

    python recipes/prepare_data.py hf karpathy/climbmix-400b-shuffle --tokenizer gpt2 --data_dir data/climbmix
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/speedrun.py --depth 24

It aims at the CORE of OpenAI's GPT-2 1558M, .2565. nanochat has published .257 (March 2026) with a
later form of its model: fp8, value embeddings, windows of attention and a tokenizer of its own.
This recipe was not run at this size.

Data: ClimbMix (nvidia), shuffled, as text. Its license is CC BY-NC 4.0, for research only; so is the final model's card.
Settings, from karpathy/nanochat's `base_train.py`, July 2026:
- width 64 x depth, rounded up to heads of 128 channels; 2,048 positions;
- D = 12 tokens per weight of the blocks' matrices and the head;
- batch B = 2^round(log2(2^19 (D / D of depth 12)^0.383)), with the exponent of Power Lines (Bergsma et al., 2025,
  arXiv:2505.13738);
- Muon's rate 0.02, which is 0.1 / sqrt(width) for this package's Muon, x sqrt(B / 2^19) (Malladi et al., 2022,
  arXiv:2205.10287, for Adam). AdamW's parameters have the same rate;
- weight decay 0.1 x sqrt(B / 2^19) x D of depth 12 / D, so that weights forget at the same pace over a run (Wang and
  Aitchison, 2024, arXiv:2405.13698). The 0.1 is this package's, and was not searched;
- 40 updates of warmup, then constant, over the last 65% of the run linear to 5%.

| depth | parameters | tokens | batch | updates | FLOPs | 8 x H100 at 45% of 989 TFLOP/s | at 24 dollars an hour |
|---|---|---|---|---|---|---|---|
| 20 | 0.52B | 5.5B | 1,048,576 | 5,236 | 1.85e19 | 1.4 hours | 35 dollars |
| 24 | 0.83B | 9.1B | 1,048,576 | 8,659 | 4.94e19 | 3.9 hours | 93 dollars |
| 26 | 1.03B | 11.4B | 1,048,576 | 10,843 | 7.67e19 | 6.0 hours | 144 dollars |

A trial on a CPU, three minutes:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/speedrun.py --depth 2 --total_batch_size 8192 \\
        --max_steps 40 --data_dir data/python_stdlib
"""

import math
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.data.shards import HUB, read_manifest
from gpt2_accel.runtime.recipe_command import recipe_command

DATA = "karpathy/climbmix-400b-shuffle"
LICENSE = "cc-by-nc-4.0"  # of ClimbMix
VOCAB_SIZE = 50257  # GPT-2's, before there is data
HEAD = 128  # channels
TOKENS_PER_WEIGHT = 12
REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19
BATCH_EXPONENT = 0.383
RATE_TIMES_ROOT = 0.1  # the rate at the reference batch, times the square root of the width
WEIGHT_DECAY = 0.1  # at the reference depth
LARGEST_MICRO_BATCH = 16  # sequences


@dataclass
class Speedrun(TrainConfig):
    data_dir: str = "data/climbmix"
    output_dir: str = "runs/speedrun"
    resume_from: str | None = "latest"

    architecture: str | None = "nanochat"
    depth: int | None = setting(
        20, "layers; the width, the batch, the updates and the rates follow"
    )
    n_positions: int = 2048
    micro_batch_size: int | None = setting(None, "sequences per device; default up to 16")
    total_batch_size: int | None = setting(None, "tokens per update; default by the depth")
    max_steps: int | None = setting(None, "updates; default by the depth")

    optimizer: str = "muon"
    learning_rate: float | None = setting(None, "peak learning rate; default by the depth")
    weight_decay: float | None = setting(None, "weight decay; default by the depth")
    warmup_steps: int = 40
    lr_schedule: str = "wsd"
    decay_share: float = 0.65
    min_lr_ratio: float = 0.05

    sample_prompts: list[str] = setting(
        ["The capital of France is"], "prompts that the samples continue"
    )
    sample_tokens: int = 32


def width_of(depth: int) -> int:
    """Returns the width of a depth: 64 per layer, in heads of 128 channels."""
    return math.ceil(64 * depth / HEAD) * HEAD


def tokens_of(depth: int, vocab_size: int) -> int:
    """Returns the tokens of a run of a depth: 12 per weight of the blocks' matrices and the head."""
    width = width_of(depth)
    return TOKENS_PER_WEIGHT * (12 * depth * width**2 + vocab_size * width)


def follow_depth(config: Speedrun, vocab_size: int, processes: int) -> None:
    """Sets what follows from the depth, where it is not given: batch, updates, rate and decay."""
    tokens = tokens_of(config.depth, vocab_size)
    ratio = tokens / tokens_of(REFERENCE_DEPTH, vocab_size)
    if config.total_batch_size is None:
        config.total_batch_size = 2 ** round(math.log2(REFERENCE_BATCH * ratio**BATCH_EXPONENT))
    root = math.sqrt(config.total_batch_size / REFERENCE_BATCH)
    rate = RATE_TIMES_ROOT / math.sqrt(width_of(config.depth)) * root
    if config.max_steps is None:
        config.max_steps = tokens // config.total_batch_size
    if config.learning_rate is None:
        config.learning_rate = float(f"{rate:.3g}")
    if config.weight_decay is None:
        config.weight_decay = float(f"{WEIGHT_DECAY * root / ratio:.3g}")
    if config.micro_batch_size is None:
        share = config.total_batch_size // (config.tokens_per_sequence * processes)
        config.micro_batch_size = max(1, math.gcd(share, LARGEST_MICRO_BATCH))


class License:
    """Writes ClimbMix's license into the card of the final model."""

    def on_train_end(self, run, finished: bool) -> None:
        from huggingface_hub import ModelCard

        path = Path(run.config.output_dir, "README.md")
        if finished and run.accelerator.is_main_process:
            card = ModelCard.load(path)
            card.data.license = LICENSE
            card.save(path)


def main() -> None:
    config = parse_config(Speedrun)
    there = config.data_dir.startswith(HUB) or Path(config.data_dir).exists()
    if not there and not config.dry_run:
        words = ["hf", DATA, "--tokenizer", "gpt2", "--data_dir", config.data_dir]
        command = recipe_command("prepare_data", *words)
        raise FileNotFoundError(f"{config.data_dir} is not there: make it by {command}")
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.hf.hub_data import open_hub
    from gpt2_accel.runtime.processes import main_process_first, process_state
    from gpt2_accel.train import train

    vocab_size = VOCAB_SIZE
    if there:
        with main_process_first():
            open_hub(config.data_dir)
        vocab_size = read_manifest(config.data_dir)["tokenizer"]["vocab_size"]
    follow_depth(config, vocab_size, process_state().num_processes)
    own = config.data_dir == Speedrun.data_dir
    train(config, callbacks=[License()] if own else [])


if __name__ == "__main__":
    cli.run(main)

"""Train GPT-2 124M from scratch, with the settings of "Let's reproduce GPT-2" (build-nanogpt).

    python recipes/prepare_data.py fineweb-edu --data_dir data/fineweb_edu
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/pretrain_124m.py

Data: the sample of FineWeb-Edu with 10 billion tokens, or any prepared data by `--data_dir`. Batch:
512 sequences x 1,024 tokens = 524,288 tokens per update; 19,073 updates, 10.0B tokens, about one
epoch. Micro-batches are the largest that fit; on other devices only their number changes. In bf16
runs the residual stream is in bf16, as llm.c's (docs/performance.md). The settings are those of
GPT-3 Small (Brown et al., 2020, table 2.1 and appendix B): peak learning rate 6e-4, 715 updates
(375M tokens) of warmup, cosine decay to a tenth, weight decay 0.1 on matrices and embeddings,
gradients clipped to norm 1. Expected: a lower validation loss than the 3.2924 of OpenAI's 124M on
the same data, and a higher HellaSwag accuracy than its .2945 (both measured by build-nanogpt). This
recipe was not run in full: 10B tokens take 8.6e18 FLOPs, which is 2.4 hours at 40% of the peak of
eight A100s. `--dry_run` estimates this for any launch config and GPU, on any machine:

    python recipes/pretrain_124m.py --dry_run accelerate_configs/8xa100.yaml A100

Muon instead of AdamW, with settings extrapolated from smaller models:

    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/pretrain_124m.py \\
        --config recipes/pretrain_124m_muon.yaml

nanoGPT's settings for OpenWebText (`bias=False`, 600,000 updates of 491,520 tokens), for which it
reports a loss of 2.85:

    python recipes/prepare_data.py openwebtext --data_dir data/openwebtext
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/pretrain_124m.py \\
        --config recipes/nanogpt_openwebtext.yaml
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.runtime.recipe_command import recipe_command

# Folder -> the name that prepare_data.py has for its data set.
KNOWN = {"fineweb_edu": "fineweb-edu", "openwebtext": "openwebtext"}


@dataclass
class Pretrain124M(TrainConfig):
    data_dir: str = "data/fineweb_edu"
    output_dir: str = "runs/pretrain_124m"
    resume_from: str | None = "latest"

    micro_batch_size: int = 0  # the largest that fits
    residual_dtype: str = "bfloat16"
    total_batch_size: int = 524_288
    max_steps: int = 19_073

    sample_prompts: list[str] = setting(
        ["Hello, I'm a language model,"], "prompts that the samples continue"
    )
    sample_tokens: int = 32


def main(config_class: type[TrainConfig]) -> None:
    """Parses the settings and trains. Raises `FileNotFoundError` if the data does not exist."""
    config = parse_config(config_class)
    folder = Path(config.data_dir)
    if not (config.dry_run or folder.exists()):
        source = [KNOWN[folder.name]] if folder.name in KNOWN else ["text", "PATH"]
        command = recipe_command("prepare-data", *source, "--data_dir", config.data_dir)
        raise FileNotFoundError(f"{folder} does not exist: make it by {command}")
    from gpt2_accel.train import train  # imports torch: --help and a wrong flag do not wait for it

    train(config)


if __name__ == "__main__":
    cli.run(lambda: main(Pretrain124M))

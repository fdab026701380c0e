"""Train GPT-2 124M from scratch, as "Let's reproduce GPT-2" (build-nanogpt) does.

    python recipes/prepare_data.py fineweb-edu --data_dir data/fineweb_edu
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/pretrain_124m.py

Data: the 10-billion-token sample of FineWeb-Edu, or any prepared data by `--data_dir`. Batch: 16
sequences x 1,024 tokens x 8 GPUs x 4 micro-batches = 524,288 tokens per update; 19,073 updates,
10.0B tokens, about one epoch. On other devices only the number of micro-batches changes. Settings:
the GPT-3 paper's for its smallest model (Brown et al., 2020, table 2.1 and appendix B): peak
learning rate 6e-4, 715 updates (375M tokens) of warmup, cosine to a tenth, weight decay 0.1 on
matrices and embeddings, clipping at 1. Expected: a lower validation loss than OpenAI's 124M on the
same data, 3.2924, and a better HellaSwag than its .2945 (both measured by build-nanogpt). Not run
in full here: 10B tokens are 8.6e18 FLOPs, 2.4 hours at 40% of the peak of eight A100s. `--dry_run`
computes that for any launch config and GPU, on any machine:

    python recipes/pretrain_124m.py --dry_run accelerate_configs/8xa100.yaml A100

With Muon instead of AdamW, settings found at smaller sizes and extrapolated:

    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/pretrain_124m.py \\
        --config recipes/pretrain_124m_muon.yaml

nanoGPT's settings for OpenWebText (`bias=False`, 600,000 updates of 491,520 tokens; 2.85 reported):

    python recipes/prepare_data.py openwebtext --data_dir data/openwebtext
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/pretrain_124m.py \\
        --config recipes/nanogpt_openwebtext.yaml
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.data.shards import HUB
from gpt2_accel.runtime.recipe_command import recipe_command

# The data sets that prepare_data.py knows by name, by their usual folder.
KNOWN = {"fineweb_edu": ["fineweb-edu"], "openwebtext": ["openwebtext"]}


@dataclass
class Pretrain124M(TrainConfig):
    data_dir: str = "data/fineweb_edu"
    output_dir: str = "runs/pretrain_124m"
    resume_from: str | None = "latest"

    micro_batch_size: int = 16
    total_batch_size: int = 524_288
    max_steps: int = 19_073

    sample_prompts: list[str] = setting(
        ["Hello, I'm a language model,"], "prompts that the samples continue"
    )
    sample_tokens: int = 32


def main(config_class: type[TrainConfig]) -> None:
    """Reads the settings and trains. Raises `FileNotFoundError` if the data is not there."""
    config = parse_config(config_class)
    there = config.data_dir.startswith(HUB) or Path(config.data_dir).exists()
    if not there and not config.dry_run:
        what = KNOWN.get(Path(config.data_dir).name, ["text", "PATH"])
        command = recipe_command("prepare_data", *what, "--data_dir", config.data_dir)
        raise FileNotFoundError(f"{config.data_dir} is not there: make it by {command}")
    from gpt2_accel.train import train  # imports torch: --help and a wrong flag do not wait for it

    train(config)


if __name__ == "__main__":
    cli.run(lambda: main(Pretrain124M))

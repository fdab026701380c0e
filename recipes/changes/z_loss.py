"""The z-loss of PaLM, which keeps the logits small (Chowdhery et al., 2022, arXiv:2204.02311,
section 5).

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/z_loss.py \\
        --config recipes/changes/small.yaml --data_dir data/python_stdlib --output_dir runs/z_loss

The loss is cross-entropy + 1e-4 · mean(log-sum-exp(logits)²), from all logits. `train/z_loss` is
that mean. The validation loss is the cross-entropy alone.
"""

from gpt2_accel import cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import torch

from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.data.loader import Batch
from gpt2_accel.train import train


def objective(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    counted = batch.targets != -100
    logits = model(batch.input_ids, documents=batch.documents)[counted].float()
    z = logits.logsumexp(dim=-1).square().mean()
    loss = torch.nn.functional.cross_entropy(logits, batch.targets[counted])
    return loss + 1e-4 * z, {"z_loss": z}


def main() -> None:
    train(parse_config(TrainConfig), objective=objective)


if __name__ == "__main__":
    cli.run(main)

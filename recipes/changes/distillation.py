"""Distillation from any causal language model (Hinton et al., 2015, arXiv:1503.02531).

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/changes/distillation.py \\
        --config recipes/changes/small.yaml --data_dir data/python_stdlib \\
        --teacher runs/quickstart --output_dir runs/student

The loss is the mean of the cross-entropy and of the Kullback-Leibler divergence from the teacher's
next-token distribution, which is `train/divergence`. The teacher gets no gradient and is not saved
in checkpoints. Expected of the command above, after `make quickstart`, over five seeds: a
divergence of 0.8 to 1.1 nats at the end, after 2.8 to 3.2 at the beginning, and a validation loss
of 4.1 to 4.4.
"""

from dataclasses import dataclass

from gpt2_accel import cli

# gpt2_accel before torch: it sets how torch's threads wait.
# isort: split
import torch
import torch.nn.functional as F

from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.data.loader import Batch
from gpt2_accel.train import train


@dataclass
class Student(TrainConfig):
    teacher: str = setting("runs/quickstart", "HF model directory or Hub id")


class Distillation:
    def __init__(self, name: str):
        from transformers import AutoModelForCausalLM

        teacher = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        self.teacher = teacher.eval().requires_grad_(False)

    def __call__(
        self, model: torch.nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = model(batch.input_ids).flatten(0, 1)
        with torch.no_grad():
            theirs = self.teacher.to(logits.device)(batch.input_ids).logits.flatten(0, 1)
        if theirs.shape != logits.shape:
            raise ValueError(
                f"the teacher has {theirs.shape[1]} tokens, the student {logits.shape[1]}: "
                "prepare the data with the teacher's tokenizer"
            )
        targets = batch.targets.flatten()
        counted = targets != -100
        theirs = theirs[counted].log_softmax(dim=-1)
        student = logits[counted].log_softmax(dim=-1)
        divergence = F.kl_div(student, theirs, reduction="batchmean", log_target=True)
        loss = F.nll_loss(student, targets[counted])
        return (loss + divergence) / 2, {"divergence": divergence, "cross_entropy": loss}


def main() -> None:
    config = parse_config(Student)
    train(config, objective=Distillation(config.teacher))


if __name__ == "__main__":
    cli.run(main)

"""Direct preference optimization (DPO, Rafailov et al., 2023, arXiv:2305.18290): an objective on pairs of answers.

The reference is the model that the run starts from. Its log-probabilities are computed once, before the first update, and
stored beside the prepared pairs, so there is no second model.
"""

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save

from gpt2_accel.data.loader import Batch, EvalLoader, open_split
from gpt2_accel.data.shards import folder_of
from gpt2_accel.evals.validation import per_window
from gpt2_accel.runtime.files import digest, write_file
from gpt2_accel.runtime.processes import on_main_process

if TYPE_CHECKING:
    from gpt2_accel.run import Run

LOSS_TYPES = ("sigmoid", "sigmoid_norm")


class Preferences:
    """The objective, which is also a callback of the same run: `train(config, objective=it, callbacks=[it])`.

    The reward of an answer is beta · log(p / q), where p is its probability, given the prompt, by the model, and q by the
    reference. The loss of a pair is -log sigmoid(reward of the chosen - reward of the rejected), equation 7 of the paper.
    `loss_type` "sigmoid_norm" divides each reward by the answer's tokens, as Tulu 3 does (Lambert et al., 2024,
    arXiv:2411.15124, equation 6). `start` is the directory of the model that the run starts from.

    Figures, means over pairs: `reward_accuracy`, the share in which the chosen answer's reward is higher, `margin`, the
    difference, and `reward_chosen` and `reward_rejected`, none of them divided by tokens.

    Raises `ValueError` for another `loss_type`.
    """

    pairs = True

    def __init__(self, start: str | Path, *, beta: float = 0.1, loss_type: str = "sigmoid"):
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}")
        self.beta, self.loss_type = beta, loss_type
        mark = on_main_process(lambda: weights_digest(Path(start)))
        self.prefix = f"reference-{mark[:16]}-"  # of the file of its log-probabilities
        self.file = ""
        self.reference: dict[str, torch.Tensor] = {}  # of each split, (pairs, 2)

    def __call__(
        self, model: torch.nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the mean loss of the pairs of a micro-batch, and the figures."""
        found, added = self.figures(model, batch, "train")
        del found["counted"]
        means = {name: values.mean() for name, values in found.items()}
        return means.pop("loss") + added, means

    def measure(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns the loss and the figures of each pair of the validation split, (B,)."""
        return self.figures(model, batch, "val")[0]

    def figures(
        self, model: torch.nn.Module, batch: Batch, split: str
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | float]:
        """Returns the loss and the figures of each pair, (B,), and a mixture of experts' load balancing loss, else 0."""
        logs, tokens, added = answer_log_probabilities(model, batch)
        if batch.numbers is not None:  # else a trial of the memory
            logs = logs - self.reference[split][batch.numbers]
        rewards = self.beta * logs
        scores = rewards / tokens if self.loss_type == "sigmoid_norm" else rewards
        chosen, rejected = rewards.detach().unbind(dim=1)
        return {
            "loss": -F.logsigmoid(scores[:, 0] - scores[:, 1]),
            "counted": torch.ones_like(chosen),
            "reward_accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }, added

    # The callback

    def state_dict(self) -> dict[str, str]:
        return {"reference": self.file}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Raises `ValueError` if the run began from another model."""
        self.file = state["reference"]
        if not self.file.startswith(self.prefix):
            raise ValueError(
                "the run began from a model with other weights: give that by --model, or choose another --output_dir"
            )

    def on_train_begin(self, run: "Run") -> None:
        """Reads the reference's log-probabilities, or computes them before the first update.

        Raises `ValueError` if they are missing at a resume: the model is no longer the reference."""
        accelerator, dtype = run.accelerator, run.config.dtype
        if not run.step:
            self.file = f"{self.prefix}{accelerator.mixed_precision}-{dtype}.safetensors"
        path = folder_of(run.config.data_dir) / (self.file or f"{self.prefix}*")
        if not on_main_process(path.is_file):
            if run.step:
                raise ValueError(
                    f"{path}, the log-probabilities of the model that the run began from, is missing: resume with the "
                    "--data_dir of that run, or start anew in another --output_dir"
                )
            found = self.compute(run)
            if run.stopping:
                return
            on_main_process(lambda: write_file(path, save(found)))
        for split, table in load_file(path).items():
            self.reference[split] = table.to(accelerator.device)

    def compute(self, run: "Run") -> dict[str, torch.Tensor]:
        """Returns the log-probabilities of all answers by the current weights, (pairs, 2) for each split, without dropout; sets
        `run.stopping` if a rank has to stop."""
        found, remote = {}, run.train_loader.streams[0].remote
        for split in ("train", "val"):
            loader = EvalLoader(
                open_split(run.config.data_dir, split, remote),
                batch_size=run.train_loader.micro_batch_size,
                max_tokens=2**62,
                sequence_length=run.config.tokens_per_sequence,
                rank=run.accelerator.process_index,
                world_size=run.accelerator.num_processes,
            )
            title = f"reference, {split}"
            own = per_window(
                run.accelerator, run.model, loader, reference_figures, title, run.interrupted
            )
            if own is None:
                run.stopping = True
                break
            found[split] = torch.stack((own["chosen"], own["rejected"]), dim=1)
        return found


def answer_log_probabilities(
    model: torch.nn.Module, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Returns the log-probabilities of the chosen and the rejected answer of each pair, (B, 2), their tokens, (B, 2), and what a mixture
    of experts adds to the loss in training, else 0."""
    count, length = batch.input_ids.shape
    ids, targets = (part.view(2 * count, length // 2) for part in batch[:2])
    found, added = model(ids, targets, reduction="none"), 0.0
    if isinstance(found, tuple):
        # It is added to the loss of each position, also of a row's last, which has no target.
        nats, _ = found
        added = nats[0, -1]
        found = nats - added
    logs = -found.float().sum(dim=1)
    tokens = (targets != -100).sum(dim=1).clamp(min=1)
    return logs.view(count, 2), tokens.view(count, 2), added


def reference_figures(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the log-probabilities of both answers of each pair, (B,) each."""
    logs, _, _ = answer_log_probabilities(model, batch)
    return {"chosen": logs[:, 0], "rejected": logs[:, 1]}


def weights_digest(directory: Path) -> str:
    """Returns the SHA-256 (hex) of all weight files of a model directory."""
    digests = [digest(file) for file in sorted(directory.glob("*.safetensors"))]
    return sha256("".join(digests).encode()).hexdigest()

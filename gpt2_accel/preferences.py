"""Direct preference optimization: an objective on pairs of answers.

DPO is from Rafailov et al., 2023, arXiv:2305.18290. The reference is the model that the run starts
from. Its log-probabilities are computed once, before the first update, and stored with the
prepared pairs, so there is no second model.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from gpt2_accel.data.loader import Batch, EvalLoader
from gpt2_accel.evals.validation import per_window
from gpt2_accel.hf.safetensors_files import weights_digest
from gpt2_accel.rounding import round_up
from gpt2_accel.run import Run
from gpt2_accel.runtime.files import remove_leftovers, write_file
from gpt2_accel.runtime.processes import on_main_process

LOSS_TYPES = ("sigmoid", "sigmoid_norm")


class Preferences:
    """The objective, and a callback of the same run: `train(config, objective=p, callbacks=[p])`.

    The reward of an answer is beta · log(p / q), where p is its probability, given the prompt, by
    the model, and q by the reference. The loss of a pair is -log sigmoid(reward of the chosen -
    reward of the rejected), equation 7 of the paper. `loss_type` "sigmoid_norm" divides each reward
    by the answer's tokens, as Tulu 3 does (Lambert et al., 2024, arXiv:2411.15124, equation 6).
    `nll` is the weight of a second term, the mean loss per token of the update's chosen answers.
    `start` is the directory of the model that the run starts from.

    Figures, means over pairs, without division by tokens: `reward_accuracy`, the share of pairs in
    which the chosen answer has the higher reward; `margin`, the difference of the rewards;
    `reward_chosen` and `reward_rejected`; with `nll` also `nll`, the second term without weight.

    Raises `ValueError` for another `loss_type`.
    """

    pairs = True

    def __init__(
        self, start: str | Path, *, beta: float = 0.1, loss_type: str = "sigmoid", nll: float = 0.0
    ):
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}")
        self.beta = beta
        self.loss_type = loss_type
        self.nll = nll
        mark = on_main_process(lambda: weights_digest(Path(start)))
        self.prefix = f"reference-{mark[:16]}-"  # `file`'s name begins with it
        self.file = ""  # file name of the reference's log-probabilities
        self.reference: dict[str, torch.Tensor] = {}  # split -> log-probabilities, (pairs, 2)
        self.trim = False  # a compiled model would compile again for each length

    def __call__(
        self, model: torch.nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the mean loss of the pairs of a micro-batch, and the figures."""
        figures = self.measure(model, batch)
        means = {name: values.mean() for name, values in figures.items() if name != "counted"}
        return means.pop("loss"), means

    def measure(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns the loss and the figures of each pair, (B,).

        The pairs are from the training split in training, otherwise from the validation split,
        where `nll` divides the loss of each pair by the tokens of its own chosen answer. In
        training a mixture of experts adds its load balancing loss, which is then also a figure.
        """
        logs, tokens, balance = answer_log_probabilities(model, batch, self.trim)
        nats = -logs[:, 0]
        size: Any = tokens[:, 0]
        if batch.numbers is not None:  # None in a trial of the memory
            if model.training and self.nll:
                size = self.chosen_tokens()
            split = "train" if model.training else "val"
            logs = logs - self.reference[split][batch.numbers]
        rewards = self.beta * logs
        scores = rewards / tokens if self.loss_type == "sigmoid_norm" else rewards
        chosen, rejected = rewards.detach().unbind(dim=1)
        figures = {
            "loss": -F.logsigmoid(scores[:, 0] - scores[:, 1]),
            "counted": torch.ones_like(chosen),
            "reward_accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }
        if self.nll:
            figures["nll"] = nats / size
            figures["loss"] = figures["loss"] + self.nll * figures["nll"]
        if balance is not None:
            added, figures["aux_loss"] = balance
            figures["loss"] = figures["loss"] + added
        return figures

    def chosen_tokens(self) -> float:
        """Returns the mean number of tokens of the chosen answers of this update's pairs."""
        run = self.run
        loader = run.train_loader
        samples = loader.samples(run.schedule.first(run.step), run.schedule.sequences(run.step))
        targets = loader.read(samples).targets[:, : loader.sequence_length // 2]
        return int((targets != -100).sum()) / len(samples)

    # The callback

    def state_dict(self) -> dict[str, str]:
        return {"reference": self.file}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Raises `ValueError` if the run began from another model."""
        self.file = state["reference"]
        if not self.file.startswith(self.prefix):
            raise ValueError(
                "the run began from a model with other weights: give that by --model, or choose "
                "another --output_dir"
            )

    def on_train_begin(self, run: Run) -> None:
        """Reads the reference's log-probabilities, or computes them before the first update.

        Raises `ValueError` if they are missing or damaged at a resume: the model is no longer the
        reference.
        """
        accelerator = run.accelerator
        self.run = run
        self.trim = accelerator.state.dynamo_plugin.backend.value.lower() == "no"
        if not run.step:
            precision = accelerator.mixed_precision
            self.file = f"{self.prefix}{precision}-{run.config.dtype}.safetensors"
        assert run.data.folder is not None  # only prepared data has pairs
        path = run.data.folder / self.file
        found = on_main_process(lambda: read_reference(path))
        if not found:
            if run.step:
                raise ValueError(
                    f"{path}, the log-probabilities of the model that the run began from, is "
                    "missing or damaged: resume with the --data_dir of that run, or start a new "
                    "run in another --output_dir"
                )
            found = tables = self.compute(run)
            if run.stopping:
                return

            def write() -> None:
                remove_leftovers(path.parent)
                write_file(path, save(tables, {"sha256": tables_digest(tables)}))

            on_main_process(write)
        for split, table in found.items():
            self.reference[split] = table.to(accelerator.device)

    def compute(self, run: Run) -> dict[str, torch.Tensor]:
        """Returns the log-probabilities of all answers by the current weights, without dropout.

        They are (pairs, 2) for each split. Sets `run.stopping` if a rank has to stop.
        """
        tables = {}
        train = run.train_loader
        for split, parts in (("train", run.data.train), ("val", run.data.val)):
            loader = EvalLoader(
                parts,
                batch_size=train.micro_batch_size,
                max_tokens=2**62,
                sequence_length=train.sequence_length,
                rank=train.rank,
                world_size=train.world_size,
            )
            title = f"reference, {split}"
            figures = per_window(
                run.accelerator, run.model, loader, self.log_probabilities, title, run.interrupted
            )
            if figures is None:
                run.stopping = True
                break
            tables[split] = torch.stack(list(figures.values()), dim=1)
        return tables

    def log_probabilities(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns the log-probabilities of both answers of each pair, (B,) each."""
        logs, _, _ = answer_log_probabilities(model, batch, self.trim)
        return {"chosen": logs[:, 0], "rejected": logs[:, 1]}


def answer_log_probabilities(
    model: torch.nn.Module, batch: Batch, trim: bool = False
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Returns the log-probabilities of the chosen and the rejected answers, and their tokens.

    Both are (B, 2). For a mixture of experts in training the third result is a pair of scalars: the
    amount that it adds to the loss, and its load balancing loss. `trim` leaves out the padding at
    the end that all answers have, but for a multiple of 64 tokens.
    """
    count, length = batch.input_ids.shape
    ids = batch.input_ids.view(2 * count, length // 2)
    targets = batch.targets.view(2 * count, length // 2)
    if trim:
        longest = int((targets != -100).any(dim=0).nonzero().max()) + 1
        kept = round_up(longest, 64)
        ids = ids[:, :kept]
        targets = targets[:, :kept]
    nats = model(ids, targets, reduction="none")
    balance = None
    if isinstance(nats, tuple):
        nats, figure = nats
        added = nats[0, -1]  # the last position has no target: only the added part
        balance = added, figure
        nats = nats - added
    logs = -nats.float().sum(dim=1)
    tokens = (targets != -100).sum(dim=1).clamp(min=1)
    return logs.view(count, 2), tokens.view(count, 2), balance


def read_reference(path: Path) -> dict[str, torch.Tensor]:
    """Returns the stored log-probabilities, empty if the file is missing or damaged."""
    try:
        with safe_open(path, "pt") as file:
            tables = {split: file.get_tensor(split) for split in file.keys()}
            expected = file.metadata()
    except (OSError, SafetensorError):
        return {}
    return tables if expected == {"sha256": tables_digest(tables)} else {}


def tables_digest(tables: dict[str, torch.Tensor]) -> str:
    """Returns the SHA-256 (hex) of the log-probabilities of the splits."""
    return sha256(b"".join(tables[s].numpy().tobytes() for s in sorted(tables))).hexdigest()

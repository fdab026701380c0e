"""Teach a chat model which of two answers is better: direct preference optimization (DPO).

    python recipes/chat_dpo.py --model runs/chat_sft --data pairs.jsonl
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/chat_dpo.py \\
        --data_dir data/pairs

Data: a file of pairs, with the fields `prompt`, `chosen` and `rejected`, which hold texts or lists
of messages; or a folder that `prepare_data.py chat --pairs` wrote. The loss counts the last answer
of each. A sequence is a pair, and an update has `--batch_size` pairs. The reference is the model
that the run starts from; its log-probabilities are computed once and stored beside the pairs.
Settings: SmolLM2-135M-Instruct's (Allal et al., 2025, arXiv:2502.02737), see docs/chat.md.
Expected: `train/loss` begins at ln 2 = 0.693 and falls; `train/margin` begins at 0 and grows.
"""

import math
from dataclasses import dataclass

from chat_sft import ChatSFT, fit_to_data, keep_settings, open_data

from gpt2_accel import cli
from gpt2_accel.config import check_ranges, derived, parse_config, setting
from gpt2_accel.rounding import round_up

EPOCHS = 2
BATCH = 32  # pairs
MICRO_BATCH = 4


@dataclass
class ChatDPO(ChatSFT):
    data: str | None = setting(None, "file of pairs: .jsonl, .json, .parquet or .csv")
    model: str | None = setting(None, "chat model to start from, also the reference")
    beta: float = setting(0.5, "penalty for deviating from the reference")
    loss_type: str = setting("sigmoid", "sigmoid, or sigmoid_norm: per token of an answer")
    nll: float = setting(0.0, "weight of the loss per token of the chosen answers, such as 0.2")
    batch_size: int | None = setting(None, "pairs per update, over all devices; default at most 32")
    max_length: int | None = setting(
        None, "leave out pairs with an answer of more tokens, the prompt included"
    )

    data_dir: str = "data/pairs"
    output_dir: str = "runs/chat_dpo"
    sequence_length: int | None = setting(None, "tokens per pair, as in the data; see max_length")
    micro_batch_size: int = derived("pairs per device and backward pass; default 4")
    max_steps: int = derived("updates; default 2 epochs")
    learning_rate: float = 1e-6
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, positive="batch_size max_length", above_zero="beta", not_negative="nll")


def fit_to_pairs(config: ChatDPO, processes: int) -> str:
    """Sets the settings that follow from the pairs and the number of processes, unless they are
    given; returns a line with the choice. Raises `ValueError` if the batch is given twice."""
    from gpt2_accel.data.shards import read_manifest

    manifest = read_manifest(config.data_dir)
    length = manifest["sequence_length"]
    pairs = manifest["splits"]["train"]["documents"]
    largest = min(BATCH, 2 ** int(math.log2(pairs)))
    batch = config.batch_size or round_up(largest, processes)
    tokens = batch * length
    if config.batch_size and "total_batch_size" not in config.given:
        config.total_batch_size = tokens  # also of a run that is resumed
    config.derive(total_batch_size=tokens, micro_batch_size=MICRO_BATCH)
    if config.batch_size and config.total_batch_size != tokens:
        raise ValueError(
            f"batch_size {batch} is {tokens} tokens per update, total_batch_size "
            f"{config.total_batch_size}: leave one out"
        )
    if config.max_steps is None:
        config.epochs = config.epochs or EPOCHS
    return fit_to_data(config, 1, processes, pretrained=True)


def main() -> None:
    config = parse_config(ChatDPO)
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.preferences import Preferences
    from gpt2_accel.runtime.processes import process_state
    from gpt2_accel.train import train

    reference = open_data(config, config.max_length, pairs=True)
    objective = Preferences(reference, beta=config.beta, loss_type=config.loss_type, nll=config.nll)
    processes = process_state().num_processes
    keep_settings(config, processes)
    process_state().print(fit_to_pairs(config, processes))
    train(config, objective=objective, callbacks=[objective])


if __name__ == "__main__":
    cli.run(main)

"""Checks that settings, data, model and checkpoint of a run fit together."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator

from gpt2_accel.config import PATHS, TrainConfig
from gpt2_accel.data.shards import (
    check_tokenizer,
    conversation_length,
    data_fingerprint,
    read_manifest,
)
from gpt2_accel.device import total_memory
from gpt2_accel.models import LanguageModel, ModelConfig
from gpt2_accel.runtime.processes import all_or_none, on_main_process
from gpt2_accel.tokenizer import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_same_settings(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises `ValueError` if this process has another setting than the main process. Paths may differ between nodes."""
    names = [field.name for field in fields(TrainConfig) if field.name not in PATHS]
    settings = {name: getattr(config, name) for name in names}
    expected = on_main_process(accelerator, lambda: settings)
    with all_or_none(accelerator):
        for name, value in settings.items():
            if value != expected.get(name):
                raise ValueError(
                    f"process {accelerator.process_index} has {name} {value!r}, the main process "
                    f"{expected.get(name)!r}: start all with the same settings"
                )


def check_optimizer(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises `ValueError` if the optimizer does not support a sharded model."""
    if config.optimizer == "muon" and accelerator.is_fsdp2:
        raise ValueError(
            "muon works on whole matrices, which FSDP2 shards: use --optimizer adamw, or a config without FSDP"
        )


def check_same_data(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises `ValueError` if a process sees other data than the main process."""
    expected = on_main_process(accelerator, lambda: data_fingerprint(config.data_dir))
    with all_or_none(accelerator):
        if data_fingerprint(config.data_dir) != expected:
            raise ValueError(
                f"process {accelerator.process_index} sees other data in {config.data_dir} than the main "
                "process: put --data_dir on a disk that all nodes share, or the same data on each"
            )


def check_data(config: TrainConfig, saved: dict, checkpoint: Path) -> None:
    """Raises `ValueError` if the data is not the checkpoint's, whose state is `saved`, unless `ignore_changes` is set."""
    if saved["data"] != data_fingerprint(config.data_dir) and not config.ignore_changes:
        raise ValueError(
            f"{config.data_dir} is not the data that {checkpoint} was trained on: give that data by "
            "--data_dir, or continue on this with --ignore_changes"
        )


def check_size(shape: ModelConfig) -> None:
    """Raises `ValueError` if the fp32 weights alone exceed the host's memory, in which they are initialized."""
    needed, available = 4 * shape.parameter_count, total_memory()
    if needed > available:
        raise ValueError(
            f"the weights of a model of {shape.parameter_count:,} parameters take {needed / 1e9:,.1f} GB, but "
            f"this machine has {available / 1e9:,.1f} GB: lower --n_layer, --n_embd or --n_positions"
        )


def check_fit(
    config: TrainConfig,
    model: LanguageModel,
    vocab_size: int,
    source: Path | None,
    own: "PreTrainedTokenizerBase | None",
) -> None:
    """Raises `ValueError` if the model does not fit the data's tokenizer of `vocab_size` tokens or the sequence length.

    `source` is the directory of the model, None for a new one, `own` its tokenizer."""
    rows = model.config.vocab_size
    expected = read_manifest(config.data_dir)["tokenizer"]["fingerprint"]
    same = own is not None and fingerprint(own) == expected
    # A published model may have more rows than its tokenizer has tokens, as Qwen3 has.
    if rows < vocab_size or (rows > vocab_size and not same):
        raise ValueError(
            f"{source} has a vocabulary of {rows}, but {config.data_dir} was tokenized with one of {vocab_size}: "
            "prepare the text with the model's tokenizer, in another --data_dir"
        )
    if own is not None and not config.ignore_changes:
        check_tokenizer(config.data_dir, own, source)
    length, n_positions = config.tokens_per_sequence, model.config.n_positions
    if length > n_positions:
        other = "choose another --init_from" if config.init_from else "raise --n_positions"
        raise ValueError(
            f"sequence_length ({length}) exceeds n_positions ({n_positions}): lower --sequence_length or {other}"
        )


def document_separator(data_dir: str) -> int:
    """Returns the token id that begins each document of the data. Raises `ValueError` if its tokenizer has none, or if it
    holds conversations."""
    if conversation_length(data_dir):
        raise ValueError(
            f"{data_dir} holds conversations, in which attention never crosses: leave out --document_mask, which is for "
            "text"
        )
    separator = read_manifest(data_dir)["tokenizer"]["end_of_text"]
    if separator is None:
        raise ValueError(
            f"document_mask needs a token that separates documents, but the tokenizer of {data_dir} has no "
            "<|endoftext|>: leave it out, or prepare the text with a BPE or bytes"
        )
    return separator

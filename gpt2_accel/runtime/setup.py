"""Builds the model, optimizer, data, evaluations and checkpoint state of a run, and checks that they fit together."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from gpt2_accel import kernels
from gpt2_accel.checkpoint.find import find_checkpoint, model_directory
from gpt2_accel.checkpoint.manifest import read_state
from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.checkpoint.writer import load_training_state
from gpt2_accel.config import AUTO, TrainConfig
from gpt2_accel.data.loader import EvalLoader, TrainLoader, open_split
from gpt2_accel.data.shards import (
    check_tokenizer,
    data_fingerprint,
    load_data_tokenizer,
    read_manifest,
    verify_data,
)
from gpt2_accel.device import total_memory
from gpt2_accel.estimate.auto_batch import fitting_batch_size
from gpt2_accel.evals.sources import read_items
from gpt2_accel.evals.tasks import Evaluation, prepare_task
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.generation.sampling import encode_prompt
from gpt2_accel.hf.convert import from_pretrained, local_directory
from gpt2_accel.models import LanguageModel, ModelConfig
from gpt2_accel.models.architectures import check_loaded, configured_shape
from gpt2_accel.optim import BatchSchedule, build_optimizer
from gpt2_accel.runtime.accelerator import prepare
from gpt2_accel.runtime.guard import AnomalyGuard, EarlyStopping
from gpt2_accel.runtime.processes import all_or_none, main_process_first, on_main_process
from gpt2_accel.runtime.trackers import run_identity
from gpt2_accel.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Settings that determine the order of the data. A checkpoint saves them with the position.
ORDER_SETTINGS = ("seed", "sequence_length")


@dataclass
class TrainState:
    """The state that training changes. A checkpoint holds all of it.

    `model` and `optimizer` are prepared by Accelerate. `step` is the number of updates done.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    guard: AnomalyGuard
    early_stopping: EarlyStopping
    step: int
    run_id: str


@dataclass
class TrainInputs:
    """The inputs that training only reads.

    `evaluations` are pairs of an interval in updates and an evaluation. `updates` is the length of the whole run; with
    a batch-size ramp it exceeds `max_steps`. `checkpoint` is the one that the run resumes from, None for a new run.
    """

    tokenizer: "PreTrainedTokenizerBase"
    schedule: BatchSchedule
    updates: int
    loader: TrainLoader
    evaluations: list[tuple[int, Evaluation]]
    checkpoint: Path | None


def setup(config: TrainConfig, accelerator: Accelerator) -> tuple[TrainState, TrainInputs]:
    """Builds the state and the inputs of a run; the state is loaded from the checkpoint if the run resumes.

    Sets `config.micro_batch_size` if it is `auto` or does not divide the batch. Writes nothing. Raises `ValueError` or
    `OSError` if settings, data and checkpoint cannot work together.
    """
    check_optimizer(config, accelerator)
    checkpoint = choose_checkpoint(config, accelerator)
    if config.verify_data:
        on_main_process(accelerator, lambda: verify_data(config.data_dir))
    check_same_data(config, accelerator)
    torch.manual_seed(config.seed)
    with all_or_none(accelerator):
        tokenizer = load_data_tokenizer(config.data_dir)
        for prompt in config.sample_prompts if config.sample_every else []:
            encode_prompt(tokenizer, prompt)  # raises for a bad prompt now, not at the first sample
        plain = build_model(config, len(tokenizer), checkpoint)
        plain.checkpoint_activations = config.checkpoint_activations
        if config.document_mask:
            plain.separator = document_separator(config.data_dir)
            # DDP splits compiled graphs to overlap its reductions, and cannot split those with FlexAttention.
            torch._dynamo.config.optimize_ddp = not kernels.choices.block_masks
    optimizer = build_optimizer(
        plain,
        config.optimizer,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
    )
    model, optimizer = prepare(accelerator, plain, optimizer)
    if config.micro_batch_size == AUTO:
        config.micro_batch_size = fitting_batch_size(config, accelerator, model)
    if note := config.fit_micro_batch(accelerator.num_processes):
        accelerator.print(note)
    with all_or_none(accelerator):
        loader, val_loader = build_loaders(config, accelerator)
    evaluations = build_evaluations(
        config, accelerator, unwrap(accelerator, model).config, tokenizer, val_loader
    )
    schedule = config.batch_schedule(accelerator.num_processes)
    guard, early_stopping = AnomalyGuard(config.spike_z), EarlyStopping(config.patience)
    step, run_id = 0, None
    if checkpoint is not None and not config.eval_only:
        saved = read_state(checkpoint)
        check_data(config, saved["data"], checkpoint)
        step, run_id = saved["step"], saved["run_id"]
        seen = sequences_seen(config, saved["position"], schedule.first(step), checkpoint)
        load_training_state(checkpoint, accelerator, optimizer)
        guard.load(saved["guard"])
        early_stopping.load(saved["guard"])
        schedule = config.batch_schedule(accelerator.num_processes, step, seen)
    run_id = on_main_process(accelerator, lambda: run_identity(config, checkpoint, run_id))
    updates = schedule.updates(config.max_steps)
    inputs = TrainInputs(tokenizer, schedule, updates, loader, evaluations, checkpoint)
    return TrainState(model, optimizer, guard, early_stopping, step, run_id), inputs


def choose_checkpoint(config: TrainConfig, accelerator: Accelerator) -> Path | None:
    """Returns the checkpoint to resume on all processes; the main process finds it and verifies its checksums.

    Raises the errors of `find_checkpoint`, and `FileNotFoundError` if another process does not see the checkpoint.
    """
    path = on_main_process(
        accelerator, lambda: find_checkpoint(config.resume_from, config.output_dir)
    )
    with all_or_none(accelerator):
        if path is not None and not path.exists():
            raise FileNotFoundError(
                f"process {accelerator.process_index} does not see {path}, from which the main process resumes: "
                "put --output_dir on a disk that all nodes share"
            )
    return path


def check_same_data(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises `ValueError` if a process sees other data than the main process."""
    expected = on_main_process(accelerator, lambda: data_fingerprint(config.data_dir))
    with all_or_none(accelerator):
        if data_fingerprint(config.data_dir) != expected:
            raise ValueError(
                f"process {accelerator.process_index} sees other data in {config.data_dir} than the main "
                "process: put --data_dir on a disk that all nodes share, or the same data on each"
            )


def sequences_seen(
    config: TrainConfig, position: dict[str, int] | None, expected: int, checkpoint: Path
) -> int:
    """Returns the number of sequences, of the current length, that the checkpoint's run had read.

    `position` comes from the checkpoint; it is None in release 0.1, and the result is then `expected`.

    Raises `ValueError` if one of `ORDER_SETTINGS` has changed and `ignore_changes` is not set.
    """
    if position is None:
        return expected
    for name in ORDER_SETTINGS:
        if position[name] != getattr(config, name) and not config.ignore_changes:
            raise ValueError(
                f"{checkpoint} was trained with --{name} {position[name]}, not {getattr(config, name)}, which "
                "changes the order of the data: resume with the former value, or with --ignore_changes"
            )
    return position["sequences"] * position["sequence_length"] // config.sequence_length


def check_data(config: TrainConfig, fingerprint: str, checkpoint: Path) -> None:
    """Raises `ValueError` if the data is not the checkpoint's and `ignore_changes` is not set."""
    if fingerprint != data_fingerprint(config.data_dir) and not config.ignore_changes:
        raise ValueError(
            f"{config.data_dir} is not the data that {checkpoint} was trained on: give that data by "
            "--data_dir, or continue on this with --ignore_changes"
        )


def build_model(config: TrainConfig, vocab_size: int, checkpoint: Path | None) -> LanguageModel:
    """Builds a new model, or loads the model of `checkpoint`, else of `config.init_from`.

    Raises `ValueError` if the model does not fit the data's tokenizer, the sequence length or the configured shape.
    """
    source = checkpoint or config.init_from
    if source is not None:
        source = local_directory(model_directory(source))
        model = from_pretrained(source, config.dropout)
    if config.init_from is None:
        shape = configured_shape(config, vocab_size)
        if source is None:
            check_size(shape)
            model = shape.build()
        elif model.config != shape and not config.ignore_changes:
            raise ValueError(
                f"{source} holds {model.config}, but the settings say {shape}: resume with the "
                "settings of the first run, which are in its config.yaml, or with --ignore_changes"
            )
    else:
        check_loaded(config, model.config)
    own = load_tokenizer(source) if source and (source / "tokenizer.json").exists() else None
    expected = read_manifest(config.data_dir)["tokenizer"]["fingerprint"]
    same = own is not None and fingerprint(own) == expected
    # A published model may have more rows than its tokenizer has tokens, as Qwen3 has.
    if model.config.vocab_size < vocab_size or (model.config.vocab_size > vocab_size and not same):
        raise ValueError(
            f"{source} has a vocabulary of {model.config.vocab_size}, but {config.data_dir} was "
            f"tokenized with one of {vocab_size}: prepare the text with the model's tokenizer, in "
            "another --data_dir"
        )
    if own is not None and not config.ignore_changes:
        check_tokenizer(config.data_dir, own, source)
    if config.sequence_length > model.config.n_positions:
        other = "choose another --init_from" if config.init_from else "raise --n_positions"
        raise ValueError(
            f"sequence_length ({config.sequence_length}) exceeds n_positions "
            f"({model.config.n_positions}): lower --sequence_length or {other}"
        )
    return model


def check_size(shape: ModelConfig) -> None:
    """Raises `ValueError` if the fp32 weights alone exceed the host's memory, in which they are initialized."""
    needed, available = 4 * shape.parameter_count, total_memory()
    if needed > available:
        raise ValueError(
            f"the weights of a model of {shape.parameter_count:,} parameters take {needed / 1e9:,.1f} GB, but "
            f"this machine has {available / 1e9:,.1f} GB: lower --n_layer, --n_embd or --n_positions"
        )


def document_separator(data_dir: str) -> int:
    """Returns the token id that begins each document of the data. Raises `ValueError` if its tokenizer has none."""
    separator = read_manifest(data_dir)["tokenizer"]["end_of_text"]
    if separator is None:
        raise ValueError(
            f"document_mask needs a token that separates documents, but the tokenizer of {data_dir} has no "
            "<|endoftext|>: leave it out, or prepare the text with a BPE or bytes"
        )
    return separator


def check_optimizer(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises `ValueError` if the optimizer does not support a sharded model."""
    if config.optimizer == "muon" and accelerator.is_fsdp2:
        raise ValueError(
            "muon works on whole matrices, which FSDP2 shards: use --optimizer adamw, or a config without FSDP"
        )


def build_loaders(
    config: TrainConfig, accelerator: Accelerator
) -> tuple[TrainLoader, EvalLoader | None]:
    """Builds the loaders of this rank's share of the data; the validation loader is None if nothing is evaluated.

    Raises the errors of `TokenStream`.
    """
    share = {
        "sequence_length": config.sequence_length,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "device": accelerator.device,
    }
    train_loader = TrainLoader(
        open_split(config.data_dir, "train"),
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        **share,
    )
    if not config.eval_every and not config.eval_only:
        return train_loader, None
    val_loader = EvalLoader(
        open_split(config.data_dir, "val"),
        batch_size=config.micro_batch_size,
        max_tokens=config.eval_tokens,
        **share,
    )
    return train_loader, val_loader


def build_evaluations(
    config: TrainConfig,
    accelerator: Accelerator,
    shape: ModelConfig,
    tokenizer: "PreTrainedTokenizerBase",
    val_loader: EvalLoader | None,
) -> list[tuple[int, Evaluation]]:
    """Returns the evaluations during training, each with its interval in updates. Raises `ValueError` for bad items."""
    evaluations: list[tuple[int, Evaluation]] = []
    if val_loader is not None:
        evaluations.append((config.eval_every, partial(validation_loss, loader=val_loader)))
    if config.hellaswag_every:
        with main_process_first():
            items = read_items("hellaswag", config.hellaswag_data)
        prepared = prepare_task(tokenizer, shape, "hellaswag", items)
        accelerator.print("\n".join(prepared.notes))
        evaluations += [(config.hellaswag_every, evaluate) for evaluate in prepared.evaluations]
    return evaluations

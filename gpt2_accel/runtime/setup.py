"""Builds the model, optimizer, data, evaluations and state of a run."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from gpt2_accel import kernels
from gpt2_accel.checkpoint.find import find_checkpoint, verified_directory
from gpt2_accel.checkpoint.manifest import read_state
from gpt2_accel.checkpoint.writer import load_training_state
from gpt2_accel.config import AUTO, TrainConfig
from gpt2_accel.data.loader import EvalLoader, TrainLoader, open_split
from gpt2_accel.data.shards import conversation_length, load_data_tokenizer
from gpt2_accel.estimate.auto_batch import fitting_batch_size
from gpt2_accel.evals import Evaluation
from gpt2_accel.evals.hellaswag import HellaSwag
from gpt2_accel.evals.items import hub_items, read_items
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.generation.sampling import Prompt, encode_prompt, user_turn
from gpt2_accel.hf.chat_template import extends, with_rows
from gpt2_accel.hf.convert import check_finite, from_pretrained, local_directory
from gpt2_accel.hf.hub import check_login, check_repo_id
from gpt2_accel.models import LanguageModel, ModelConfig
from gpt2_accel.models.architectures import check_loaded, configured_shape
from gpt2_accel.optim import build_optimizer
from gpt2_accel.runtime.accelerator import build_accelerator, prepare
from gpt2_accel.runtime.checks import (
    check_data,
    check_fit,
    check_optimizer,
    check_same_data,
    check_same_settings,
    check_size,
    document_separator,
)
from gpt2_accel.runtime.processes import all_or_none, main_process_first, on_main_process
from gpt2_accel.runtime.state import TrainState
from gpt2_accel.runtime.trackers import check_trackers, run_identity
from gpt2_accel.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class TrainInputs:
    """The inputs that training only reads.

    `evaluations` are pairs of an interval in updates and an evaluation. `prompts` are those of the samples, turns of a user
    if the data holds conversations. `updates` is the length of the whole run, other than `max_steps` after a resume with another batch size. `checkpoint` is the one that the run resumes from, None for a new run.
    """

    tokenizer: "PreTrainedTokenizerBase"
    updates: int
    loader: TrainLoader
    evaluations: list[tuple[int, Evaluation]]
    prompts: list[Prompt]
    checkpoint: Path | None


def start_accelerator(config: TrainConfig) -> Accelerator:
    """Builds the `Accelerator` of a run, after the checks that need none, and checks that all processes agree.

    Raises the errors of `build_accelerator`, and `ValueError` or `OSError` for trackers or a Hub that cannot be used.
    """
    if config.push_to_hub:
        check_repo_id(config.push_to_hub)
    check_trackers(config.report_to)
    accelerator = build_accelerator(config.deterministic)
    check_same_settings(config, accelerator)
    if config.push_to_hub:
        on_main_process(accelerator, check_login)
    return accelerator


def setup(config: TrainConfig, accelerator: Accelerator) -> tuple[TrainState, TrainInputs]:
    """Builds the state and the inputs of a run; the state is loaded from the checkpoint if the run resumes.

    Writes nothing. Raises `ValueError` or `OSError` if settings, data and checkpoint cannot work together.
    """
    check_optimizer(config, accelerator)
    checkpoint = choose_checkpoint(config, accelerator)
    check_same_data(config, accelerator)
    torch.manual_seed(config.seed)
    with all_or_none(accelerator):
        tokenizer = load_data_tokenizer(config.data_dir)
        conversations = conversation_length(config.data_dir) is not None
        prompts = [
            user_turn(prompt) if conversations else prompt for prompt in config.sample_prompts
        ]
        for prompt in prompts if config.sample_every else []:
            encode_prompt(tokenizer, prompt)  # raises for a bad prompt now, not at the first sample
        plain = build_model(config, tokenizer, checkpoint)
        plain.checkpoint_activations = config.checkpoint_activations
        if config.document_mask:
            plain.separator = document_separator(config.data_dir)
        if config.document_mask or conversations:
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
    size = config.micro_batch_size
    if size == AUTO:
        size = fitting_batch_size(config, accelerator, model, packed=conversations)
    size, note = config.fit_micro_batch(size, accelerator.num_processes)
    if note:
        accelerator.print(note)
    with all_or_none(accelerator):
        loader, val_loader = build_loaders(config, accelerator, size)
    evaluations = build_evaluations(config, accelerator, plain.config, tokenizer, val_loader)
    state = TrainState(config, accelerator.num_processes, model, optimizer)
    if checkpoint is not None:
        with all_or_none(accelerator):
            saved = read_state(checkpoint)
            check_data(config, saved, checkpoint)
            state.load_state_dict(saved, checkpoint)
            state.unevaluated = saved.get("val_loss") is None
        load_training_state(checkpoint, saved, accelerator, optimizer)
        accelerator.print(f"resumed from {checkpoint}")
    run_id = state.run_id
    state.run_id = on_main_process(accelerator, lambda: run_identity(config, checkpoint, run_id))
    updates = state.schedule.updates(config.max_steps)
    return state, TrainInputs(tokenizer, updates, loader, evaluations, prompts, checkpoint)


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


def build_model(
    config: TrainConfig, tokenizer: "PreTrainedTokenizerBase", checkpoint: Path | None
) -> LanguageModel:
    """Builds a new model, or loads the model of `checkpoint`, else of `config.init_from`.

    `tokenizer` is the data's. If it holds conversations, a loaded model gets rows for the tokens that it has in addition.

    Raises `ValueError` if the model does not fit the data's tokenizer, the sequence length or the configured shape.
    """
    source, own, vocab_size = checkpoint or config.init_from, None, len(tokenizer)
    if source is not None:
        unchecked = checkpoint is None  # `find_checkpoint` has checked a checkpoint to resume
        source = local_directory(verified_directory(source, unchecked, "use another checkpoint"))
        model = from_pretrained(source, config.dropout)
        check_finite(model, source)
        own = load_tokenizer(source) if (source / "tokenizer.json").exists() else None
        if own and conversation_length(config.data_dir) and not config.ignore_changes:
            if extends(tokenizer, own):
                model, own = with_rows(model, len(own), vocab_size), tokenizer
            elif fingerprint(own) != fingerprint(tokenizer):
                raise ValueError(
                    f"{config.data_dir} was prepared for a model with another tokenizer than {source} has: prepare the "
                    f"conversations again with --model {source}"
                )
    if config.init_from is None:
        shape = configured_shape(config, vocab_size)
        if source is None:
            check_size(shape)
            model = shape.build()
        elif model.config != shape and not config.ignore_changes:
            theirs, ours = different_fields(model.config, shape)
            raise ValueError(
                f"{source} holds {theirs}, but the settings say {ours}: resume with the former, or choose another "
                "--output_dir for a new model"
            )
    else:
        check_loaded(config, model.config)
    check_fit(config, model, vocab_size, source, own)
    return model


def different_fields(first: ModelConfig, second: ModelConfig) -> tuple[str, str]:
    """Returns the fields in which two shapes differ, of each as `name value, …`; of two architectures their names."""
    if type(first) is not type(second):
        return type(first).__name__, type(second).__name__
    pairs = zip(asdict(first).items(), asdict(second).values(), strict=True)
    changed = [(f"{name} {a}", f"{name} {b}") for (name, a), b in pairs if a != b]
    former, latter = map(", ".join, zip(*changed, strict=True))
    return former, latter


def build_loaders(
    config: TrainConfig, accelerator: Accelerator, micro_batch_size: int
) -> tuple[TrainLoader, EvalLoader | None]:
    """Builds the loaders of this rank's share of the data; the validation loader is None if nothing is evaluated.

    Raises the errors of `TokenStream`.
    """
    share = {
        "sequence_length": config.tokens_per_sequence,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "device": accelerator.device,
    }
    train_loader = TrainLoader(
        open_split(config.data_dir, "train"),
        micro_batch_size=micro_batch_size,
        seed=config.seed,
        **share,
    )
    if not config.eval_every:
        return train_loader, None
    val_loader = EvalLoader(
        open_split(config.data_dir, "val"),
        batch_size=micro_batch_size,
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
        if config.hellaswag_data:
            items = read_items(config.hellaswag_data)
        else:
            with main_process_first():
                items = hub_items("hellaswag", "--hellaswag_data FILE")
        hellaswag = HellaSwag(items, tokenizer, shape)
        accelerator.print("\n".join(hellaswag.notes))
        evaluations.append((config.hellaswag_every, hellaswag))
    return evaluations

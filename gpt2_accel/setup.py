"""Builds the model, optimizer, data, evaluations and callbacks of a run; checks that they fit."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from gpt2_accel import kernels
from gpt2_accel.callbacks import (
    Checkpoints,
    Evaluations,
    Figures,
    Kept,
    Profiler,
    Pushes,
    Samples,
    Trackers,
    check_callback,
)
from gpt2_accel.checkpoint.find import find_checkpoint, read_state
from gpt2_accel.config import PATHS, TrainConfig
from gpt2_accel.data.loader import Batch, EvalLoader, TrainLoader, open_split
from gpt2_accel.data.shards import (
    check_pairs,
    data_fingerprint,
    load_data_tokenizer,
    read_manifest,
    read_parts,
)
from gpt2_accel.estimate.memory import fitting_batch_size
from gpt2_accel.evals.core import Core, open_bundle
from gpt2_accel.evals.hellaswag import HellaSwag
from gpt2_accel.evals.items import hub_items, read_items
from gpt2_accel.evals.validation import Measure, token_losses, validation_loss
from gpt2_accel.first_model import NewModel, adapt, build_model, document_separator
from gpt2_accel.generation.sampling import Prompt, encode_prompt, user_turn
from gpt2_accel.hf.hub import check_push
from gpt2_accel.hf.hub_data import open_hub
from gpt2_accel.hf.lora import describe_lora
from gpt2_accel.models import LanguageModel, ModelConfig, skeleton
from gpt2_accel.models.any_model import AnyModel, documents_cross
from gpt2_accel.run import Loss, Objective, Run
from gpt2_accel.runtime.accelerator import prepare_model
from gpt2_accel.runtime.processes import all_or_none, main_process_first, on_main_process
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, added_bos
from gpt2_accel.tuning import remarks

CORE_ITEMS = 500  # items per task in training; nanochat has the same


def setup(
    config: TrainConfig,
    accelerator: Accelerator,
    model: "torch.nn.Module | NewModel | None",
    objective: Objective,
    optimizer: Callable[[LanguageModel, TrainConfig], torch.optim.Optimizer],
    callbacks: Sequence[Any],
) -> Run:
    """Builds a run, and loads its state if it resumes. `train` describes the arguments.

    Writes nothing. Raises `ValueError` or `OSError` if settings, data and checkpoint cannot work
    together.
    """
    for callback in callbacks:
        check_callback(callback)
    if config.push_to_hub:
        check_push(config.push_to_hub)
    checkpoint = on_main_process(lambda: find_checkpoint(config.resume_from, config.output_dir))
    pairs = getattr(objective, "pairs", False)
    with all_or_none():
        open_hub(config.data_dir)
        check_pairs(config.data_dir, wanted=pairs)
        manifest = read_manifest(config.data_dir)
        config.fit_data(manifest)
    check_agreement(config, accelerator, checkpoint)
    if checkpoint is not None and "residual_dtype" not in config.given:
        saved = read_state(checkpoint)["settings"]
        config.residual_dtype = saved.get("residual_dtype", "float32")  # of 0.5 it is fp32
    conversations = bool(manifest.get("sequence_length"))
    torch.manual_seed(config.seed)
    with all_or_none():
        tokenizer = load_data_tokenizer(config.data_dir)
        bos = added_bos(tokenizer) if config.init_from else []
        if checkpoint is not None:  # of 0.5 it has no record
            bos = read_state(checkpoint).get("bos", [])
        prompts = sample_prompts(config, tokenizer, conversations)
        plain = build_model(config, tokenizer, checkpoint, model)
        adapt(plain, config)
        if config.residual_dtype != "float32":
            if accelerator.mixed_precision == "bf16" and not isinstance(plain, AnyModel):
                plain.residual_dtype = torch.bfloat16
            elif "residual_dtype" in config.given:
                accelerator.print(
                    "--residual_dtype has no effect without --mixed_precision bf16, and on classes "
                    "of transformers"
                )
        if config.document_mask and not conversations:
            plain.separator = document_separator(config.data_dir, tokenizer)
        if config.document_mask or conversations:
            # DDP splits compiled graphs to overlap its reductions. It cannot split those with
            # FlexAttention.
            torch._dynamo.config.optimize_ddp = not kernels.choices.block_masks
    for remark in remarks(config):
        accelerator.print(remark)
    if isinstance(plain, AnyModel):
        accelerator.print(plain.config.note)
        if config.lora:
            accelerator.print(describe_lora(plain))
        packed = [m for _, m, _ in read_parts(config.data_dir) if m.get("packed", conversations)]
        if config.document_mask or (packed and not pairs):
            check_documents(plain, config, accelerator)
    empty = skeleton(plain)
    prepared, prepared_optimizer = prepare_model(accelerator, plain, optimizer(plain, config))
    measure = getattr(objective, "measure", token_losses)
    if accelerator.num_processes > 1:
        objective = through_prepared(objective, prepared)
    size = config.micro_batch_size
    if not size:  # `auto`
        saved = read_state(checkpoint).get("micro_batch") if checkpoint else None
        if saved and saved["processes"] == accelerator.num_processes:
            size = saved["size"]
        else:
            size = fitting_batch_size(
                config, accelerator, prepared, objective, packed=conversations
            )
        accelerator.print(f"micro_batch_size {size}: the largest that fits into memory")
    size, note = config.fit_micro_batch(size, accelerator.num_processes)
    if note:
        accelerator.print(note)
    with all_or_none():
        train_loader, val_loader = build_loaders(config, accelerator, size, bos)
    if bos and not conversations:
        accelerator.print(f"each window of text begins with {tokenizer.bos_token}")
    evaluations = build_evaluations(
        config, accelerator, plain.config, tokenizer, val_loader, measure
    )
    return Run(
        config,
        accelerator,
        prepared,
        prepared_optimizer,
        objective,
        measure,
        tokenizer,
        empty,
        train_loader,
        val_loader,
        list(callbacks) + default_callbacks(config, accelerator, evaluations, prompts, checkpoint),
        checkpoint,
    )


def sample_prompts(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, conversations: bool
) -> list[Prompt]:
    """Returns the prompts of the run's samples: texts, or the user's turns in conversations.

    Raises `ValueError` for a prompt that cannot be encoded, before the first sample.
    """
    prompts: list[Prompt] = []
    for text in config.sample_prompts:
        prompt = user_turn(text) if conversations else text
        if config.sample_every:
            encode_prompt(tokenizer, prompt)
        prompts.append(prompt)
    return prompts


def check_documents(model: AnyModel, config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises `ValueError` if a class of `transformers` does not keep documents in a row apart.

    The main process tries it, with the run's attention, compilation and activation checkpointing.
    """
    name = accelerator.state.dynamo_plugin.backend.value.lower()
    backend = None if name == "no" else name

    def crosses() -> bool:
        return documents_cross(model.config, config.checkpoint_activations, backend)

    if on_main_process(crosses):
        raise ValueError(
            f"{type(model.inner).__name__} does not keep documents apart: leave out "
            "--document_mask, or prepare the conversations again, for this model"
        )


def default_callbacks(
    config: TrainConfig,
    accelerator: Accelerator,
    evaluations: list[tuple[int, Callable[..., dict[str, float]]]],
    prompts: list[Prompt],
    checkpoint: Path | None,
) -> list[Any]:
    """Returns the callbacks that follow the user's callbacks, in the order of their calls."""
    callbacks: list[Any] = [Figures(), Evaluations(evaluations), Samples(prompts)]
    saved = read_state(checkpoint)["settings"] if checkpoint else {}
    if config.init_from or saved.get("init_from"):
        callbacks.append(Kept())
    if config.profile:
        name = f"trace-{accelerator.process_index}.json"
        callbacks.append(Profiler(config.profile, Path(config.output_dir, name)))
    if config.report_to:
        callbacks.append(Trackers(config.report_to))
    if config.push_to_hub:
        callbacks.append(Pushes())
    callbacks.append(Checkpoints())
    return callbacks


def through_prepared(objective: Objective, prepared: torch.nn.Module) -> Objective:
    """Returns the objective with a check that it calls the prepared model.

    DDP and FSDP average gradients by hooks of that model.
    """
    called = False

    def note_call(*_: Any) -> None:
        nonlocal called
        called = True

    prepared.register_forward_pre_hook(note_call)

    def checked(model: torch.nn.Module, batch: Batch) -> Loss:
        nonlocal called
        called = False
        result = objective(model, batch)
        if not called:
            raise ValueError(
                "the objective does not call the model that it gets: a module inside it computes "
                "without the other processes; call model(batch.input_ids)"
            )
        return result

    return checked


def check_agreement(config: TrainConfig, accelerator: Accelerator, checkpoint: Path | None) -> None:
    """Raises `ValueError` if the processes have different settings, data or checkpoints.

    Paths may differ between nodes.
    """
    values = {f.name: getattr(config, f.name) for f in fields(TrainConfig) if f.name not in PATHS}
    with all_or_none():
        values["data"] = data_fingerprint(config.data_dir)
    values["checkpoint"] = str(checkpoint) if checkpoint and checkpoint.exists() else None
    expected = on_main_process(lambda: values)
    with all_or_none():
        for name, value in values.items():
            if value != expected[name]:
                raise ValueError(
                    f"process {accelerator.process_index} has the {name} {value!r}, the main "
                    f"process {expected[name]!r}: start all with the same settings, and put "
                    "--data_dir and --output_dir on a disk that all nodes share"
                )


def build_loaders(
    config: TrainConfig, accelerator: Accelerator, micro_batch_size: int, bos: list[int]
) -> tuple[TrainLoader, EvalLoader | None]:
    """Builds the loaders of this rank's sequences, for training and validation.

    `bos` as in `read_window`. The second is None if nothing is evaluated. Raises `ValueError` if
    a split does not exist.
    """
    common = {
        "sequence_length": config.tokens_per_sequence,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "bos": bos,
    }
    train_loader = TrainLoader(
        open_split(config.data_dir, "train"),
        micro_batch_size=micro_batch_size,
        seed=config.seed,
        **common,
    )
    if not config.eval_every:
        return train_loader, None
    val_loader = EvalLoader(
        open_split(config.data_dir, "val"),
        batch_size=micro_batch_size,
        max_tokens=config.eval_tokens,
        **common,
    )
    return train_loader, val_loader


def build_evaluations(
    config: TrainConfig,
    accelerator: Accelerator,
    shape: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    val_loader: EvalLoader | None,
    measure: Measure,
) -> list[tuple[int, Callable[..., dict[str, float]]]]:
    """Returns pairs of an interval in updates and an evaluation.

    Raises `ValueError` for bad items.
    """
    evaluations: list[tuple[int, Callable[..., dict[str, float]]]] = []
    if val_loader is not None:
        validation = partial(validation_loss, loader=val_loader, measure=measure)
        evaluations.append((config.eval_every, validation))
    if config.hellaswag_every:
        file = config.hellaswag_data
        with main_process_first():
            items = read_items(file) if file else hub_items("--hellaswag_data FILE")
        hellaswag = HellaSwag(items, tokenizer, shape)
        accelerator.print("\n".join(hellaswag.notes))
        evaluations.append((config.hellaswag_every, hellaswag))
    if config.core_every:
        with main_process_first():
            bundle = open_bundle(config.core_data)
        evaluations.append((config.core_every, Core(bundle, tokenizer, shape, CORE_ITEMS)))
    return evaluations

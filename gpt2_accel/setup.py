"""Builds the model, optimizer, data, evaluations and callbacks of a run; checks that they fit."""

import sys
from collections.abc import Callable, Iterable
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
    Samples,
    Trackers,
    check_callback,
)
from gpt2_accel.checkpoint.find import find_checkpoint, read_state
from gpt2_accel.config import PATHS, TrainConfig
from gpt2_accel.data.loader import Batch, EvalLoader, TrainLoader
from gpt2_accel.data.source import Data, open_data
from gpt2_accel.estimate.memory import fitting_batch_size
from gpt2_accel.evals.core import Core, open_bundle
from gpt2_accel.evals.hellaswag import HellaSwag
from gpt2_accel.evals.items import hub_items, read_items
from gpt2_accel.evals.validation import Measure, token_losses, validation_loss
from gpt2_accel.first_model import NewModel, adapt, build_model, document_separator
from gpt2_accel.generation.sampling import Prompt, encode_prompt, user_turn
from gpt2_accel.hf.hub import check_push
from gpt2_accel.hf.lora import describe_lora
from gpt2_accel.lifecycle import open_logs
from gpt2_accel.models import LanguageModel, ModelConfig, skeleton
from gpt2_accel.models.any_model import AnyModel, documents_cross
from gpt2_accel.pushes import Pushes
from gpt2_accel.run import Evaluation, Gradients, Loss, Objective, Run
from gpt2_accel.runtime.accelerator import prepare_model
from gpt2_accel.runtime.processes import all_or_none, main_process_first, on_main_process
from gpt2_accel.saving import resume
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, added_bos
from gpt2_accel.tuning import remarks

CORE_ITEMS = 500  # items per task in training; nanochat has the same


def setup(
    config: TrainConfig,
    accelerator: Accelerator,
    data: "Data | Callable[[Any], Data] | None",
    model: "torch.nn.Module | NewModel | None",
    objective: Objective,
    gradients: Gradients,
    optimizer: Callable[[LanguageModel, TrainConfig], torch.optim.Optimizer],
    callbacks: Iterable[Any],
) -> Run:
    """Builds a run, and loads its state if it resumes. `train` describes the arguments.

    Writes nothing. Raises `ValueError` or `OSError` if settings, data and checkpoint cannot work
    together.
    """
    users = checked_callbacks(callbacks)
    parts: dict[str, Any] = {
        "objective": name_of(objective),
        "gradients": name_of(gradients),
        "optimizer": name_of(optimizer),
    }
    if config.push_to_hub or config.hub_revisions:
        check_push(config.push_to_hub or "")
    data, checkpoint, saved = find_data_and_checkpoint(config, accelerator, data, objective)
    torch.manual_seed(config.seed)
    with all_or_none():
        bos = added_bos(data.tokenizer) if config.init_from else []
        bos = saved.get("bos", bos)
        prompts = sample_prompts(config, data)
        plain = build_model(config, data, checkpoint, model)
        adapt(plain, config)
        set_stream(plain, config, accelerator)
        separate_documents(plain, config, data)
    describe_model(plain, config, accelerator, data)
    empty = skeleton(plain)
    prepared, prepared_optimizer = prepare_model(accelerator, plain, optimizer(plain, config))
    measure = getattr(objective, "measure", token_losses)
    if accelerator.num_processes > 1:
        objective = through_prepared(objective, prepared)
    size = choose_micro_batch(
        config, accelerator, prepared, objective, saved.get("micro_batch"), data
    )
    with all_or_none():
        train_loader, val_loader = build_loaders(config, accelerator, data, size, bos)
        train_loader.phases = phase_positions(config, accelerator, data, saved)
    if bos and data.sequence_length is None:
        accelerator.print(f"each window of text begins with {data.tokenizer.bos_token}")
    evaluations = build_evaluations(
        config, accelerator, plain.config, data.tokenizer, val_loader, measure
    )
    parts |= {
        "script": Path(sys.argv[0]).name,
        "model": name_of(type(plain)),
        "data": data.name if data.folder is None else "prepared",
        "callbacks": [name_of(type(callback)) for callback in users],
    }
    run = Run(
        config,
        accelerator,
        data,
        prepared,
        prepared_optimizer,
        objective,
        gradients,
        measure,
        empty,
        train_loader,
        val_loader,
        users + default_callbacks(config, accelerator, evaluations, prompts, saved),
        parts,
        checkpoint,
    )
    if checkpoint is not None:
        resume(run, checkpoint)
    open_logs(run)
    return run


def checked_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Returns the user's callbacks as a list. Raises `ValueError` for anything else."""
    if not isinstance(callbacks, Iterable):
        raise ValueError(f"callbacks is a {type(callbacks).__name__}: give a list of callbacks")
    users = list(callbacks)
    for callback in users:
        check_callback(callback)
    return users


def find_data_and_checkpoint(
    config: TrainConfig,
    accelerator: Accelerator,
    data: "Data | Callable[[Any], Data] | None",
    objective: Objective,
) -> tuple[Data, Path | None, dict[str, Any]]:
    """Returns the data of the run, the checkpoint to resume, or None, and its state, or {}.

    All ranks have the same. Settings that follow from them are set.
    """
    checkpoint = on_main_process(lambda: find_checkpoint(config.resume_from, config.output_dir))
    with all_or_none():
        data = find_data(config, data)
        data.check_pairs(wanted=getattr(objective, "pairs", False))
        config.fit_data(data)
    check_agreement(config, accelerator, data, checkpoint)
    saved = read_state(checkpoint) if checkpoint else {}
    return data, checkpoint, saved


def name_of(part: Any) -> str:
    """Returns the name of a class or a function, or of an object's class, with its module.

    A module that is started as a script has the name of its file. Raises `ValueError` for anything
    that cannot be called.
    """
    if not callable(part):
        raise ValueError(
            f"{part!r} is not a function, as objective, gradients and optimizer are: see "
            "docs/change.md"
        )
    kind = part if hasattr(part, "__qualname__") else type(part)
    module = kind.__module__
    if module == "__main__":
        module = Path(sys.argv[0]).name
    return f"{module}:{kind.__qualname__}"


def find_data(config: TrainConfig, data: "Data | Callable[[Any], Data] | None") -> Data:
    """Returns the data of the run: the user's, or the prepared data of `data_dir`.

    Raises `ValueError` if the user gives something else.
    """
    if data is None:
        return open_data(config.data_dir)
    if callable(data):
        data = data(config)
    if not isinstance(data, Data):
        raise ValueError(
            f"data is a {type(data).__name__}: give a Data, or a function of the settings that "
            "returns one"
        )
    return data


def set_stream(model: LanguageModel, config: TrainConfig, accelerator: Accelerator) -> None:
    """Sets the dtype of the residual stream, or prints that it has no effect."""
    if config.residual_dtype == "float32":
        return
    if accelerator.mixed_precision == "bf16" and not isinstance(model, AnyModel):
        model.residual_dtype = torch.bfloat16
    elif "residual_dtype" in config.given:
        accelerator.print(
            "--residual_dtype has no effect without --mixed_precision bf16, and on classes of "
            "transformers"
        )


def separate_documents(model: LanguageModel, config: TrainConfig, data: Data) -> None:
    """Sets the token that separates documents, if attention stays inside them."""
    if config.document_mask and not data.chat:
        model.separator = document_separator(data)
    if config.document_mask or data.chat or data.packed:
        # DDP splits compiled graphs to overlap its reductions. It cannot split those with
        # FlexAttention.
        torch._dynamo.config.optimize_ddp = not kernels.choices.block_masks


def describe_model(
    model: LanguageModel, config: TrainConfig, accelerator: Accelerator, data: Data
) -> None:
    """Prints remarks on settings and model.

    Raises `ValueError` if a class of `transformers` does not keep documents in a row apart.
    """
    for remark in remarks(config):
        accelerator.print(remark)
    if isinstance(model, AnyModel):
        accelerator.print(model.config.note)
        if config.lora:
            accelerator.print(describe_lora(model))
        if config.document_mask or data.packed:
            check_documents(model, config, accelerator)


def choose_micro_batch(
    config: TrainConfig,
    accelerator: Accelerator,
    model: torch.nn.Module,
    objective: Objective,
    saved: dict[str, int] | None,
    data: Data,
) -> int:
    """Returns the micro-batch in sequences per device, and prints it if it is not as given.

    `saved` is that of the run that is resumed.
    """
    size = config.micro_batch_size
    if not size:  # `auto`
        if saved and saved["processes"] == accelerator.num_processes:
            size = saved["size"]
        else:
            documents = data.chat or data.packed
            size = fitting_batch_size(config, accelerator, model, objective, documents)
        accelerator.print(f"micro_batch_size {size}: the largest that fits into memory")
    size, note = config.fit_micro_batch(size, accelerator.num_processes)
    if note:
        accelerator.print(note)
    return size


def sample_prompts(config: TrainConfig, data: Data) -> list[Prompt]:
    """Returns the prompts of the run's samples: texts, or the user's turns in conversations.

    Raises `ValueError` for a prompt that cannot be encoded, before the first sample.
    """
    prompts: list[Prompt] = []
    for text in config.sample_prompts:
        prompt = user_turn(text) if data.chat else text
        if config.sample_every:
            encode_prompt(data.tokenizer, prompt)
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
    evaluations: list[tuple[int, Evaluation]],
    prompts: list[Prompt],
    saved: dict[str, Any],
) -> list[Any]:
    """Returns the callbacks that follow the user's callbacks, in the order of their calls.

    `saved` is the state of the checkpoint that the run resumes, or empty.
    """
    callbacks: list[Any] = [Figures(), Evaluations(evaluations), Samples(prompts)]
    if config.init_from or (saved and saved["settings"].get("init_from")):
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


def check_agreement(
    config: TrainConfig, accelerator: Accelerator, data: Data, checkpoint: Path | None
) -> None:
    """Raises `ValueError` if the processes have different settings, data or checkpoints.

    Paths may differ between nodes.
    """
    values = {f.name: getattr(config, f.name) for f in fields(TrainConfig) if f.name not in PATHS}
    values["data"] = data.fingerprint
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
    config: TrainConfig,
    accelerator: Accelerator,
    data: Data,
    micro_batch_size: int,
    bos: list[int],
) -> tuple[TrainLoader, EvalLoader | None]:
    """Builds the loaders of this rank's sequences, for training and validation.

    `bos` as in `Windows`. The second is None if nothing is evaluated. Raises `ValueError` if
    a split does not exist.
    """
    common = {
        "sequence_length": config.tokens_per_sequence,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "bos": bos,
    }
    train_loader = TrainLoader(
        data.split("train"),
        micro_batch_size=micro_batch_size,
        seed=config.seed,
        **common,
    )
    if not config.eval_every:
        return train_loader, None
    val_loader = EvalLoader(
        data.split("val"),
        batch_size=micro_batch_size,
        max_tokens=config.eval_tokens,
        **common,
    )
    return train_loader, val_loader


def phase_positions(
    config: TrainConfig, accelerator: Accelerator, data: Data, saved: dict[str, Any]
) -> list[tuple[int, list[float]]]:
    """Returns the positions from which on later weights of a mixture hold, and these weights.

    They are shares of the run as it was started first: a longer run keeps them.
    """
    end = config.batch_schedule(accelerator.num_processes).end
    starts = saved.get("phases") or [round(share * end) for share, _ in data.phases]
    return [(start, weights) for start, (_, weights) in zip(starts, data.phases, strict=True)]


def build_evaluations(
    config: TrainConfig,
    accelerator: Accelerator,
    shape: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    val_loader: EvalLoader | None,
    measure: Measure,
) -> list[tuple[int, Evaluation]]:
    """Returns pairs of an interval in updates and an evaluation.

    Raises `ValueError` for bad items.
    """
    evaluations: list[tuple[int, Evaluation]] = []
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

"""Builds the model, optimizer, data and evaluations of a run, and checks that they fit together."""

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

from gpt2_accel import kernels
from gpt2_accel.callbacks import (
    Checkpoints,
    Evaluations,
    Figures,
    Profiler,
    Pushes,
    Samples,
    Trackers,
    check_callback,
)
from gpt2_accel.checkpoint.find import find_checkpoint, verified_directory
from gpt2_accel.config import ARCHITECTURES, AUTO, PATHS, TrainConfig
from gpt2_accel.data.loader import Batch, EvalLoader, TrainLoader, open_split
from gpt2_accel.data.remote import RemoteShards
from gpt2_accel.data.shards import (
    check_pairs,
    check_tokenizer,
    data_fingerprint,
    load_data_tokenizer,
    read_manifest,
    read_parts,
)
from gpt2_accel.estimate.dry_run import dry_run
from gpt2_accel.estimate.memory import fitting_batch_size
from gpt2_accel.evals import Evaluation
from gpt2_accel.evals.core import Core, open_bundle
from gpt2_accel.evals.hellaswag import HellaSwag
from gpt2_accel.evals.items import hub_items, read_items
from gpt2_accel.evals.validation import Measure, token_losses, validation_loss
from gpt2_accel.generation.sampling import Prompt, encode_prompt, user_turn
from gpt2_accel.hf.chat_template import extends, with_rows
from gpt2_accel.hf.convert import (
    check_finite,
    configured_shape,
    from_pretrained,
    is_custom,
    load_weights,
    local_directory,
)
from gpt2_accel.hf.hub import check_push
from gpt2_accel.hf.hub_data import open_hub
from gpt2_accel.hf.lora import add_lora, describe_lora, set_base_dtype
from gpt2_accel.models import (
    LanguageModel,
    ModelConfig,
    Trainable,
    check_loaded,
    skeleton,
)
from gpt2_accel.models.any_model import AnyModel, documents_cross
from gpt2_accel.optim import build_optimizer
from gpt2_accel.run import Objective, Run
from gpt2_accel.runtime.accelerator import prepare
from gpt2_accel.runtime.processes import all_or_none, main_process_first, on_main_process
from gpt2_accel.tokenizer import document_marks, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NewModel = Callable[[TrainConfig, "PreTrainedTokenizerBase"], Trainable]
"""(settings, the tokenizer of the data) -> a model."""
CORE_ITEMS = 500  # of each task, in a run; as nanochat has it


def setup(
    config: TrainConfig,
    accelerator: Accelerator,
    model: "Trainable | NewModel | None",
    objective: Objective,
    optimizer: Callable[[LanguageModel, TrainConfig], torch.optim.Optimizer] | None,
    callbacks: Sequence[Any],
) -> Run:
    """Builds a run; its state is loaded from the checkpoint if it resumes. The arguments are those of `train`.

    Writes nothing. Raises `ValueError` or `OSError` if settings, data and checkpoint cannot work together.
    """
    for callback in callbacks:
        check_callback(callback)
    if config.push_to_hub:
        check_push(config.push_to_hub)
    checkpoint = on_main_process(lambda: find_checkpoint(config.resume_from, config.output_dir))
    with all_or_none():
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        remote = open_hub(config.data_dir, accelerator.local_process_index, ranks)
        pairs = getattr(objective, "pairs", False)
        check_pairs(config.data_dir, wanted=pairs)
        config.rows = 2 if pairs else 1
        config.set_length(read_manifest(config.data_dir)["splits"]["train"]["tokens"])
    check_agreement(config, accelerator, checkpoint)
    torch.manual_seed(config.seed)
    with all_or_none():
        tokenizer = load_data_tokenizer(config.data_dir)
        conversations = bool(read_manifest(config.data_dir).get("sequence_length"))
        prompts = [
            user_turn(prompt) if conversations else prompt for prompt in config.sample_prompts
        ]
        for prompt in prompts if config.sample_every else []:
            encode_prompt(tokenizer, prompt)  # raises for a bad prompt now, not at the first sample
        plain = build_model(config, tokenizer, checkpoint, model)
        adapt(plain, config)
        if config.document_mask and not conversations:
            plain.separator = document_separator(config.data_dir, tokenizer)
        if config.document_mask or conversations:
            # DDP splits compiled graphs to overlap its reductions, and cannot split those with FlexAttention.
            torch._dynamo.config.optimize_ddp = not kernels.choices.block_masks
    if isinstance(plain, AnyModel):
        accelerator.print(plain.config.note)
        if config.lora:
            accelerator.print(describe_lora(plain))
        packed = [m for _, m, _ in read_parts(config.data_dir) if m.get("packed", conversations)]
        if config.document_mask or (packed and not pairs):
            check_documents(plain, config, accelerator)
    empty = skeleton(plain)
    prepared, own_optimizer = prepare(accelerator, plain, (optimizer or configured)(plain, config))
    measure = getattr(objective, "measure", token_losses)
    if accelerator.num_processes > 1:
        objective = through_prepared(objective, prepared)
    size = config.micro_batch_size
    if size == AUTO:
        size = fitting_batch_size(config, accelerator, prepared, objective, packed=conversations)
    size, note = config.fit_micro_batch(size, accelerator.num_processes)
    if note:
        accelerator.print(note)
    with all_or_none():
        loader, val_loader = build_loaders(config, accelerator, size, remote)
    evaluations = build_evaluations(
        config, accelerator, plain.config, tokenizer, val_loader, measure
    )
    return Run(
        config,
        accelerator,
        prepared,
        own_optimizer,
        objective,
        measure,
        tokenizer,
        empty,
        loader,
        val_loader,
        [*callbacks, *own_callbacks(config, accelerator, evaluations, prompts)],
        checkpoint,
    )


def adapt(model: LanguageModel, config: TrainConfig) -> None:
    """Makes a model compute as the settings say. Raises `ValueError` for a setting that it does not have."""
    dtype = getattr(torch, config.dtype)
    if config.lora:
        set_base_dtype(model, dtype)
    else:
        model.to(dtype)
    model.checkpoint_activations = config.checkpoint_activations
    if config.router_aux_loss is not None:
        if not getattr(model, "aux_coefficient", 0):
            raise ValueError(
                "the model has no load balancing loss of experts: leave out --router_aux_loss"
            )
        model.aux_coefficient = config.router_aux_loss


def check_documents(model: AnyModel, config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises `ValueError` if a class of `transformers` does not keep the documents of a row apart, with the run's attention,
    compilation and activation checkpointing. The main process tries it."""
    plugin = accelerator.state.dynamo_plugin
    compiled = plugin.backend != DynamoBackend.NO
    backend = plugin.backend.value.lower() if compiled else None
    if on_main_process(
        lambda: documents_cross(model.config, config.checkpoint_activations, backend)
    ):
        raise ValueError(
            f"{type(model.inner).__name__} does not keep documents apart: leave out --document_mask, or prepare the "
            "conversations again, for this model"
        )


def is_dry_run(config: TrainConfig) -> bool:
    """Prints the estimate that `--dry_run` asks for, if it is set; returns whether it is.

    It needs no Accelerator: the planned hardware may be that of another machine.
    """
    if config.dry_run and int(os.environ.get("RANK", 0)) == 0:
        print(dry_run(config))
    return bool(config.dry_run)


def configured(model: LanguageModel, config: TrainConfig) -> torch.optim.Optimizer:
    """Builds the optimizer that the settings describe, of the parameters that are trained."""
    optimizer = build_optimizer(
        model,
        config.optimizer,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(0.9, config.beta2),
    )
    for group in optimizer.param_groups if config.lora else []:
        names = zip(group["param_names"], group["params"], strict=True)
        group["param_names"] = [name for name, parameter in names if parameter.requires_grad]
        group["params"] = [p for p in group["params"] if p.requires_grad]
    return optimizer


def own_callbacks(
    config: TrainConfig,
    accelerator: Accelerator,
    evaluations: list[tuple[int, Evaluation]],
    prompts: list[Prompt],
) -> list[Any]:
    """Returns the callbacks that follow the user's, in the order of their calls."""
    found: list[Any] = [Figures(), Evaluations(evaluations), Samples(prompts)]
    if config.profile:
        name = f"trace-{accelerator.process_index}.json"
        found.append(Profiler(config.profile, Path(config.output_dir, name)))
    if config.report_to:
        found.append(Trackers(config.report_to))
    if config.push_to_hub:
        found.append(Pushes())
    return [*found, Checkpoints()]


def through_prepared(objective: Objective, prepared: torch.nn.Module) -> Objective:
    """Returns the objective with a check that it calls the prepared model: the hooks of DDP and FSDP are on that."""
    called: list[bool] = []
    prepared.register_forward_pre_hook(lambda *_: called.append(True))

    def checked(
        model: torch.nn.Module, batch: Batch
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        called.clear()
        found = objective(model, batch)
        if not called:
            raise ValueError(
                "the objective does not call the model that it gets: a module inside it computes without the other "
                "processes; call model(batch.input_ids)"
            )
        return found

    return checked


def check_agreement(config: TrainConfig, accelerator: Accelerator, checkpoint: Path | None) -> None:
    """Raises `ValueError` if a process has other settings or other data than the main process, or does not see the
    checkpoint to resume. Paths may differ between nodes."""
    found = {f.name: getattr(config, f.name) for f in fields(TrainConfig) if f.name not in PATHS}
    with all_or_none():
        found["data"] = data_fingerprint(config.data_dir)
    found["checkpoint"] = str(checkpoint) if checkpoint and checkpoint.exists() else None
    expected = on_main_process(lambda: found)
    with all_or_none():
        for name, value in found.items():
            if value != expected[name]:
                raise ValueError(
                    f"process {accelerator.process_index} has the {name} {value!r}, the main process {expected[name]!r}: "
                    "start all with the same settings, and put --data_dir and --output_dir on a disk that all nodes share"
                )


def build_model(
    config: TrainConfig,
    tokenizer: "PreTrainedTokenizerBase",
    checkpoint: Path | None,
    given: "Trainable | NewModel | None",
) -> LanguageModel:
    """Builds a new model, or loads the model of `checkpoint`, else of `config.init_from`. `given` is the user's, which gets
    their weights.

    `tokenizer` is the data's. Raises `ValueError` if the model does not fit it, the sequence length or the configured shape.
    """
    source = checkpoint or config.init_from
    if config.lora and (source is None or given is not None):
        raise ValueError(
            "--lora trains an adapter of a published or trained model: name it by --init_from"
        )
    if given is not None and not isinstance(given, torch.nn.Module):
        given = given(config, tokenizer)
    wanted = config.architecture
    if given is not None and wanted in ARCHITECTURES and given.config.architecture != wanted:
        raise ValueError(
            f"--architecture {wanted} is not that of the given model, {given.config.architecture}: leave it out"
        )
    if source is None:
        model = given or configured_shape(config, len(tokenizer)).build()
    else:
        # `find_checkpoint` has checked a checkpoint to resume.
        directory = verified_directory(source, checkpoint is None, "use another checkpoint")
        merge = not (config.lora and checkpoint)  # an adapter to start from is part of the base
        model = load_model(config, tokenizer, Path(local_directory(directory)), given, merge)
    n_positions = model.config.n_positions
    config.fit_positions(n_positions)
    length = config.tokens_per_row
    if length > n_positions:
        other = "choose another --init_from" if config.init_from else "raise --n_positions"
        raise ValueError(
            f"sequence_length ({length}) exceeds n_positions ({n_positions}): lower --sequence_length or {other}"
        )
    return model


def load_model(
    config: TrainConfig,
    tokenizer: "PreTrainedTokenizerBase",
    source: Path,
    given: LanguageModel | None,
    merge: bool,
) -> LanguageModel:
    """Loads the model of a directory, or its weights into the `given` model. If the data holds conversations, it gets rows for the tokens that the data's
    `tokenizer` has in addition.

    Raises `ValueError` if it does not fit the tokenizer or the settings."""
    if given is None and is_custom(source):  # of changed code, which only the user has
        given = configured_shape(config, len(tokenizer)).build()
    if given is not None:
        model = given
        load_weights(model, source)
    else:
        lora = bool(config.lora)
        model = from_pretrained(
            source,
            0.0 if lora and "dropout" not in config.given else config.dropout,
            attention=config.attn_implementation,
            reason="--lora" if lora else None,
            merge=merge,
        )
    rows: Sequence[int] = ()
    check_finite(model, source)
    if (source / "tokenizer.json").exists() and not config.ignore_changes:
        own = load_tokenizer(source)
        packed = read_manifest(config.data_dir).get("sequence_length")
        if given is None and packed and extends(tokenizer, own):
            rows = range(len(own), len(tokenizer))
            model = with_rows(model, len(own), len(tokenizer))
        else:
            check_tokenizer(config.data_dir, own, source)
    # A published model may have more rows than its tokenizer has tokens, as Qwen3 has.
    if model.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"{source} has a vocabulary of {model.config.vocab_size}, but {config.data_dir} was tokenized with one of "
            f"{len(tokenizer)}: prepare the text with the model's tokenizer, in another --data_dir"
        )
    if given is not None:
        return model
    if config.lora and not model.adapter:
        local = Path(config.init_from).is_dir()
        add_lora(model, config, rows, str(source.resolve()) if local else config.init_from)
    if config.init_from is not None:
        check_loaded(config, model.config)
    elif not config.ignore_changes:
        wanted = shape_values(configured_shape(config, len(tokenizer)))
        found = shape_values(model.config)
        differing = [
            f"{name} {found[name]} instead of {value}"
            for name, value in wanted.items()
            if name in found and found[name] != value
        ]
        if differing:
            raise ValueError(
                f"{source} has {', '.join(differing)}: resume with the original values, or choose "
                "another --output_dir for a new model"
            )
    return model


def shape_values(shape: ModelConfig) -> dict[str, Any]:
    """Returns the values by which shapes are compared, by name; of a class of `transformers` those of its `config.json`."""
    values = {field.name: getattr(shape, field.name) for field in fields(shape) if field.compare}
    own = values.pop("values", {})
    return {"architecture": shape.architecture} | values | own


def document_separator(data_dir: str, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Returns the token id that separates the documents of the data. Raises `ValueError` if none
    does, or an unknown token's, as in data of 0.4, or if the parts of a mixture have different
    ones."""
    found = {part["tokenizer"]["end_of_text"] for _, part, _ in read_parts(data_dir)}
    begin, end = document_marks(tokenizer)
    if len(found) > 1 or not found <= set(begin + end):
        raise ValueError(
            f"document_mask needs a token that separates all documents, which those of {data_dir} do not have: leave it "
            "out, or prepare the text with a tokenizer that has <|endoftext|>, BOS or EOS"
        )
    return found.pop()


def build_loaders(
    config: TrainConfig,
    accelerator: Accelerator,
    micro_batch_size: int,
    remote: RemoteShards | None,
) -> tuple[TrainLoader, EvalLoader | None]:
    """Builds the loaders of this rank's share of the data; the validation loader is None if nothing is evaluated.

    Raises the errors of `TokenStream`.
    """
    share = {
        "sequence_length": config.tokens_per_sequence,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
    }
    train_loader = TrainLoader(
        open_split(config.data_dir, "train", remote),
        micro_batch_size=micro_batch_size,
        seed=config.seed,
        **share,
    )
    if not config.eval_every:
        return train_loader, None
    val_loader = EvalLoader(
        open_split(config.data_dir, "val", remote),
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
    measure: Measure,
) -> list[tuple[int, Evaluation]]:
    """Returns the evaluations during training, each with its interval in updates. Raises `ValueError` for bad items."""
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
        core = Core(bundle, tokenizer, shape, limit=CORE_ITEMS)
        evaluations.append((config.core_every, core))
    return evaluations

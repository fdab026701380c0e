"""Builds the model, optimizer, data, evaluations and state of a run, and checks that they fit together."""

import secrets
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from gpt2_accel import kernels
from gpt2_accel.checkpoint.find import find_checkpoint, verified_directory
from gpt2_accel.checkpoint.manifest import read_state
from gpt2_accel.checkpoint.writer import load_training_state
from gpt2_accel.config import AUTO, PATHS, TrainConfig
from gpt2_accel.data.loader import EvalLoader, TrainLoader, open_split
from gpt2_accel.data.shards import (
    check_tokenizer,
    conversation_length,
    data_fingerprint,
    load_data_tokenizer,
    read_manifest,
)
from gpt2_accel.device import total_memory
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
from gpt2_accel.runtime.guard import AnomalyGuard, EarlyStopping
from gpt2_accel.runtime.processes import all_or_none, main_process_first, on_main_process
from gpt2_accel.runtime.trackers import check_trackers
from gpt2_accel.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainState:
    """The state that training changes.

    `model` and `optimizer` are prepared by Accelerate. `step` is the number of updates done, `schedule` the sequences of
    each update, `guard` and `early_stopping` what they have seen, and `run_id` the run's id in the trackers. `unevaluated`
    says that the checkpoint of a resume has no validation loss. `processes` is the number of processes. Raises the errors
    of `TrainConfig.batch_schedule`.
    """

    def __init__(
        self,
        config: TrainConfig,
        processes: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ):
        self._config, self._processes = config, processes
        # The settings that determine the order of the data.
        self._order = {"seed": config.seed, "sequence_length": config.tokens_per_sequence}
        self.model, self.optimizer = model, optimizer
        self.schedule = config.batch_schedule(processes)
        self.guard = AnomalyGuard(config.spike_z)
        self.early_stopping = EarlyStopping(config.patience)
        self.step, self.run_id = 0, None
        self.unevaluated = False

    def state_dict(self) -> dict:
        """Returns the state beside the tensors, for a checkpoint.

        `position` is the number of sequences read and the settings that determine their order."""
        return {
            "step": self.step,
            "position": {"sequences": self.schedule.first(self.step), **self._order},
            "guard": self.guard.state() | self.early_stopping.state(),
            "run_id": self.run_id,
        }

    def load_state_dict(self, saved: dict, source: Path) -> None:
        """Restores the state from `saved`, the `state.json` of the checkpoint `source`. The schedule continues from its
        position.

        Raises `ValueError` if the data or a setting that determines its order has changed, unless `ignore_changes` is
        set."""
        config, position = self._config, saved["position"]
        if not config.ignore_changes:
            if saved["data"] != data_fingerprint(config.data_dir):
                raise ValueError(
                    f"{config.data_dir} is not the data that {source} was trained on: give that data by "
                    "--data_dir, or continue on this with --ignore_changes"
                )
            for name, value in self._order.items():
                if position[name] != value:
                    raise ValueError(
                        f"{source} was trained with --{name} {position[name]}, not {value}, which changes the order of "
                        "the data: resume with the former value, or with --ignore_changes"
                    )
        seen = position["sequences"] * position["sequence_length"] // config.tokens_per_sequence
        self.step, self.run_id = saved["step"], saved["run_id"]
        self.unevaluated = saved["val_loss"] is None
        self.guard.load(saved["guard"])
        self.early_stopping.load(saved["guard"])
        self.schedule = config.batch_schedule(self._processes, self.step, seen)


@dataclass
class TrainInputs:
    """The inputs that training only reads.

    `evaluations` are pairs of an interval in updates and an evaluation. `prompts` are those of the samples, turns of a user
    if the data holds conversations. `updates` is the length of the whole run, other than `max_steps` after a resume with
    another batch size. `checkpoint` is the one that the run resumes from, None for a new run; `resumes_here` says that it
    is in the run's own folder.
    """

    tokenizer: "PreTrainedTokenizerBase"
    updates: int
    loader: TrainLoader
    evaluations: list[tuple[int, Evaluation]]
    prompts: list[Prompt]
    checkpoint: Path | None
    resumes_here: bool


def start_accelerator(config: TrainConfig) -> Accelerator:
    """Builds the `Accelerator` of a run, after the checks that need none, and checks that all processes have the same
    settings. Paths may differ between nodes.

    Raises the errors of `build_accelerator`, and `ValueError` or `OSError` for trackers or a Hub that cannot be used.
    """
    if config.push_to_hub:
        check_repo_id(config.push_to_hub)
    check_trackers(config.report_to)
    accelerator = build_accelerator(config.deterministic)
    names = [field.name for field in fields(TrainConfig) if field.name not in PATHS]
    settings = {name: getattr(config, name) for name in names}
    expected = on_main_process(accelerator, lambda: settings)
    with all_or_none(accelerator):
        for name, value in settings.items():
            if value != expected[name]:
                raise ValueError(
                    f"process {accelerator.process_index} has {name} {value!r}, the main process "
                    f"{expected[name]!r}: start all with the same settings"
                )
    if config.push_to_hub:
        on_main_process(accelerator, check_login)
    return accelerator


def setup(config: TrainConfig, accelerator: Accelerator) -> tuple[TrainState, TrainInputs]:
    """Builds the state and the inputs of a run; the state is loaded from the checkpoint if the run resumes.

    Writes nothing. Raises `ValueError` or `OSError` if settings, data and checkpoint cannot work together.
    """
    if config.optimizer == "muon" and accelerator.is_fsdp2:
        raise ValueError(
            "muon works on whole matrices, which FSDP2 shards: use --optimizer adamw, or a config without FSDP"
        )
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
        betas=(0.9, config.beta2),
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
    resumes_here = branches = False
    if checkpoint is not None:
        with all_or_none(accelerator):
            saved = read_state(checkpoint)
            state.load_state_dict(saved, checkpoint)
        load_training_state(checkpoint, saved, accelerator, optimizer)
        accelerator.print(f"resumed from {checkpoint}")
        resumes_here = checkpoint.resolve().parent == Path(config.output_dir).resolve()
        branches = not resumes_here and (checkpoint.parent / "run.json").exists()
    if branches or state.run_id is None:  # a branch of another run is a run of its own
        state.run_id = secrets.token_hex(4)
    state.run_id = on_main_process(accelerator, lambda: state.run_id)
    updates = state.schedule.updates(config.max_steps)
    inputs = TrainInputs(tokenizer, updates, loader, evaluations, prompts, checkpoint, resumes_here)
    return state, inputs


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
    if config.init_from is not None:
        check_loaded(config, model.config)
    else:
        shape = configured_shape(config, vocab_size)
        if source is None:
            needed, available = 4 * shape.parameter_count, total_memory()
            if needed > available:
                raise ValueError(
                    f"the fp32 weights of {shape.parameter_count:,} parameters take {needed / 1e9:,.1f} GB, but this "
                    f"machine has {available / 1e9:,.1f} GB: lower --n_layer, --n_embd or --n_positions"
                )
            model = shape.build()
        elif model.config != shape and not config.ignore_changes:
            raise ValueError(
                f"{source} holds {differences(model.config, shape)}, but the settings say "
                f"{differences(shape, model.config)}: resume with the former, or choose another --output_dir for a new model"
            )
    check_fit(config, model, vocab_size, source, own)
    return model


def differences(shape: ModelConfig, other: ModelConfig) -> str:
    """Returns the fields of a shape that another has with other values, as `name value, …`."""
    own, others = ({"architecture": each.architecture, **asdict(each)} for each in (shape, other))
    changed = [name for name in own if name in others and own[name] != others[name]]
    return ", ".join(f"{name} {own[name]}" for name in changed)


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

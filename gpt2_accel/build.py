"""What a run is built of: its model and its data, checked against each other."""

from functools import partial
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from gpt2_accel.config import TrainConfig
from gpt2_accel.convert import from_pretrained, local_directory
from gpt2_accel.data.loader import EvalLoader, TrainLoader, open_split
from gpt2_accel.data.shards import data_fingerprint, read_manifest, verify_data
from gpt2_accel.evals.sources import read_items
from gpt2_accel.evals.tasks import Evaluation, prepare_task
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.launch import is_sharded
from gpt2_accel.model import GPT, GPTConfig
from gpt2_accel.optim import BatchSchedule
from gpt2_accel.tokenizer import fingerprint, load_data_tokenizer, load_tokenizer


def check_data(config: TrainConfig, fingerprint: str, checkpoint: Path) -> None:
    """Raises `ValueError` if the data is not what the checkpoint was trained on."""
    if fingerprint != data_fingerprint(config.data_dir) and not config.ignore_changes:
        raise ValueError(
            f"{config.data_dir} is not the data that {checkpoint} was trained on: give that by --data_dir, "
            "or --ignore_changes to go on with this"
        )


def build_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    """The data's tokenizer. Raises `FileNotFoundError` or `ValueError` if there is no data."""
    read_manifest(config.data_dir)
    return load_data_tokenizer(config.data_dir)


def build_model(config: TrainConfig, vocab_size: int, checkpoint: Path | None) -> GPT:
    """A new model, or the one of the checkpoint, or of `config.init_from`.

    Raises `ValueError` if it does not fit the data's tokenizer or the sequence length, or if the
    checkpoint's model is not the configured one.
    """
    source = checkpoint or config.init_from
    if source is not None:
        source = local_directory(source)
        model = from_pretrained(source, config.dropout)
    if config.init_from is None:
        names = ("n_positions", "n_layer", "n_head", "n_embd", "bias", "dropout")
        shape = GPTConfig(vocab_size, **{name: getattr(config, name) for name in names})
        if source is None:
            model = GPT(shape)
        elif model.config != shape and not config.ignore_changes:
            raise ValueError(
                f"{source} holds {model.config}, but the settings say {shape}: resume with the "
                "settings of the first run, which are in its config.yaml, or with --ignore_changes"
            )
    if model.config.vocab_size != vocab_size:
        raise ValueError(
            f"{source} has a vocabulary of {model.config.vocab_size}, but {config.data_dir} was "
            f"tokenized with one of {vocab_size}: prepare the text with the model's tokenizer, in "
            "another --data_dir"
        )
    if source and (source / "tokenizer.json").exists() and not config.ignore_changes:
        expected = read_manifest(config.data_dir)["tokenizer"]["fingerprint"]
        if fingerprint(load_tokenizer(source)) != expected:
            raise ValueError(
                f"{config.data_dir} was tokenized with another tokenizer than that of {source}: prepare "
                "the text with the model's tokenizer, in another --data_dir"
            )
    if config.sequence_length > model.config.n_positions:
        raise ValueError(
            f"sequence_length ({config.sequence_length}) exceeds n_positions "
            f"({model.config.n_positions}): lower the one or raise the other"
        )
    return model


def document_separator(data_dir: str) -> int:
    """The token that begins each document of the data. Raises `ValueError` if it has none."""
    separator = read_manifest(data_dir)["tokenizer"]["end_of_text"]
    if separator is None:
        raise ValueError(
            f"document_mask needs data whose documents are separated, but the tokenizer of {data_dir} has "
            "no <|endoftext|>: leave it out, or prepare the text with a BPE or bytes"
        )
    return separator


def check_optimizer(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises `ValueError` if the optimizer cannot work on the shards of a model."""
    if config.optimizer == "muon" and is_sharded(accelerator):
        raise ValueError(
            "muon works on whole matrices, and FSDP2 leaves each process a part of them: use --optimizer "
            "adamw, or a config without FSDP"
        )


def build_batch_schedule(config: TrainConfig, accelerator: Accelerator) -> BatchSchedule:
    """How many sequences each update has.

    Raises `ValueError` if an update does not fall into whole micro-batches on these processes.
    """
    processes = accelerator.num_processes
    tokens = config.micro_batch_size * config.sequence_length * processes
    if config.total_batch_size % tokens:
        nearest = max(1, round(config.total_batch_size / tokens)) * tokens
        raise ValueError(
            f"total_batch_size ({config.total_batch_size} tokens) is not a multiple of "
            f"micro_batch_size x sequence_length x processes = {config.micro_batch_size} x "
            f"{config.sequence_length} x {processes} = {tokens}: try {nearest}"
        )
    if config.ramp_tokens and config.ramp_start % processes:
        raise ValueError(
            f"ramp_start ({config.ramp_start} sequences) is not a multiple of the {processes} processes: "
            "set one that is, and that divides the full batch"
        )
    return BatchSchedule(
        config.total_batch_size // config.sequence_length,
        config.ramp_start,
        config.ramp_tokens // config.sequence_length,
    )


def build_loaders(
    config: TrainConfig, accelerator: Accelerator
) -> tuple[TrainLoader, EvalLoader | None]:
    """This rank's share of the training and the validation data, None where nothing is evaluated.

    Raises what `TokenStream` raises, and `ValueError` for data that is damaged, if it is to be verified.
    """
    if config.verify_data:
        verify_data(config.data_dir)
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
    gpt_config: GPTConfig,
    tokenizer: PreTrainedTokenizerBase,
    val_loader: EvalLoader | None,
) -> list[tuple[int, Evaluation]]:
    """What is evaluated on the way, each with the updates between. Raises `ValueError` for bad items."""
    evaluations: list[tuple[int, Evaluation]] = []
    if val_loader is not None:
        evaluations.append((config.eval_every, partial(validation_loss, loader=val_loader)))
    if config.hellaswag_every:
        with accelerator.main_process_first():
            items = read_items("hellaswag", config.hellaswag_data)
        prepared = prepare_task(tokenizer, gpt_config, "hellaswag", items)
        accelerator.print("\n".join(prepared.notes))
        evaluations += [(config.hellaswag_every, evaluate) for evaluate in prepared.evaluations]
    return evaluations

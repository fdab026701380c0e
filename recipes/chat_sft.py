"""Fine-tune a base model on conversations, so that it answers: supervised fine-tuning (SFT).

    python recipes/chat_sft.py --model runs/chat_base --data my_chats.jsonl
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/chat_sft.py --data_dir data/chat

Data: a file of conversations, which are packed into windows in the run's folder, or, for more data,
a folder that `prepare_data.py chat` wrote. Only what the assistant writes counts in the loss, and
the token that ends its turn. Attention stays inside a conversation. Batch, updates, learning rate
and intervals follow from the data and the model, see `fit_to_data`, and are printed; what you give
wins. docs/chat.md names the grids behind them. Expected: answers that end by themselves. A model of
124M answers in whole sentences, and knows little.
"""

import math
import os
import shlex
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.data.shards import DATA_MANIFEST, read_manifest, read_parts
from gpt2_accel.runtime.files import digest
from gpt2_accel.runtime.recipe_command import recipe_command

FEW = 8  # conversations
EPOCHS = 3
MOST_EPOCHS = 20
FEWEST_UPDATES = 900
WARMUP_SHARE = 0.1
UPDATES_PER_EPOCH = 300
# The best rate falls with the width, as in µP (Yang et al., 2022, arXiv:2203.03466).
RATE_TIMES_WIDTH = 0.4
# Times the rate of full fine-tuning (Schulman et al., 2025, LoRA Without Regret; measured in
# docs/chat.md).
LORA_RATE = 10
LONGEST_WINDOW = 1024  # tokens
MICRO_BATCH = 8192
LARGEST_BATCH = 65536
LONGEST_INTERVAL = 250  # updates between evaluations


@dataclass
class ChatSFT(TrainConfig):
    data: str | None = setting(None, "file of conversations: .jsonl, .json or .parquet")
    model: str | None = setting(None, "model to fine-tune; default that of --data_dir")

    data_dir: str = "data/chat"
    output_dir: str = "runs/chat_sft"
    resume_from: str | None = "latest"
    init_from: str | None = setting(None, "the same as model")
    sequence_length: int | None = setting(
        None, "tokens of a window; with --data_dir that of the data"
    )

    micro_batch_size: int | None = setting(None, "windows per device and backward pass")
    total_batch_size: int | None = setting(None, "tokens per update, over all devices")
    max_steps: int | None = setting(None, "updates; default 3 to 20 epochs")

    learning_rate: float | None = setting(None, "peak learning rate")
    warmup_steps: int | None = setting(None, "updates of linear warmup; default a tenth of all")
    min_lr_ratio: float = 0.0

    eval_every: int | None = setting(None, "updates between evaluations; default an epoch")
    sample_every: int | None = setting(None, "updates between samples; default a third of all")
    sample_prompts: list[str] = setting(
        ["Who are you?", "What is the capital of France?"], "questions that the samples answer"
    )
    save_every: int | None = setting(None, "updates between checkpoints; default as eval_every")
    keep_best: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.init_from = self.init_from or self.model
        if self.data and not self.init_from:
            raise ValueError("--data needs the model to fine-tune: give it by --model")


def prepare_file(config: ChatSFT, longest: int | None, pairs: bool = False) -> None:
    """Packs the conversations of `--data` into windows in a folder of the run, unless they are
    there; sets `data_dir`.

    `longest` are the tokens of the longest conversation, None for a default; with `pairs` the file
    holds pairs of answers. The folder's name is a hash of all that it depends on. Raises
    `ValueError` if that has changed since the run began, and the errors of `prepare_conversations`.
    """
    from gpt2_accel.checkpoint.find import list_checkpoints, verified_directory
    from gpt2_accel.data.conversations import prepare_conversations, summary
    from gpt2_accel.hf.chat_template import chat_tokenizer
    from gpt2_accel.hf.convert import local_directory, read_config
    from gpt2_accel.models.any_model import keeps_documents_apart
    from gpt2_accel.tokenizer import fingerprint

    file = Path(config.data)
    model = config.init_from
    run_dir = Path(config.output_dir)
    if "data_dir" in config.given:
        raise ValueError("--data and --data_dir both give conversations: leave one out")
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is not a file: give one, or prepare a folder or a data set of the Hub by "
            f"{recipe_command('prepare_data')} chat{' --pairs' if pairs else ''}"
        )
    directory = local_directory(verified_directory(model, hint="use another model"))
    tokenizer = chat_tokenizer(directory)
    shape = read_config(directory)
    if longest and longest > shape.n_positions:
        raise ValueError(
            f"{longest} tokens are more than the {shape.n_positions} positions of {model}: give "
            "fewer"
        )
    content = digest(file), fingerprint(tokenizer), tokenizer.chat_template, longest
    folder = run_dir / f"data-{sha256(repr(content).encode()).hexdigest()[:8]}"
    config.data_dir = str(folder)
    if (folder / DATA_MANIFEST).is_file():
        return
    if list_checkpoints(run_dir) and not config.ignore_changes:
        raise ValueError(
            f"{file}, the model or the length of a window has changed since the run in {run_dir} "
            "began: choose another --output_dir for a new run, or continue it with "
            "--ignore_changes"
        )
    manifest = prepare_conversations(
        [str(file)],
        tokenizer,
        folder,
        sequence_length=longest or min(LONGEST_WINDOW, shape.n_positions),
        shorten=longest is None,
        packed=pairs or keeps_documents_apart(shape),
        pairs=pairs,
        source=str(file),
        model=model,
    )
    print(*summary(manifest), sep="\n")


def find_model(config: ChatSFT, pairs: bool = False) -> None:
    """Sets the model to that of the prepared data, unless it is given. `pairs` says that it should
    hold pairs of answers.

    Raises `FileNotFoundError` if the data or its model is not there, `ValueError` if it holds no
    conversations.
    """
    folder = Path(config.data_dir)
    command = recipe_command("prepare_data", "chat")
    command += " --pairs" * pairs
    if not (folder / DATA_MANIFEST).is_file():
        raise FileNotFoundError(
            f"{folder} holds no prepared conversations: give a file by --data and its model by "
            f"--model, or make them by {command} FILE_OR_HUB_ID --model MODEL --sequence_length "
            f"1024 --data_dir {shlex.quote(str(folder))}"
        )
    if not read_manifest(folder).get("sequence_length"):
        raise ValueError(f"{folder} holds text, not conversations: prepare some by {command}")
    if config.init_from is None:
        parts = read_parts(folder)
        folder, name = next((part, m["model"]) for part, m, _ in parts if "model" in m)
        if (folder / name).is_dir():
            name = os.path.relpath(folder / name)
        elif name.startswith(".") or name.count("/") != 1:
            raise FileNotFoundError(
                f"{folder / name}, the model that {folder} was prepared for, is not there: give it "
                "by --model"
            )
        config.init_from = name


def fit_to_data(config: ChatSFT, width: int, processes: int) -> str:
    """Sets what follows from the data, the model's width and the number of processes, where it is
    not given.

    Returns a line that says what was chosen. It is the same for the same data, so a resumed run
    continues exactly.
    """
    from gpt2_accel.data.conversations import plural

    manifest = read_manifest(config.data_dir)
    train = manifest["splits"]["train"]
    length = config.sequence_length = config.sequence_length or manifest["sequence_length"]
    windows = train["tokens"] // length

    def default(name: str, value: float) -> float:
        if getattr(config, name) is None:
            setattr(config, name, value)
        return getattr(config, name)

    batch = min(windows / UPDATES_PER_EPOCH, LARGEST_BATCH / length)
    batch = 2 ** int(math.log2(max(1, batch)))
    batch = -(-batch // processes) * processes
    batch = default("total_batch_size", batch * length) // length
    default("micro_batch_size", max(1, min(batch // processes, MICRO_BATCH // length)))
    epoch = math.ceil(windows / max(1, batch))
    if config.max_steps is None:
        longer = min(MOST_EPOCHS, math.ceil(FEWEST_UPDATES / epoch))
        epochs = config.epochs or max(EPOCHS, longer)
        config.max_steps = max(1, round(epochs * epoch))
        config.epochs = None
    steps = config.max_steps
    default("warmup_steps", round(WARMUP_SHARE * steps))
    rate = RATE_TIMES_WIDTH / width * (LORA_RATE if config.lora else 1)
    default("learning_rate", float(f"{rate:.2g}"))
    parts = math.ceil(epoch / LONGEST_INTERVAL)  # of a long epoch
    every = default("eval_every", math.ceil(epoch / parts))
    default("sample_every", max(every, math.ceil(steps / EPOCHS)))
    default("save_every", every)
    few = train["documents"] is not None and train["documents"] < FEW
    warning = f"; too few conversations to learn from: {train['documents']}" if few else ""
    return (
        f"{steps:,} updates of {batch:,} x {length:,} tokens, {steps * batch / windows:.3g} epochs "
        f"of {plural(windows, 'window')}, learning rate {config.learning_rate:g}, warmup "
        f"{config.warmup_steps:,}, evaluation every {every:,}{warning}"
    )


def closing_line(config: ChatSFT) -> str:
    """Returns where the models are after training."""
    line = f"\nThe model is in {config.output_dir}"
    if Path(config.output_dir, "best").exists():
        line += f", the one of the lowest validation loss in {config.output_dir}/best"
    return f"{line}."


def main() -> None:
    config = parse_config(ChatSFT)
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.checkpoint.find import verified_directory
    from gpt2_accel.hf.convert import local_directory, read_config
    from gpt2_accel.runtime.processes import main_process_first, process_state
    from gpt2_accel.train import train

    with main_process_first():
        if config.data:
            prepare_file(config, config.sequence_length)
            config.data = None  # config.yaml names the prepared folder
        find_model(config)
        width = read_config(local_directory(verified_directory(config.init_from))).n_embd
    process_state().print(fit_to_data(config, width, process_state().num_processes))
    if train(config):
        process_state().print(closing_line(config))


if __name__ == "__main__":
    cli.run(main)

"""Fine-tune a base model on conversations, so that it answers: supervised fine-tuning (SFT).

    python recipes/chat_sft.py --model runs/chat_base --data my_chats.jsonl
    accelerate launch --config_file accelerate_configs/8xa100.yaml recipes/chat_sft.py \\
        --data_dir data/chat

Data: a file of conversations, which the recipe packs into windows in the run's folder; or, for more
data, a folder that `prepare_data.py chat` wrote. The loss counts the assistant's messages and the
token that ends each of them. Attention stays inside a conversation. Batch size, number of updates,
learning rate and intervals follow from the data and the model (`fit_to_data`), unless you give
them; the recipe prints them. docs/chat.md has the measurements behind them. Expected: answers that
end by themselves. A model of 124M parameters answers in full sentences, but knows little.
"""

import math
import os
import shlex
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, derived, parse_config, setting
from gpt2_accel.rounding import round_up
from gpt2_accel.runtime.files import digest
from gpt2_accel.runtime.recipe_command import recipe_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEW = 8  # conversations: too few to learn from
FEW_HELD_OUT = 5  # too few to measure by
EPOCHS = 3
WARMUP_SHARE = 0.1  # share of the updates
UPDATES_PER_EPOCH = 300
# Of a model that was trained here on few tokens. The best rate falls with the width, as in µP (Yang
# et al., 2022, arXiv:2203.03466).
RATE_TIMES_WIDTH = 0.4
LORA_RATE = 10  # rates of full fine-tuning (Schulman et al., 2025, LoRA Without Regret)
FEWEST_UPDATES = 900
MOST_EPOCHS = 20
# Of a pretrained model, which forgets with each update; its rate is in gpt2_accel/tuning.py.
PRETRAINED_UPDATES = 100
PRETRAINED_EPOCHS = 10
PRETRAINED_BATCH = 256  # tokens, at least
LONGEST_WINDOW = 1024  # tokens
MICRO_BATCH = 8192  # tokens
LARGEST_BATCH = 65536  # tokens
LONGEST_INTERVAL = 250  # updates between evaluations


@dataclass
class ChatSFT(TrainConfig):
    data: str | None = setting(None, "file of conversations: .jsonl, .json, .parquet or .csv")
    model: str | None = setting(None, "model to fine-tune; default: the model of --data_dir")

    data_dir: str = "data/chat"
    output_dir: str = "runs/chat_sft"
    resume_from: str | None = "latest"
    init_from: str | None = setting(None, "the same as model")
    sequence_length: int | None = setting(
        None, "tokens per window; prepared data has its own length"
    )

    micro_batch_size: int = derived("windows per device and backward pass")
    total_batch_size: int = derived("tokens per update, over all devices")
    max_steps: int = derived("updates; default 3 to 20 epochs")

    learning_rate: float = derived("peak learning rate")
    warmup_steps: int = derived("updates of linear warmup; default a tenth of max_steps")
    min_lr_ratio: float = 0.0

    eval_every: int = derived("updates between evaluations; default an epoch, at most 250")
    sample_every: int = derived("updates between samples; default a third of max_steps")
    sample_prompts: list[str] = setting(
        ["Who are you?", "What is the capital of France?"], "questions that the samples answer"
    )
    save_every: int = derived("updates between checkpoints; default eval_every")
    keep_best: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.init_from = self.init_from or self.model


def prepares_beside(config: TrainConfig, inputs: tuple, names: str, pairs: bool = False) -> bool:
    """Sets `data_dir` to a folder in the run's folder; returns whether it has to be prepared.

    Its name is a hash of `inputs`, which `names` are. Raises `ValueError` if `data_dir` is given or
    if the inputs have changed since the run began. With `ignore_changes` it is prepared again, but
    not for `pairs`: their reference is the model before the run.
    """
    from gpt2_accel.checkpoint.find import list_checkpoints
    from gpt2_accel.data.shards import DATA_MANIFEST

    run_dir = Path(config.output_dir)
    if "data_dir" in config.given:
        raise ValueError("--data and --data_dir both give the data: leave one out")
    folder = run_dir / f"data-{sha256(repr(inputs).encode()).hexdigest()[:8]}"
    config.data_dir = str(folder)
    if (folder / DATA_MANIFEST).is_file():
        return False
    if list_checkpoints(run_dir) and (pairs or not config.ignore_changes):
        hint = "" if pairs else ", or continue with --ignore_changes"
        raise ValueError(
            f"{names} has changed since the run in {run_dir} began: choose another --output_dir "
            f"for a new run{hint}"
        )
    return True


def chat_model(
    model: str | Path, length: int | None, option: str, chatml: bool = False
) -> tuple["PreTrainedTokenizerBase", int, bool]:
    """Returns a model's tokenizer with a chat template, its number of positions, and whether it
    keeps several conversations in a window apart.

    Raises `ValueError` if `length`, the value of `option`, exceeds the positions, and what
    `chat_tokenizer` raises.
    """
    from gpt2_accel.hf.chat_template import chat_tokenizer
    from gpt2_accel.hf.convert import read_config
    from gpt2_accel.models.any_model import keeps_documents_apart

    tokenizer = chat_tokenizer(model, chatml)
    shape = read_config(model)
    if length and length > shape.n_positions:
        raise ValueError(
            f"{option} {length} exceeds the {shape.n_positions} positions of {model}: lower it"
        )
    return tokenizer, shape.n_positions, keeps_documents_apart(shape)


def prepare_file(config: ChatSFT, file: Path, longest: int | None, pairs: bool) -> None:
    """Packs the conversations of `file` into windows, in a folder inside the run's folder, and sets
    `data_dir` to it. With `pairs` the file holds pairs of answers.

    `longest` is the largest number of tokens of a conversation, None for the default. The folder's
    name is a hash of its input; windows that are already there are used again. Raises `ValueError`
    if the input has changed since the run began or cannot be trained on.
    """
    from gpt2_accel.checkpoint.find import verified_directory
    from gpt2_accel.data.chat_tokens import prompt_tokens
    from gpt2_accel.data.conversations import prepare_conversations, summary, with_padding
    from gpt2_accel.generation.sampling import user_turn
    from gpt2_accel.hf.convert import model_tokenizer
    from gpt2_accel.tokenizer import fingerprint

    model = config.init_from
    if model is None:
        raise ValueError("--data needs the model to fine-tune: give it by --model")
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is not a file: give one, or prepare a folder or a data set of the Hub by "
            f"{prepare_command(pairs)}"
        )
    directory = verified_directory(model)
    if pairs:
        prompt_tokens(model_tokenizer(directory), user_turn("Hi"))  # raises without a chat template
    option = "--max_length" if pairs else "--sequence_length"
    tokenizer, positions, packed = chat_model(directory, longest, option)
    inputs = digest(file), fingerprint(with_padding(tokenizer)), tokenizer.chat_template, longest
    if not prepares_beside(config, inputs, f"{file}, the model or the length of a window", pairs):
        return
    manifest = prepare_conversations(
        [str(file)],
        tokenizer,
        config.data_dir,
        sequence_length=longest or min(LONGEST_WINDOW, positions),
        shorten=longest is None,
        packed=pairs or packed,
        pairs=pairs,
        longer=option,
        source=str(file),
        model=model,
    )
    print(*summary(manifest), sep="\n")


def prepare_command(pairs: bool) -> str:
    """Returns the start of the command that prepares conversations, or pairs of answers."""
    options = ["--pairs"] if pairs else []
    return recipe_command("prepare-data", "chat", *options)


def find_model(config: ChatSFT, pairs: bool) -> str:
    """Returns the model to fine-tune: `init_from`, which it sets to the model of the prepared data
    if it is not given. `pairs` says whether the data should hold pairs of answers.

    Raises `FileNotFoundError` if the data or its model does not exist, `ValueError` if the data
    does not hold conversations.
    """
    from gpt2_accel.data.shards import DATA_MANIFEST, read_manifest, read_parts

    folder = Path(config.data_dir)
    command = prepare_command(pairs)
    if not (folder / DATA_MANIFEST).is_file():
        raise FileNotFoundError(
            f"{folder} holds no prepared conversations: give a file by --data and its model by "
            f"--model, or make them by {command} FILE_OR_HUB_ID --model MODEL --sequence_length "
            f"1024 --data_dir {shlex.quote(str(folder))}"
        )
    manifest = read_manifest(folder)
    if not manifest.get("sequence_length"):
        raise ValueError(f"{folder} holds text, not conversations: prepare some by {command}")
    if config.init_from is None:
        parts = read_parts(folder, manifest)
        folder, name = next((part, found["model"]) for part, found, _ in parts if "model" in found)
        if (folder / name).is_dir():
            name = os.path.relpath(folder / name)
        elif name.startswith(".") or name.count("/") != 1:
            raise FileNotFoundError(
                f"{folder / name}, the model that {folder} was prepared for, does not exist: give "
                "a model by --model"
            )
        config.init_from = name
    return config.init_from


def open_data(config: ChatSFT, longest: int | None, pairs: bool = False) -> Path:
    """Prepares the file of `--data`, if it is given, and returns the directory of the model to
    fine-tune. All ranks call it. `prepare_file` describes the arguments. Raises `OSError`
    or `ValueError` if data or model cannot be used."""
    from gpt2_accel.checkpoint.find import verified_directory
    from gpt2_accel.hf.convert import local_directory
    from gpt2_accel.runtime.processes import main_process_first

    with main_process_first():
        if config.data:
            prepare_file(config, Path(config.data), longest, pairs)
            config.data = None  # config.yaml names the prepared folder
        return local_directory(verified_directory(find_model(config, pairs)))


def keep_settings(config: ChatSFT, processes: int) -> None:
    """Sets the settings that are not given to those of the run that is resumed, if there is one.

    Another number of processes may need another batch. All ranks call it.
    """
    from gpt2_accel.runtime.processes import on_main_process
    from gpt2_accel.tuning import saved_settings

    saved = on_main_process(lambda: saved_settings(config))
    if saved and saved["total_batch_size"] % (processes * saved["sequence_length"]):
        del saved["total_batch_size"], saved["micro_batch_size"]
    config.keep(saved)


def fit_to_data(config: ChatSFT, width: int, processes: int, pretrained: bool) -> str:
    """Sets the settings that follow from the data, the model and the number of processes, unless
    they are given.

    Returns a line with the choice. It is the same for the same data: a resumed run continues
    exactly.
    """
    from gpt2_accel.data.conversations import plural
    from gpt2_accel.data.shards import read_manifest
    from gpt2_accel.tuning import pretrained_rate

    manifest = read_manifest(config.data_dir)
    train = manifest["splits"]["train"]
    length = config.sequence_length or manifest["sequence_length"]
    windows = train["tokens"] // length
    smallest = PRETRAINED_BATCH / length if pretrained else 1
    fitting = max(smallest, min(windows / UPDATES_PER_EPOCH, LARGEST_BATCH / length))
    batch = round_up(2 ** int(math.log2(max(1, fitting))), processes)  # windows
    config.sequence_length = length
    config.derive(total_batch_size=batch * length)
    batch = config.total_batch_size // length
    config.derive(micro_batch_size=max(1, min(batch // processes, MICRO_BATCH // length)))

    epoch = math.ceil(windows / max(1, batch))  # updates
    if config.max_steps is None:
        fewest, most = FEWEST_UPDATES, MOST_EPOCHS
        if pretrained:
            fewest, most = PRETRAINED_UPDATES, PRETRAINED_EPOCHS
        epochs = config.epochs or max(EPOCHS, min(most, math.ceil(fewest / epoch)))
        config.max_steps = max(1, round(epochs * epoch))
        config.epochs = None
    steps = config.max_steps
    rate = RATE_TIMES_WIDTH / width * (LORA_RATE if config.lora else 1)
    if pretrained:
        rate = pretrained_rate(config)
    config.derive(learning_rate=float(f"{rate:.2g}"), warmup_steps=round(WARMUP_SHARE * steps))

    evaluations = math.ceil(epoch / LONGEST_INTERVAL)  # evaluations per epoch
    config.derive(eval_every=math.ceil(epoch / evaluations))
    every = config.eval_every
    config.derive(sample_every=max(every, math.ceil(steps / EPOCHS)), save_every=every)
    line = (
        f"{steps:,} updates of {batch:,} x {length:,} tokens, {steps * batch / windows:.3g} epochs "
        f"of {plural(windows, 'window')}, learning rate {config.learning_rate:g}, warmup "
        f"{config.warmup_steps:,}, evaluation every {every:,}"
    )
    if (train["documents"] or FEW) < FEW:  # unknown beside imported tokens
        line += f"; too few conversations to learn from: {train['documents']}"
    held_out = manifest["splits"]["val"]["documents"] or FEW
    if held_out < FEW_HELD_OUT:
        line += f"; too few held out for val/loss to say much: {held_out}"
    return line


def main() -> None:
    config = parse_config(ChatSFT)
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.hf.convert import read_config
    from gpt2_accel.runtime.processes import process_state
    from gpt2_accel.train import train
    from gpt2_accel.tuning import is_pretrained

    width = read_config(open_data(config, config.sequence_length)).n_embd
    processes = process_state().num_processes
    keep_settings(config, processes)
    pretrained = is_pretrained(str(config.init_from))
    process_state().print(fit_to_data(config, width, processes, pretrained))
    train(config)


if __name__ == "__main__":
    cli.run(main)

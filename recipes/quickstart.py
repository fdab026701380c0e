"""Train a small GPT-2 on Python's standard library: nothing to download, minutes on a CPU.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/quickstart.py

Data: the `.py` files of Python's standard library, without its tests, about 11 MB. One file in 20,
chosen by a hash of its path, is held out for validation. Tokens: a byte-level BPE of 4,096 tokens,
trained on the other files, which gives about 3.3M tokens. Batch: 16 sequences x 128 tokens = 2,048
tokens per update; 1,000 updates, 2.0M tokens. Model: with so few tokens, two layers reach a lower
loss than four, and faster. Settings: Muon's schedule, weight decay, beta2 and warmup are the result
of a study on this text at half this width (docs/results.md); the learning rate is the best of
0.012, 0.018 and 0.025. Expected: 1.47 to 1.49 bits per byte on the held-out files, over five seeds,
after two to three minutes on 2 CPU cores.

`--data my.txt`, a file or a folder of text or of rows, trains on your text: the recipe prepares it
in the run's folder. `--init_from DIR_OR_HUB_ID` continues training a model of your own, with its
tokenizer: give `--data` or `--data_dir` too. A pretrained model gets AdamW at a rate that it
survives.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, derived, parse_config, setting
from gpt2_accel.runtime.options import run_of

VOCAB_SIZE = 4096
# The folders of tests, and those that are not part of the standard library.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Text with fewer tokens, read in more passes, needs a stronger weight decay (docs/results.md).
TOKENS_PER_PARAMETER = 0.5
PASSES = 4


@dataclass
class Quickstart(TrainConfig):
    data: str | None = setting(None, "file or folder of text, or of rows with a field text")
    data_dir: str = "data/python_stdlib"
    output_dir: str = "runs/quickstart"
    resume_from: str | None = "latest"
    vocab_size: int | None = setting(
        None, f"vocabulary size of the BPE trained on the corpus; default {VOCAB_SIZE}"
    )

    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 128
    n_positions: int = 128

    micro_batch_size: int = 16
    total_batch_size: int = 16 * 128
    max_steps: int = 1000

    optimizer: str = derived(
        "'adamw', or 'muon' for the blocks' matrices; default muon, or adamw for a pretrained model"
    )
    learning_rate: float = derived(
        "peak learning rate; default 0.018, or 2e-5 for a pretrained model"
    )
    lr_schedule: str = "linear"
    min_lr_ratio: float = 0.0
    warmup_steps: int = 10
    weight_decay: float = derived(
        "decay of matrices and embeddings; default 0.3, or 1.6 if the text has less than "
        f"{TOKENS_PER_PARAMETER} tokens per parameter and is read at least {PASSES} times; a "
        "resumed run keeps its own"
    )
    beta2: float = 0.99

    eval_every: int = 250
    sample_every: int = 500
    sample_prompts: list[str] = setting(["def ", "class "], "prompts that the samples continue")
    save_every: int = 250


def find_prepared(config: Quickstart) -> None:
    """Sets `data_dir` to the data of the run, if it is not given; prepares the default corpus.

    Raises `FileNotFoundError` if other data is not prepared, `ValueError` if its vocabulary size is
    not the given `--vocab_size`.
    """
    from gpt2_accel.data.shards import DATA_MANIFEST, read_manifest

    if "data_dir" not in config.given:
        config.data_dir = run_of(config.output_dir)[0].get("data_dir", config.data_dir)
    folder = Path(config.data_dir)
    if config.data_dir == Quickstart.data_dir and not (folder / DATA_MANIFEST).exists():
        prepare_corpus(config)
        return
    vocab_size = read_manifest(folder)["tokenizer"]["vocab_size"]
    if config.vocab_size not in (None, vocab_size):
        raise ValueError(
            f"{config.data_dir} was made with a vocabulary of {vocab_size}, not "
            f"{config.vocab_size}: leave out --vocab_size"
        )


def prepare_text(config: Quickstart) -> None:
    """Prepares the text of `--data` in the run's folder, by `prepare_data.py text`.

    Raises `ValueError` if it has changed since the run began, unless `ignore_changes` is set: then
    it gets the run's tokenizer.
    """
    from chat_sft import prepares_beside
    from prepare_data import TEXT
    from prepare_data import main as prepare_data

    from gpt2_accel.checkpoint.find import list_checkpoints, verified_directory
    from gpt2_accel.data.sources import find_files, is_text
    from gpt2_accel.runtime.files import digest

    assert config.data is not None
    files = find_files(config.data, is_text, TEXT)
    texts = [(name, digest(path)) for path, name in files.items()]
    tokenizer = config.init_from and str(verified_directory(config.init_from))
    inputs = texts, tokenizer, config.vocab_size
    if prepares_beside(config, inputs, f"{config.data} or the tokenizer"):
        checkpoints = list_checkpoints(config.output_dir)
        if checkpoints:
            tokenizer = str(checkpoints[-1])
        options = ["--tokenizer", tokenizer or "bpe", "--data_dir", config.data_dir]
        if config.vocab_size is not None and not checkpoints:
            options += ["--vocab_size", str(config.vocab_size)]
        prepare_data(["text", config.data, *options])
    config.data = None  # config.yaml names the prepared folder


def prepare_corpus(config: Quickstart) -> None:
    """Writes the source of the standard library into `data_dir`, as token shards."""
    from gpt2_accel.data.documents import split_of
    from gpt2_accel.data.prepare import prepare
    from gpt2_accel.data.sources import read_text
    from gpt2_accel.tokenizer import train_bpe

    library = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, list[str]] = {"train": [], "val": []}
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not path.is_file() or not path.stat().st_size or SKIPPED & set(name.parts):
            continue
        texts[split_of(name.as_posix())].append(read_text(path))
    if config.init_from:
        from gpt2_accel.checkpoint.find import verified_directory
        from gpt2_accel.hf.convert import model_tokenizer

        tokenizer = model_tokenizer(verified_directory(config.init_from))
    else:
        vocab_size = VOCAB_SIZE if config.vocab_size is None else config.vocab_size
        tokenizer = train_bpe(texts["train"], vocab_size)
    prepare(texts, tokenizer, config.data_dir, source=f"the Python standard library, {library}")


def decay_for(config: Quickstart) -> float:
    """Returns the weight decay of a new model: 1.6 for little text that is read often, else 0.3."""
    from gpt2_accel.data.shards import read_manifest
    from gpt2_accel.hf.convert import configured_shape
    from gpt2_accel.runtime.processes import process_state

    manifest = read_manifest(config.data_dir)
    tokens = manifest["splits"]["train"]["tokens"]
    parameters = configured_shape(config, manifest["tokenizer"]["vocab_size"]).parameter_count
    passes = config.epochs or config.max_steps * config.total_batch_size / tokens
    if tokens >= TOKENS_PER_PARAMETER * parameters or passes < PASSES:
        return 0.3
    process_state().print(
        f"weight decay 1.6 instead of 0.3: {tokens:,} tokens for {parameters:,} parameters, read "
        f"{passes:.2g} times"
    )
    return 1.6


def fit_to_model(config: Quickstart) -> None:
    """Sets the settings that depend on the model that the run starts with, unless they are given.

    A resumed run keeps its own. All ranks call it.
    """
    from gpt2_accel.runtime.processes import on_main_process
    from gpt2_accel.tuning import is_pretrained, pretrained_rate, saved_settings

    config.keep(on_main_process(lambda: saved_settings(config)))
    if config.init_from and is_pretrained(config.init_from):
        config.derive(optimizer="adamw", learning_rate=pretrained_rate(config), weight_decay=0.0)
    elif config.init_from:
        config.derive(weight_decay=0.3)
    config.derive(optimizer="muon", learning_rate=1.8e-2)
    if config.weight_decay is None:
        config.weight_decay = decay_for(config)


def main() -> None:
    config = parse_config(Quickstart)
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.runtime.processes import main_process_first
    from gpt2_accel.train import train

    with main_process_first():
        if config.data:
            prepare_text(config)
        else:
            find_prepared(config)
    if config.data_dir != Quickstart.data_dir and "sample_prompts" not in config.given:
        config.sample_prompts = ["The "]
    fit_to_model(config)
    train(config)


if __name__ == "__main__":
    cli.run(main)

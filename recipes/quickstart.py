"""Train a small GPT-2 on Python's standard library: nothing to download, minutes on a CPU.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/quickstart.py

Data: the `.py` files of the running interpreter's standard library, tests left out, about 11 MB;
one file in 20, by a hash of its path, is held out. Tokens: a byte-level BPE of 4,096 trained on the
rest, about 3.3M tokens. Batch: 16 sequences x 128 tokens = 2,048 tokens per update, 1,000 updates,
2.0M tokens. With so few tokens two layers reach a lower loss than four, in less time. Muon's
schedule, weight decay, beta2 and warmup are those that the study in docs/results.md chose for this
text at half this width. The learning rate is the best of 0.012, 0.018 and 0.025 here. `--init_from
DIR_OR_HUB_ID` continues a model of your own, with its tokenizer; give it a `--data_dir` then.
Expected: about 1.47 bits per byte on the held-out files, after two to three minutes on 2 CPU cores.
"""

import json
import shlex
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import TrainConfig, parse_config, setting
from gpt2_accel.data.documents import held_out
from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.shards import read_manifest
from gpt2_accel.data.sources import read_text
from gpt2_accel.runtime.recipe_command import program, recipe_command
from gpt2_accel.tokenizer import train_bpe

VOCAB_SIZE = 4096
LITTLE = 0.5  # tokens per parameter (docs/results.md)
OFTEN = 4  # passes
TESTS = {"test", "tests", "idle_test"}
OTHERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass
class Quickstart(TrainConfig):
    data_dir: str = "data/python_stdlib"
    output_dir: str = "runs/quickstart"
    resume_from: str | None = "latest"
    vocab_size: int | None = setting(
        None, f"tokens of the BPE trained on the corpus, {VOCAB_SIZE} if not given"
    )

    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 128
    n_positions: int = 128

    micro_batch_size: int = 16
    total_batch_size: int = 16 * 128
    max_steps: int = 1000

    optimizer: str = "muon"
    learning_rate: float = 1.8e-2
    lr_schedule: str = "linear"
    min_lr_ratio: float = 0.0
    warmup_steps: int = 10
    weight_decay: float | None = setting(
        None,
        "decay of matrices and embeddings; default that of the run that continues, else 0.3, or "
        f"1.6 if the text has less than {LITTLE} tokens per parameter and is read {OFTEN} times "
        "or more",
    )
    beta2: float = 0.99

    eval_every: int = 250
    sample_every: int = 500
    sample_prompts: list[str] = setting(["def ", "class "], "prompts that the samples continue")
    save_every: int = 250


def check_prepared(config: Quickstart) -> None:
    """Raises `ValueError` if the prepared data has another vocabulary size than the given
    `--vocab_size`."""
    found = read_manifest(config.data_dir)["tokenizer"]["vocab_size"]
    if config.vocab_size not in (None, found):
        raise ValueError(
            f"{config.data_dir} was made with a vocabulary of {found}, not {config.vocab_size}: "
            "leave out --vocab_size"
        )


def prepare_corpus(config: Quickstart) -> None:
    """The standard library's source as token shards."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, list[str]] = {"train": [], "val": []}
    for path in sorted(path for path in library.rglob("*.py") if path.is_file()):
        name = path.relative_to(library)
        if path.stat().st_size and not (TESTS | OTHERS) & set(name.parts):
            split = "val" if held_out(name.as_posix()) else "train"
            texts[split].append(read_text(path))
    if config.init_from:
        from gpt2_accel.checkpoint.find import verified_directory
        from gpt2_accel.hf.convert import model_tokenizer

        tokenizer = model_tokenizer(
            verified_directory(config.init_from, hint="use another checkpoint")
        )
    else:
        tokenizer = train_bpe(
            texts["train"], VOCAB_SIZE if config.vocab_size is None else config.vocab_size
        )
    prepare(texts, tokenizer, config.data_dir, source=f"the Python standard library, {library}")


def decay_for(config: Quickstart) -> float:
    """Returns the weight decay: that of the run that continues, or a stronger one for a little text
    that is read often."""
    from gpt2_accel.checkpoint.find import find_checkpoint, read_state
    from gpt2_accel.hf.convert import configured_shape
    from gpt2_accel.runtime.processes import on_main_process, process_state

    def saved_settings() -> dict:
        checkpoint = find_checkpoint(config.resume_from, config.output_dir, lambda _: None)
        return read_state(checkpoint)["settings"] if checkpoint else {}

    settings = on_main_process(saved_settings)
    if "weight_decay" in settings:
        return settings["weight_decay"]
    manifest = read_manifest(config.data_dir)
    tokens = manifest["splits"]["train"]["tokens"]
    passes = config.epochs or config.max_steps * config.total_batch_size / tokens
    parameters = configured_shape(config, manifest["tokenizer"]["vocab_size"]).parameter_count
    if tokens >= LITTLE * parameters or passes < OFTEN or config.init_from:
        return 0.3
    process_state().print(
        f"weight decay 1.6 in place of 0.3: {tokens:,} tokens for {parameters:,} parameters, read "
        f"{passes:.2g} times"
    )
    return 1.6


def main() -> None:
    config = parse_config(Quickstart)
    # These import torch, which takes seconds: --help and a wrong flag do not wait for it.
    from gpt2_accel.hf.hub_data import open_hub
    from gpt2_accel.runtime.processes import main_process_first, process_state
    from gpt2_accel.train import train

    with main_process_first():
        open_hub(config.data_dir)
        try:
            check_prepared(config)
        except FileNotFoundError as error:
            if config.data_dir != Quickstart.data_dir:
                raise FileNotFoundError(
                    f"{error}; or leave out --data_dir for Python's standard library"
                ) from error
            prepare_corpus(config)
    if config.weight_decay is None:
        config.weight_decay = decay_for(config)
    if not train(config):
        return
    prompt = (config.sample_prompts or Quickstart().sample_prompts)[0]
    model, text = (json.dumps(word, ensure_ascii=False) for word in (config.output_dir, prompt))
    code = (
        f'from transformers import pipeline; print(pipeline("text-generation", model={model})({text})'
        '[0]["generated_text"])'
    )
    process_state().print(
        f"\nThe model is in {config.output_dir}. Go on with\n"
        f"  {recipe_command('sample', '--model', config.output_dir, '--prompt', prompt)}\n"
        f"  {shlex.join([program(Path(sys.executable)), '-c', code])}"
    )


if __name__ == "__main__":
    cli.run(main)

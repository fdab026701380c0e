"""Convert a checkpoint of nanoGPT or build-nanogpt to a Hugging Face model directory.

    python recipes/import_checkpoint.py --input out/ckpt.pt --output_dir models/mine
    python recipes/import_checkpoint.py --input out-shakespeare-char/ckpt.pt \\
        --output_dir models/chars --tokenizer none

The directory must be new or empty. transformers, `sample.py` and `--init_from` of every training
recipe load it.
"""

from dataclasses import dataclass

from gpt2_accel import cli, save_pretrained
from gpt2_accel.config import parse_config, required, setting
from gpt2_accel.runtime.files import atomic_directory, check_unused
from gpt2_accel.tokenizer import gpt2_tokenizer, load_tokenizer
from gpt2_accel.tools.importers import read_checkpoint


@dataclass
class ImportCheckpoint:
    input: str = required("checkpoint, a .pt file of nanoGPT or build-nanogpt")
    output_dir: str = required("model directory to write")
    tokenizer: str = setting("gpt2", "gpt2, none, or an HF directory")

    def __post_init__(self) -> None:
        check_unused(self.output_dir)


def main() -> None:
    config = parse_config(ImportCheckpoint)
    tokenizer = None
    if config.tokenizer == "gpt2":
        tokenizer = gpt2_tokenizer()
    elif config.tokenizer != "none":
        tokenizer = load_tokenizer(config.tokenizer)
    model = read_checkpoint(config.input)
    with atomic_directory(config.output_dir) as folder:
        save_pretrained(model, folder, tokenizer, name=config.output_dir)
    print(f"The model is in {config.output_dir}.")
    if tokenizer is None:
        print("It has no tokenizer: add the model's tokenizer files before sampling or evaluation.")


if __name__ == "__main__":
    cli.run(main)

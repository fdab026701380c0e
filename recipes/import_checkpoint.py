"""Convert a GGUF file or a nanoGPT checkpoint to a Hugging Face model directory.

    python recipes/import_checkpoint.py --input model.gguf --output_dir models/mine
    python recipes/import_checkpoint.py --input out/ckpt.pt --output_dir models/mine
    python recipes/import_checkpoint.py --input out-shakespeare-char/ckpt.pt \\
        --output_dir models/chars --tokenizer none

Checkpoints of build-nanogpt are read too. GGUF files are read by transformers, which needs
`pip install 'gguf>=0.16' 'transformers>=5.23'`: their weights become fp32, and a large vocabulary
takes minutes. The directory must be new or empty. transformers, `sample.py` and `--init_from` of
every training recipe load it.
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import parse_config, required, setting
from gpt2_accel.runtime.files import atomic_directory, check_unused


@dataclass
class ImportCheckpoint:
    input: str = required("a .gguf file, or a .pt file of nanoGPT or build-nanogpt")
    output_dir: str = required("model directory to write")
    tokenizer: str | None = setting(
        None, "gpt2, none, or an HF directory; default gpt2, of a GGUF file its own"
    )

    def __post_init__(self) -> None:
        check_unused(self.output_dir)


def main() -> None:
    config = parse_config(ImportCheckpoint)
    from gpt2_accel import save_pretrained
    from gpt2_accel.tokenizer import gpt2_tokenizer, load_tokenizer
    from gpt2_accel.tools.importers import read_checkpoint, read_gguf

    path = Path(config.input)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: give a .gguf file or a .pt checkpoint")
    gguf = path.suffix.lower() == ".gguf"
    name = config.tokenizer or ("" if gguf else "gpt2")
    tokenizer = None
    if name == "gpt2":
        tokenizer = gpt2_tokenizer()
    elif name not in ("", "none"):
        tokenizer = load_tokenizer(name)
    if gguf:
        model, own = read_gguf(path, tokenizer)
        tokenizer = tokenizer if name else own
    else:
        model = read_checkpoint(path)
    with atomic_directory(config.output_dir) as folder:
        save_pretrained(model, folder, tokenizer, name=config.output_dir)
    print(f"The model is in {config.output_dir}.")
    if tokenizer is None:
        print("It has no tokenizer: add the model's tokenizer files before sampling or evaluation.")


if __name__ == "__main__":
    cli.run(main)

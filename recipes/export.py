"""Export a model as a GGUF file, for llama.cpp and Ollama, or the average of a run's checkpoints.

    python recipes/export.py --model runs/quickstart --output quickstart.gguf
    python recipes/export.py --model runs/quickstart --average 2 --output averaged

`--model` is a run's folder, any Hugging Face GPT-2, Llama or Qwen3 directory, or a Hub id. The file holds the tokenizer, which has to
be a byte-level BPE. `--average K` writes the mean of the run's last K checkpoints as a Hugging Face model directory, which every
recipe takes. For ONNX see docs/hub.md.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.checkpoint.find import list_checkpoints, verified_directory
from gpt2_accel.config import check_ranges, parse_config, required, setting
from gpt2_accel.hf.convert import from_pretrained, save_pretrained
from gpt2_accel.runtime.files import atomic_files, sentence
from gpt2_accel.tokenizer import load_tokenizer
from gpt2_accel.tools.average import average
from gpt2_accel.tools.gguf import write_gguf


@dataclass
class Export:
    model: str = required("run's folder, HF model directory or Hub id")
    output: str = required("file to write, with --average a folder")
    average: int = setting(0, "write the mean of the run's last K checkpoints; 0 for GGUF")
    verify: bool = setting(True, "compare the model's files with their checksums first")

    def __post_init__(self) -> None:
        check_ranges(self, not_negative="average")
        output = Path(self.output)
        if output.suffix == ".onnx":
            raise ValueError(
                f"{output} is not a GGUF file: write ONNX by optimum-cli export onnx --model {shlex.quote(self.model)} --task "
                "text-generation FOLDER (docs/hub.md)"
            )
        if not output.name or (self.output.endswith("/") and not self.average):
            raise ValueError(f"output is the path of a file to write, got {self.output!r}")
        if file := next((parent for parent in output.parents if parent.is_file()), None):
            raise ValueError(f"{file} is a file, not a folder: choose another --output")
        if output.exists():
            raise FileExistsError(
                f"{output} exists already, and an export does not overwrite it: choose another --output"
            )


def write_average(config: Export) -> None:
    """Writes the mean of the last checkpoints. Raises `ValueError` if there are too few or one is damaged."""
    found = list_checkpoints(config.model)
    if len(found) < config.average:
        raise ValueError(
            f"--average {config.average} needs {config.average} checkpoints, {len(found)} are there: train with "
            f"--keep_last {config.average}"
        )
    checkpoints = found[-config.average :]
    for path in checkpoints:
        verified_directory(path, config.verify)
    tokenizer = load_tokenizer(checkpoints[-1])
    save_pretrained(average(checkpoints), config.output, tokenizer)
    names = ", ".join(path.name for path in checkpoints)
    print(f"The mean of {names} is in {config.output}.")


def main() -> None:
    config = parse_config(Export)
    if config.average:
        write_average(config)
        return
    directory, output = verified_directory(config.model, config.verify), Path(config.output)
    model = from_pretrained(directory)
    tokenizer, name = load_tokenizer(directory), Path(config.model).name
    try:
        with atomic_files(output.parent) as folder:
            write_gguf(model, tokenizer, folder / output.name, name)
            size = sum(path.stat().st_size for path in folder.iterdir())
    except OSError as error:  # that of NumPy names neither file nor disk
        raise OSError(
            f"{output} could not be written ({sentence(error)}): free disk space, or choose another "
            "--output"
        ) from error
    print(f"The model is in {output}, {size / 1e6:,.1f} MB.")


if __name__ == "__main__":
    cli.run(main)

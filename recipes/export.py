"""Export a model as a file for other programs: GGUF for llama.cpp and Ollama, ONNX for onnxruntime.

    python recipes/export.py --model runs/quickstart --format gguf --dtype q8_0 --output quickstart.gguf
    python recipes/export.py --model runs/quickstart --format onnx --output quickstart.onnx

`--model` is a run's folder, any Hugging Face GPT-2, Llama or Qwen3 directory, or a Hub id. A GGUF file holds the tokenizer, which has to
be a byte-level BPE or the byte tokenizer. An ONNX file does not: give its reader the model's `tokenizer.json`.
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.checkpoint.find import verified_directory
from gpt2_accel.config import parse_config, required, setting
from gpt2_accel.files import atomic_files
from gpt2_accel.hf.convert import from_pretrained
from gpt2_accel.hf.gguf import DTYPES, write_gguf
from gpt2_accel.hf.onnx import write_onnx
from gpt2_accel.tokenizer import load_tokenizer

FORMATS = {"gguf": tuple(DTYPES), "onnx": ("f32",)}  # with their dtypes


@dataclass
class Export:
    model: str = required("run's folder, HF model directory or Hub id")
    output: str = required("file to write")
    format: str = setting("gguf", "'gguf' or 'onnx'")
    dtype: str = setting("f32", "dtype of the weights: 'f32', or in GGUF 'f16', 'bf16' or 'q8_0'")
    verify: bool = setting(True, "compare a checkpoint's files with their checksums first")

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format must be 'gguf' or 'onnx', got {self.format!r}")
        if self.dtype not in FORMATS[self.format]:
            raise ValueError(
                f"dtype must be {' or '.join(FORMATS[self.format])} for {self.format}, got {self.dtype!r}"
            )
        suffix = Path(self.output).suffix.lower()[1:]
        if suffix in FORMATS and suffix != self.format:
            raise ValueError(
                f"format is {self.format}, but {self.output} ends in .{suffix}: give --format {suffix}, or choose "
                "another --output"
            )
        if suffix == "safetensors":
            raise ValueError(
                f"{self.output} would hold {self.format}, not safetensors, which the model's folder has: choose another "
                "--output"
            )
        output = Path(self.output)
        if not output.name or self.output.endswith("/"):
            raise ValueError(f"output is the path of a file to write, got {self.output!r}")
        if file := next((parent for parent in output.parents if parent.is_file()), None):
            raise ValueError(f"{file} is a file, not a folder: choose another --output")
        if output.exists():
            raise FileExistsError(
                f"{output} exists already, and an export does not overwrite it: choose another --output"
            )


def main() -> None:
    config = parse_config(Export)
    directory, output = verified_directory(config.model, config.verify), Path(config.output)
    model = from_pretrained(directory)
    with atomic_files(output.parent) as folder:
        if config.format == "onnx":
            write_onnx(model, folder / output.name)
        else:
            tokenizer = load_tokenizer(directory)
            write_gguf(
                model, tokenizer, folder / output.name, config.dtype, Path(config.model).name
            )
        size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"The model is in {output}, {size / 1e6:,.1f} MB.")


if __name__ == "__main__":
    cli.run(main)

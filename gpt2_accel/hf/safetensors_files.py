"""Reads weight files, HF's safetensors in one file or sharded, and writes them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gpt2_accel.runtime.files import parse_json

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors. Those that are not contiguous, as the transposed ones of GPT-2, are copied
    first: for the 124M 0.34 GB of further memory."""
    own = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(own, path, {"format": "pt"})


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter of peft, without its base model."""
    return (directory / ADAPTER).is_file() and not (directory / "config.json").is_file()


def weight_files(directory: Path) -> list[Path]:
    """Returns the weight files of a model directory that `transformers` takes: one file of
    safetensors, or without it the shards that an index lists; of an adapter's directory its own.

    Raises `FileNotFoundError` if one of them is missing, `ValueError` for a damaged index and for
    an adapter beside a model, which `transformers` would add to the weights.
    """
    if is_adapter(directory):
        return [directory / "adapter_model.safetensors"]
    if (directory / ADAPTER).is_file():
        raise ValueError(
            f"{directory} holds an adapter of peft: merge it into its model, with "
            "merge_and_unload, and save the result"
        )
    single, index = directory / WEIGHTS, directory / f"{WEIGHTS}.index.json"
    files = [single]
    if index.is_file() and not single.is_file():
        try:
            listed = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({directory / Path(name).name for name in listed.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged: download or save it again") from error
    if missing := next((path for path in files if not path.is_file()), None):
        raise FileNotFoundError(
            f"{missing} is missing: give the directory of a whole model with safetensors, which save_pretrained of "
            "transformers writes"
        )
    return files


def read_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of weight files one at a time, memory-mapped."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): download or save it again") from error

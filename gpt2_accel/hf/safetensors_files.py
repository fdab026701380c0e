"""Reads weight files, HF's safetensors in one file or sharded and old pickles, and writes safetensors.

Tensors are written and read one at a time, so that a model is never in memory twice.
"""

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpt2_accel.files import parse_json

WEIGHTS = "model.safetensors"
OLD_WEIGHTS = "pytorch_model.bin"
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors of one of `DTYPES`, one at a time; the file equals that of `safetensors.torch.save_file` to the byte.

    The library needs all tensors contiguous in host memory at once. For GPT-2's transposed views and padded embedding that is
    a second copy: it took 1.08 times the 124M's size in further memory, this function 0.02 times.
    Format: https://huggingface.co/docs/safetensors.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            file.write(tensor.view(torch.uint8).numpy())


def weight_files(directory: Path) -> list[Path]:
    """Returns the weight files of a model directory: safetensors, else an old `pytorch_model.bin`, or the shards that
    an index lists.

    Raises `FileNotFoundError` if one of them is missing, `ValueError` for an index that is damaged.
    """
    for weights in (WEIGHTS, OLD_WEIGHTS):
        index = directory / f"{weights}.index.json"
        if index.is_file():
            return indexed_files(index)
        if (directory / weights).is_file():
            return [directory / weights]
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory} has been removed, as a run does with its older checkpoints: start again"
        )
    raise FileNotFoundError(
        f"{directory} holds no {WEIGHTS}, nor an index of its parts: give the directory of a whole model"
    )


def indexed_files(index: Path) -> list[Path]:
    """Returns the files that an index of shards lists."""
    try:
        names = set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [index.parent / Path(name).name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: download or save it again") from error
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, though {index.name} lists it")
    return files


def read_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of weight files one at a time, memory-mapped."""
    for path in files:
        if path.suffix == ".bin":
            yield from named_tensors(load_pickle(path), path).items()
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): download or save it again") from error


def load_pickle(path: Path) -> Any:
    """Loads what `torch.save` wrote, on CPU, restricted to tensors and plain values, so that no code runs.

    Raises `ValueError` if the file holds anything else or is damaged.
    """
    try:
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and plain values, and is refused, since loading it could "
            "run code: save its state dict alone, or as safetensors"
        ) from error
    except Exception as error:  # a damaged pickle raises any of them
        raise ValueError(f"{path} is damaged: copy or save it again") from error


def named_tensors(value: object, path: Path) -> dict[str, torch.Tensor]:
    """Returns `value`, which was loaded from `path`. Raises `ValueError` if it is not a dict of names and tensors."""
    if isinstance(value, dict) and all(
        isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in value.items()
    ):
        return value
    raise ValueError(f"{path} holds no state dict where its tensors should be: save it again")

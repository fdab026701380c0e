"""Finds and reads weight files: HF's safetensors in one file or sharded.

Tensors are read one at a time, so that a model is never in memory twice.
"""

from collections.abc import Iterator, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpt2_accel.runtime.files import check_pointer, parse_json

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"
BASE_RECORD = "adapter_base.json"  # beside an adapter: digests of its base's weights
ENDS = 2**23  # bytes at each end of a file; the first have its header
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter of peft, without its base model."""
    return (directory / ADAPTER).is_file() and not (directory / "config.json").is_file()


def weight_files(directory: Path) -> list[Path]:
    """Returns the weight files of a model directory that `transformers` takes.

    One file of safetensors, or without it the shards that an index lists; the adapter's file in an
    adapter's directory. Raises `FileNotFoundError` if one of them is missing, `ValueError` for
    an adapter beside a model, which `transformers` would add to the weights.
    """
    adapter = is_adapter(directory)
    if (directory / ADAPTER).is_file() and not adapter:
        raise ValueError(
            f"{directory} holds an adapter of peft: merge it into its model, with "
            "merge_and_unload, and save the result"
        )
    single = directory / ("adapter_model.safetensors" if adapter else WEIGHTS)
    index = directory / f"{WEIGHTS}.index.json"
    files = [single]
    if index.is_file() and not single.is_file():
        try:
            listed = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({directory / Path(name).name for name in listed.values()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged ({error!r}): download it again") from error
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: give the directory of a model with all its safetensors, which "
                "save_pretrained of transformers writes"
            )
    return files


def read_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of weight files one at a time, memory-mapped."""
    for path in files:
        check_pointer(path)
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): download or save it again") from error


def weights_digest(directory: Path, ends: bool = False) -> str:
    """Returns a SHA-256 (hex) of all weight files of a model directory.

    With `ends` it reads only the first and last `ENDS` bytes of each file.
    """
    total = sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb") as file:
            if ends:
                total.update(file.read(ENDS))
                file.seek(max(0, path.stat().st_size - ENDS))
                total.update(file.read())
            else:
                total.update(file_digest(file, "sha256").hexdigest().encode())
    return total.hexdigest()


def check_layers(directory: Path, values: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a config has more layers than the weights beside it have tensors.

    To build such a model may take hours.
    """
    layers = max(values.get(name) or 0 for name in LAYERS)
    files = list(directory.glob("*.safetensors"))
    tensors = sum(1 for _ in read_tensors(files))
    if files and layers > tensors:
        raise ValueError(f"it has {layers:,} layers, and the weights beside it {tensors:,} tensors")

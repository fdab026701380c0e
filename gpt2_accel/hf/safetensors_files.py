"""Finds and reads weight files: HF's safetensors in one file or sharded.

Tensors are read one at a time, so that a model is never in memory twice.
"""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpt2_accel.runtime.files import check_pointer, digest, read_json

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"
BASE_RECORD = "adapter_base.json"  # beside an adapter: the digest of its base's weights
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter of peft, without its base model."""
    full = directory.glob("model*.safetensors*")
    return (directory / ADAPTER).is_file() and not any(full)


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
            listed = read_json(index)["weight_map"]
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


def weights_digest(directory: Path) -> str:
    """Returns a SHA-256 (hex) of all weight files of a model directory."""
    total = sha256()
    for path in sorted(directory.glob("*.safetensors")):
        total.update(digest(path).encode())
    return total.hexdigest()

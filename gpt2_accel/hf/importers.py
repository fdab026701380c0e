"""Importers for other toolkits' checkpoints: nanoGPT's and build-nanogpt's `.pt`, llm.c's `.bin`."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from gpt2_accel.hf.convert import build, from_hf
from gpt2_accel.hf.gpt2 import MATRICES
from gpt2_accel.hf.safetensors_files import load_pickle, named_tensors
from gpt2_accel.models.gpt2 import GPT, GPTConfig
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE

# llm.c's header (write_model in its train_gpt2.py): 256 int32, the first of them the magic, then the
# version, which tells the dtype of the parameters.
LLMC_MAGIC = 20240326
LLMC_DTYPES = {3: torch.float32, 5: torch.bfloat16}
LLMC_HEADER_BYTES = 256 * 4


class PickledConfig:
    """Replaces the config object that build-nanogpt pickles: its values without its code."""


def read_checkpoint(path: str | Path) -> GPT:
    """Loads a checkpoint of nanoGPT, build-nanogpt or llm.c; the format is detected from the content.

    Padding rows of a vocabulary of 50,304 are dropped. A nanoGPT model keeps its exact GELU. The models of nanoGPT's
    first weeks used GPT-2's approximation, which their files do not record.

    Raises `FileNotFoundError` if there is no such file, `ValueError` if it has none of the three formats, is damaged, or
    holds anything but tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}: give a .pt or .bin checkpoint")
    with open(path, "rb") as file:
        magic = int.from_bytes(file.read(4), "little")
    return read_llmc(path) if magic == LLMC_MAGIC else read_pt(path)


def read_pt(path: Path) -> GPT:
    """Reads a checkpoint of nanoGPT (`model_args`) or build-nanogpt (`config`)."""
    names = ("__main__.GPTConfig", "train_gpt2.GPTConfig")
    with torch.serialization.safe_globals([(PickledConfig, name) for name in names]):
        checkpoint = load_pickle(path)
    if not isinstance(checkpoint, dict) or "model" not in checkpoint:
        raise ValueError(
            f"{path} is not a checkpoint of nanoGPT or build-nanogpt: give the .pt that its train script wrote"
        )
    values, gelu = checkpoint.get("model_args"), "none"
    if values is None:
        values, gelu = getattr(checkpoint.get("config"), "__dict__", {}), "tanh"
    try:
        rows = values["vocab_size"]
        config = GPTConfig(
            vocab_size=GPT2_VOCAB_SIZE if rows == 50304 else rows,
            n_positions=values["block_size"],
            **{name: values[name] for name in ("n_layer", "n_head", "n_embd")},
            bias=values.get("bias", True),
            gelu=gelu,
        )
    except KeyError as error:
        raise ValueError(
            f"{path} does not say its {error.args[0]}, so its model cannot be built: save it with the model's arguments, "
            "as nanoGPT and build-nanogpt do"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} describes no model: {error}") from error
    return build_gpt(named_tensors(checkpoint["model"], path).items(), config, rows, path)


def read_llmc(path: Path) -> GPT:
    """Reads a checkpoint of llm.c: a header, then each kind of parameter for all layers."""
    header = np.fromfile(path, "<i4", 256)
    if len(header) < 256:
        raise ValueError(f"{path} is shorter than llm.c's header: copy it again")
    if header[1] not in LLMC_DTYPES:
        raise ValueError(
            f"{path} is of llm.c's format version {header[1]}; only 3 (fp32) and 5 (bf16) load"
        )
    sizes = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
    *values, rows = header[2:8].tolist()
    try:
        config = GPTConfig(**dict(zip(sizes, values, strict=True)))
    except ValueError as error:
        raise ValueError(f"{path} describes no model: {error}") from error
    dtype, size = LLMC_DTYPES[int(header[1])], path.stat().st_size
    parameters = config.parameter_count + (rows - config.vocab_size) * config.n_embd
    expected = LLMC_HEADER_BYTES + parameters * dtype.itemsize
    if size != expected or rows < config.vocab_size:
        raise ValueError(
            f"{path} has {size:,} bytes, its header says {expected:,}: copy or save it again"
        )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in config.build().state_dict().items()}
    shapes["wte.weight"] = torch.Size([rows, config.n_embd])
    kinds = [name.removeprefix("h.0.") for name in shapes if name.startswith("h.0.")]
    blocks = [f"h.{i}.{kind}" for kind in kinds for i in range(config.n_layer)]
    names = ["wte.weight", "wpe.weight", *blocks, "ln_f.weight", "ln_f.bias"]
    storage = torch.from_file(str(path), size=size, dtype=torch.uint8)
    flat = storage[LLMC_HEADER_BYTES:].view(dtype)
    parts = flat.split([math.prod(shapes[name]) for name in names])
    tensors = ((name, part.view(shapes[name])) for name, part in zip(names, parts, strict=True))
    return build_gpt(tensors, config, rows, path)


def build_gpt(
    tensors: Iterable[tuple[str, torch.Tensor]], config: GPTConfig, rows: int, path: Path
) -> GPT:
    """Builds the model from Linear weights, without `torch.compile`'s prefix of the names and the padding of a vocabulary
    of `rows`."""

    def hf_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in tensors:
            name = key.removeprefix("_orig_mod.")
            if name.endswith(("wte.weight", "lm_head.weight")) and tensor.shape[:1] == (rows,):
                tensor = tensor[: config.vocab_size]
            yield name, tensor.t() if name.endswith(MATRICES) else tensor

    return build(config, from_hf(hf_tensors(), config, str(path)))

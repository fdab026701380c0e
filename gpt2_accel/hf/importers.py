"""Importers for other toolkits' checkpoints: nanoGPT's and build-nanogpt's `.pt`, llm.c's `.bin`."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gpt2_accel.hf import gpt2
from gpt2_accel.hf.convert import build, from_hf
from gpt2_accel.hf.safetensors_files import load_pickle
from gpt2_accel.models.gpt2 import GPT, GPTConfig
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE

# llm.c's header (write_model in its train_gpt2.py): 256 int32, the first of them the magic, then the
# version, which tells the dtype of the parameters.
LLMC_MAGIC = 20240326
LLMC_DTYPES = {3: torch.float32, 5: torch.bfloat16}
LLMC_HEADER_BYTES = 256 * 4


LINEAR = partial(gpt2.own_tensor, transposed=False)  # their matrices are those of Linear layers


class PickledConfig:
    """Replaces the config object that build-nanogpt pickles: its values without its code."""


def read_checkpoint(path: str | Path) -> GPT:
    """Loads a checkpoint of nanoGPT, build-nanogpt or llm.c; the format is detected from the content.

    Padding rows of a vocabulary of 50,304 are dropped. A nanoGPT model keeps its exact GELU. The models of nanoGPT's
    first weeks used GPT-2's approximation, which their files do not record.

    Raises `FileNotFoundError` if there is no such file, `ValueError` if it has none of the three formats, is damaged,
    or holds anything but tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a .pt or .bin checkpoint")
    with open(path, "rb") as file:
        magic = int.from_bytes(file.read(4), "little")
    return read_llmc(path) if magic == LLMC_MAGIC else read_pt(path)


def read_pt(path: Path) -> GPT:
    """Reads a checkpoint of nanoGPT (`model_args`) or build-nanogpt (`config`)."""
    names = ("__main__.GPTConfig", "train_gpt2.GPTConfig")
    with torch.serialization.safe_globals([(PickledConfig, name) for name in names]):
        checkpoint = load_pickle(path)
    if not isinstance(checkpoint, dict) or "model" not in checkpoint:
        raise ValueError(f"{path} is not a checkpoint of nanoGPT or build-nanogpt")
    if "model_args" in checkpoint:
        values, gelu = checkpoint["model_args"], "none"
    else:
        values, gelu = vars(checkpoint.get("config", PickledConfig())), "tanh"
    needed = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    if missing := [name for name in needed if not isinstance(values.get(name), int)]:
        raise ValueError(f"{path} does not say its {missing[0]}, so its model cannot be built")
    config = GPTConfig(
        vocab_size=GPT2_VOCAB_SIZE if values["vocab_size"] == 50304 else values["vocab_size"],
        n_positions=values["block_size"],
        n_layer=values["n_layer"],
        n_head=values["n_head"],
        n_embd=values["n_embd"],
        bias=values.get("bias", True),
        gelu=gelu,
    )
    tensors = unpadded(checkpoint["model"], config.vocab_size)
    return build(config, from_hf(tensors, config, str(path), own_tensor=LINEAR))


def unpadded(
    tensors: dict[str, torch.Tensor], vocab_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Removes `torch.compile`'s prefix from the names, and the vocabulary padding."""
    for key, tensor in tensors.items():
        name = key.removeprefix("_orig_mod.")
        padded = name.endswith(("wte.weight", "lm_head.weight"))
        yield name, tensor[:vocab_size] if padded else tensor


def read_llmc(path: Path) -> GPT:
    """Reads a checkpoint of llm.c: a header, then each kind of parameter for all layers."""
    header = np.fromfile(path, "<i4", 256)
    if len(header) < 256:
        raise ValueError(f"{path} is shorter than llm.c's header: copy it again")
    if header[1] not in LLMC_DTYPES:
        raise ValueError(
            f"{path} is of llm.c's format version {header[1]}; only 3 (fp32) and 5 (bf16) load"
        )
    n_positions, vocab_size, n_layer, n_head, n_embd, rows = header[2:8].tolist()
    config = GPTConfig(vocab_size, n_positions, n_layer, n_head, n_embd)
    dtype, C = LLMC_DTYPES[int(header[1])], n_embd
    layers = {
        "ln_1.weight": (C,),
        "ln_1.bias": (C,),
        "attn.c_attn.weight": (3 * C, C),
        "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C),
        "attn.c_proj.bias": (C,),
        "ln_2.weight": (C,),
        "ln_2.bias": (C,),
        "mlp.c_fc.weight": (4 * C, C),
        "mlp.c_fc.bias": (4 * C,),
        "mlp.c_proj.weight": (C, 4 * C),
        "mlp.c_proj.bias": (C,),
    }
    shapes = {"wte.weight": (rows, C), "wpe.weight": (n_positions, C)}
    shapes |= {f"h.{i}.{kind}": shape for kind, shape in layers.items() for i in range(n_layer)}
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    sizes = [math.prod(shape) for shape in shapes.values()]
    expected = LLMC_HEADER_BYTES + sum(sizes) * dtype.itemsize
    if path.stat().st_size != expected:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, its header says {expected}")
    storage = torch.from_file(str(path), size=expected, dtype=torch.uint8)
    flat = storage[LLMC_HEADER_BYTES:].view(dtype)
    parts = zip(shapes.items(), flat.split(sizes), strict=True)
    tensors = unpadded({name: part.view(shape) for (name, shape), part in parts}, vocab_size)
    return build(config, from_hf(tensors, config, str(path), own_tensor=LINEAR))

"""Converts between `GPT` and Hugging Face's GPT-2: state dicts, directories, Hub ids.

A saved directory is an HF model: `AutoModelForCausalLM.from_pretrained` opens it. The two formats differ in four ways.
HF's `Conv1D` stores the transpose of a Linear weight, so four matrices per block are transposed. HF always has biases,
so a model without biases writes zeros and `"bias": false` in `config.json`. Vocabulary padding is not stored. The tied
head is not stored.
"""

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import GenerationConfig, GPT2Config, PreTrainedTokenizerBase

from gpt2_accel.files import atomic_files, parse_json
from gpt2_accel.hf import hub
from gpt2_accel.hf.model_card import Training, model_card
from gpt2_accel.hf.safetensors_files import (
    MAX_SHARD_SIZE,
    read_tensors,
    weight_files,
    write_weights,
)
from gpt2_accel.models.gpt2 import GPT, GPTConfig
from gpt2_accel.tokenizer import GPT2_VOCAB_SIZE, load_tokenizer, save_tokenizer

PREFIX = "transformer."
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
LEGACY_BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks in old files
# HF's activation names -> `GPTConfig.gelu`; the first name of each value is the one written.
ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "none"}
# The values of HF's options for which its GPT-2 equals `models/gpt2.py`.
SUPPORTED = {
    "activation_function": tuple(ACTIVATIONS),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def to_hf(model: GPT) -> dict[str, torch.Tensor]:
    """Returns the weights under HF's names and shapes, as views where possible, so not all are contiguous."""
    config = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "wte.weight":
            tensor = tensor[: config.vocab_size]
        if name.endswith(TRANSPOSED):
            tensor = tensor.t()
        tensors[PREFIX + name] = tensor
        if name.endswith(".weight") and not config.bias and not name.startswith(("wte", "wpe")):
            bias = PREFIX + name.removesuffix("weight") + "bias"
            tensors[bias] = tensor.new_zeros(tensor.shape[-1])
    return tensors


def from_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: GPTConfig,
    source: str = "the state dict",
    *,
    transposed: bool = True,
) -> dict[str, torch.Tensor]:
    """Converts HF's GPT-2 weights to the fp32 state dict of a `GPT` of this config, on CPU, in its own memory.

    Keys may have the `transformer.` prefix; the mask buffers of old files are ignored. `source` names the file in
    errors. With `transposed` False the four matrices of a block are Linear weights, as in nanoGPT. Raises `ValueError`
    for a missing, unknown or misshapen tensor, an untied head, or a nonzero bias if `config.bias` is False.
    """
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in config.build().state_dict().items()}
    expected["wte.weight"] = torch.Size([config.vocab_size, config.n_embd])
    state, head = {}, None
    for key, tensor in tensors:
        name = key.removeprefix(PREFIX)
        if name.endswith(LEGACY_BUFFERS):
            continue
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"{key} in {source} is {tensor.dtype}; only fp32, fp16 and bf16 can load"
            )
        if name == "lm_head.weight":
            head = tensor
            continue
        if not config.bias and name.endswith(".bias"):
            if tensor.any():
                raise ValueError(f'{source} says "bias": false, but {key} is not zero')
            continue
        if name not in expected:
            raise ValueError(f"{source} has a tensor that no GPT-2 of this shape has: {key}")
        if transposed and name.endswith(TRANSPOSED):
            tensor = tensor.t()
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{key} in {source} does not fit its config: as a Linear weight it has the shape "
                f"{tuple(tensor.shape)}, expected {tuple(expected[name])}"
            )
        rows = config.padded_vocab_size if name == "wte.weight" else len(tensor)
        state[name] = torch.zeros(rows, *tensor.shape[1:])
        state[name][: len(tensor)] = tensor
    if missing := [name for name in expected if name not in state]:
        raise ValueError(
            f"{source} lacks {len(missing)} tensors, the first is {PREFIX}{missing[0]}"
        )
    if head is not None and not torch.equal(
        head.to(torch.float32), state["wte.weight"][: config.vocab_size]
    ):
        raise ValueError(
            f"{source} has an lm_head that is not tied to wte; only tied heads can load"
        )
    return state


def build(config: GPTConfig, state: dict[str, torch.Tensor]) -> GPT:
    """Builds a `GPT` that uses the tensors of a state dict without copying them."""
    with torch.device("meta"):
        model = config.build()
    model.load_state_dict(state, assign=True)
    return model


def save_pretrained(
    model: GPT,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    training: Training | None = None,
    name: str | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Writes an HF model directory: weights, config, generation config, model card, tokenizer if given.

    `training` is what the card says of how the model was made, `name` what it calls the model, by default the
    directory. Weights above `max_shard_size` (bytes, or
    such as "5GB") go into several files with an index. Each file is replaced whole, so a directory that
    is in use never holds half a file. It takes no second copy of the weights in memory.
    Raises `ValueError` if the tokenizer's vocabulary is not the model's, and that of `save_tokenizer`.
    """
    config = model.config
    if tokenizer is not None and len(tokenizer) != config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {config.vocab_size}: "
            "save the model with the tokenizer it was trained with"
        )
    # OpenAI's vocabulary says where a text ends even without its tokenizer.
    openai = GPT2_VOCAB_SIZE - 1 if config.vocab_size == GPT2_VOCAB_SIZE else None
    end_of_text = openai if tokenizer is None else tokenizer.eos_token_id
    with atomic_files(directory) as folder:
        written = write_weights(folder, to_hf(model), max_shard_size)
        hf_config(config, end_of_text).save_pretrained(folder)
        # A bare pipeline call asks for 256 new tokens, and fails where the positions end before.
        GenerationConfig(
            max_new_tokens=max(1, min(256, config.n_positions // 2)),
            do_sample=True,
            top_k=min(50, config.vocab_size),
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            pad_token_id=end_of_text,
        ).save_pretrained(folder)
        card = model_card(name or str(directory), describe(config), training)
        (folder / "README.md").write_text(card, encoding="utf-8")
        if tokenizer is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.model_max_length = config.n_positions
            save_tokenizer(tokenizer, folder, directory)
            tokenizer.backend_tokenizer.model.save(str(folder))  # vocab.json, merges.txt
    for old in Path(directory).glob("model*.safetensors*"):
        if old.name not in written:  # shards of what was there before, and their index
            old.unlink()


def describe(config: GPTConfig) -> str:
    """Describes the model in one sentence, for its card."""
    return (
        f"A GPT-2 of {config.parameter_count:,} parameters: {config.n_layer} layers, {config.n_head} "
        f"heads, {config.n_embd} wide, {config.n_positions:,} positions, a vocabulary of "
        f"{config.vocab_size:,}."
    )


def hf_config(config: GPTConfig, end_of_text: int | None) -> GPT2Config:
    """Returns HF's config of the same model. Readers outside transformers need `n_ctx`."""
    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.n_positions,
        n_ctx=config.n_positions,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        bias=config.bias,
        activation_function=next(hf for hf, own in ACTIVATIONS.items() if own == config.gelu),
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        resid_pdrop=config.dropout,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        architectures=["GPT2LMHeadModel"],
        dtype="float32",
    )


def from_pretrained(name: str | Path, dropout: float = 0.0) -> GPT:
    """Loads an HF GPT-2 as a `GPT`, in fp32 on CPU, in training mode.

    `name` is a directory or a Hub id, `USER/NAME` or `USER/NAME@REVISION`. `dropout` is a training setting; the value
    in the file is ignored.

    Raises `FileNotFoundError` if there is no such directory or Hub repo, `ValueError` if it is not a
    GPT-2 that `models/gpt2.py` can be, or is damaged; the message names the file or tensor. Files are never
    run as code.
    """
    directory = local_directory(name)
    config, files = find_model(directory, dropout)
    return build(config, from_hf(read_tensors(files), config, str(directory)))


def local_directory(name: str | Path) -> Path:
    """Returns `name` if it is a directory, else the local copy of that Hub repository."""
    if Path(name).is_dir():
        return Path(name)
    directory = hub.download(str(name), hub.MODEL_FILES)
    if not any(directory.glob("*.safetensors")):
        directory = hub.download(str(name), (*hub.MODEL_FILES, "pytorch_model*.bin*"))
    return directory


def find_model(directory: Path, dropout: float = 0.0) -> tuple[GPTConfig, list[Path]]:
    """Returns the shape and the weight files of a directory's model. Raises errors of `from_pretrained` that need no
    reading of tensors."""
    config = read_config(directory, dropout)
    files = weight_files(directory)
    needed = 2 * config.parameter_count  # bytes, in half precision
    if needed > sum(path.stat().st_size for path in files):
        raise ValueError(
            f"{directory / 'config.json'} asks for {needed // 2:,} parameters, more than "
            f"{', '.join(path.name for path in files)} can hold: one of them is not of this model, or cut"
        )
    return config, files


def model_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model, an HF directory or Hub id, after checking that the model can be trained.

    Raises the errors of `find_model` and `load_tokenizer`."""
    directory = local_directory(name)
    find_model(directory)
    return load_tokenizer(directory)


def read_config(directory: Path, dropout: float = 0.0) -> GPTConfig:
    """Reads the shape in a directory's `config.json`. Raises `ValueError` if `models/gpt2.py` cannot be that model."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {directory} is not a Hugging Face model")
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    model_type = values.get("model_type") if isinstance(values, dict) else None
    if model_type != "gpt2":
        raise ValueError(f"{path} is of the type {model_type!r}; only gpt2 can load")
    values = {**GPT2Config().to_dict(), "bias": True, **values}
    sizes = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
    for key, kind in [(key, int) for key in sizes] + [("bias", bool)]:
        if type(values[key]) is not kind:
            raise ValueError(f"{path} has {key} = {values[key]!r}; expected {kind.__name__}")
    for key, allowed in SUPPORTED.items():
        if values[key] not in allowed:
            raise ValueError(f"{path} has {key} = {values[key]!r}; only {allowed[0]!r} can load")
    if values["n_inner"] not in (None, 4 * values["n_embd"]):
        raise ValueError(f"{path} has n_inner = {values['n_inner']}; only 4 * n_embd can load")
    gelu = ACTIVATIONS[values["activation_function"]]
    shape = {key: values[key] for key in (*sizes, "bias")}
    try:
        return GPTConfig(**shape, dropout=dropout, gelu=gelu)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

"""Between this toolkit's `GPT` and Hugging Face's GPT-2: state dicts, directories, Hub ids.

A saved directory is an HF model: `AutoModelForCausalLM.from_pretrained` opens it. Four things differ
between the two sides. HF's `Conv1D` stores the transpose of a Linear weight, so four matrices per
block are transposed. HF always has biases, so a model without them writes zeros and says
`"bias": false` in `config.json`. The vocabulary's pad rows stay on this side. The tied head is not
stored.
"""

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import GenerationConfig, GPT2Config, PreTrainedTokenizerBase

from gpt2_accel.files import atomic_files
from gpt2_accel.model import GPT, GPTConfig

WEIGHTS = "model.safetensors"
PREFIX = "transformer."
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
LEGACY_BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks in old files
# Values of HF's options under which its GPT-2 is the model of `model.py`.
SUPPORTED = {
    "activation_function": ("gelu_pytorch_tanh", "gelu_new"),  # two names of one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def to_hf(model: GPT) -> dict[str, torch.Tensor]:
    """The weights under HF's names and shapes, contiguous, on their device, in their dtype."""
    config = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "wte.weight":
            tensor = tensor[: config.vocab_size]
        if name.endswith(TRANSPOSED):
            tensor = tensor.t()
        tensors[PREFIX + name] = tensor.contiguous()
        if name.endswith(".weight") and not config.bias and not name.startswith(("wte", "wpe")):
            bias = PREFIX + name.removesuffix("weight") + "bias"
            tensors[bias] = tensor.new_zeros(tensor.shape[-1])
    return tensors


def from_hf(
    tensors: Iterable[tuple[str, torch.Tensor]], config: GPTConfig, source: str = "the state dict"
) -> dict[str, torch.Tensor]:
    """HF's GPT-2 weights as the fp32 state dict of a `GPT` of this config, on CPU.

    Takes keys with or without the `transformer.` prefix and ignores old files' mask buffers. `source`
    names the file in errors. Raises `ValueError` for a missing, unknown or misshapen tensor, a head
    that is not tied to the embedding, or a bias that is not zero where `config.bias` is False.
    """
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in GPT(config).state_dict().items()}
    expected["wte.weight"] = torch.Size([config.vocab_size, config.n_embd])
    state, head = {}, None
    for key, tensor in tensors:
        name = key.removeprefix(PREFIX)
        if name.endswith(LEGACY_BUFFERS):
            continue
        if name == "lm_head.weight":
            head = tensor
            continue
        if not config.bias and name.endswith(".bias"):
            if tensor.any():
                raise ValueError(f'{source} says "bias": false, but {key} is not zero')
            continue
        if name not in expected:
            raise ValueError(f"{source} has a tensor that no GPT-2 of this shape has: {key}")
        if name.endswith(TRANSPOSED):
            tensor = tensor.t()
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{key} in {source} does not fit config.json: as a Linear weight it has the shape "
                f"{tuple(tensor.shape)}, expected {tuple(expected[name])}"
            )
        state[name] = tensor.to(torch.float32).contiguous()
    if missing := [name for name in expected if name not in state]:
        raise ValueError(
            f"{source} lacks {len(missing)} tensors, the first is {PREFIX}{missing[0]}"
        )
    if head is not None and not torch.equal(head.to(torch.float32), state["wte.weight"]):
        raise ValueError(
            f"{source} has an lm_head that is not tied to wte; only tied heads can load"
        )
    padding = config.padded_vocab_size - config.vocab_size
    state["wte.weight"] = torch.nn.functional.pad(state["wte.weight"], (0, 0, 0, padding))
    return state


def save_pretrained(
    model: GPT, directory: str | Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Writes an HF model directory: weights, config, generation config and, if given, the tokenizer.

    Each file is replaced whole, so a directory that is in use never holds half a file.
    Raises `ValueError` if the tokenizer's vocabulary is not the model's.
    """
    config = model.config
    if tokenizer is not None and len(tokenizer) != config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {config.vocab_size}: "
            "save the model with the tokenizer it was trained with"
        )
    # OpenAI's vocabulary says where a text ends even without its tokenizer.
    openai = 50256 if config.vocab_size == 50257 else None
    end_of_text = openai if tokenizer is None else tokenizer.eos_token_id
    with atomic_files(directory) as folder:
        save_file(to_hf(model), folder / WEIGHTS, metadata={"format": "pt"})
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
        if tokenizer is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.model_max_length = config.n_positions
            tokenizer.save_pretrained(folder)


def hf_config(config: GPTConfig, end_of_text: int | None) -> GPT2Config:
    """HF's config of the same model; `n_ctx` is there for readers outside transformers."""
    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.n_positions,
        n_ctx=config.n_positions,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        bias=config.bias,
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        resid_pdrop=config.dropout,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        architectures=["GPT2LMHeadModel"],
        dtype="float32",
    )


def from_pretrained(name: str | Path, dropout: float = 0.0) -> GPT:
    """A `GPT` with the weights of an HF GPT-2 directory or Hub id, in fp32 on CPU, in training mode.

    `dropout` is a setting of the training to come, so the file's is not taken over.

    Raises `FileNotFoundError` if there is no such directory or Hub repo, `ValueError` if it is not a
    GPT-2 that `model.py` can be, or is damaged; the message names the file or tensor.
    """
    directory = local_directory(name)
    config = read_config(directory, dropout)
    files = weight_files(directory)
    state = from_hf(read_tensors(files), config, str(directory))
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict(state, assign=True)
    return model


def local_directory(name: str | Path) -> Path:
    """`name` if it is a directory, else the local copy of the Hub repo of that id, downloaded if need be."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(str(name), allow_patterns=["*.json", "*.txt", "*.safetensors"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{name} is neither a folder nor a model on the Hub that can be reached: check its name "
            f"and the connection ({str(error).splitlines()[0]})"
        ) from error


def read_config(directory: Path, dropout: float = 0.0) -> GPTConfig:
    """The shape in a directory's `config.json`; raises `ValueError` where `model.py` is not that model."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {directory} is not a Hugging Face model")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if values.get("model_type") != "gpt2":
        raise ValueError(f"{path} is of the type {values.get('model_type')!r}; only gpt2 can load")
    values = {**GPT2Config().to_dict(), **values}
    for key, allowed in SUPPORTED.items():
        if values[key] not in allowed:
            raise ValueError(f"{path} has {key} = {values[key]!r}; only {allowed[0]!r} can load")
    if values["n_inner"] not in (None, 4 * values["n_embd"]):
        raise ValueError(f"{path} has n_inner = {values['n_inner']}; only 4 * n_embd can load")
    shape = {
        key: values[key] for key in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
    }
    return GPTConfig(**shape, bias=values.get("bias", True), dropout=dropout)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory: one, or those that its index lists."""
    index = directory / f"{WEIGHTS}.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / name for name in sorted(names)]
    if not (directory / WEIGHTS).is_file():
        raise FileNotFoundError(
            f"{directory} holds no {WEIGHTS}: only safetensors weights can load"
        )
    return [directory / WEIGHTS]


def read_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of some safetensors files, one at a time."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): download or save it again") from error

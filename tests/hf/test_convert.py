"""GPT-2 directories: from transformers to here and back."""

import filecmp
import json
import shutil

import pytest
import torch
from conftest import assert_close, randomized, read_json, refused
from families import own_shape
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, pipeline

from gpt2_accel import GPT, GPTConfig, from_pretrained, save_pretrained
from gpt2_accel.config import ARCHITECTURES
from gpt2_accel.hf.safetensors_files import WEIGHTS
from gpt2_accel.tokenizer import byte_tokenizer

SHAPE = {"vocab_size": 257, "n_positions": 32, "n_layer": 2, "n_head": 4, "n_embd": 64}
INPUT_IDS = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))


def hf_model(**changes) -> GPT2LMHeadModel:
    config = GPT2Config(**SHAPE, bos_token_id=256, eos_token_id=256, **changes)
    return randomized(GPT2LMHeadModel(config))


@torch.no_grad()
def test_files_are_those_of_transformers(tmp_path):
    hf_model(activation_function="gelu_pytorch_tanh").save_pretrained(tmp_path / "hf")
    save_pretrained(from_pretrained(tmp_path / "hf"), tmp_path / "ours")
    assert filecmp.cmp(tmp_path / "hf" / WEIGHTS, tmp_path / "ours" / WEIGHTS, shallow=False)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_logits_of_our_model_are_those_of_transformers(tmp_path, bias):
    ours = randomized(GPT(GPTConfig(**SHAPE, bias=bias)))
    save_pretrained(ours, tmp_path)
    hf, info = GPT2LMHeadModel.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(info.values()), info
    # llama.cpp's converter needs `n_ctx`; vLLM knows the activation by this name.
    assert hf.config.n_ctx == 32
    assert hf.config.activation_function == "gelu_pytorch_tanh"
    assert_close(hf.eval()(INPUT_IDS).logits, ours(INPUT_IDS))
    again = from_pretrained(tmp_path)
    assert again.config == ours.config
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


INDEX = "model.safetensors.index.json"
# The files of a directory: `old` model in shards, `new` in one file, unless a state says otherwise.
STATES = {
    "one file": lambda d: [path.unlink() for path in d.glob("model*") if path.name != WEIGHTS],
    "older shards beside it": lambda d: None,
    "their damaged index beside it": lambda d: (d / INDEX).write_text("{"),
    "damaged beside shards": lambda d: (d / WEIGHTS).write_bytes(b""),
    "shards": lambda d: (d / WEIGHTS).unlink(),
    "a shard missing": lambda d: [(d / name).unlink() for name in (WEIGHTS, shard(d))],
    "a shard damaged": lambda d: [(d / WEIGHTS).unlink(), (d / shard(d)).write_bytes(b"")],
    "shards without an index": lambda d: [(d / name).unlink() for name in (WEIGHTS, INDEX)],
    "no config": lambda d: (d / "config.json").unlink(),
    "index of nothing": lambda d: [(d / WEIGHTS).unlink(), (d / INDEX).write_text("{}")],
    "index of a list": lambda d: [(d / WEIGHTS).unlink(), (d / INDEX).write_text("[]")],
    "the tied head only": lambda d: rename_tensor(d / WEIGHTS),
}


def rename_tensor(file):
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, file, {"format": "pt"})


def shard(directory):
    return min(path.name for path in directory.glob("model-*"))


@torch.no_grad()
def test_a_directory_opens_or_is_refused_as_in_transformers(tmp_path):
    for name in ("old", "new"):
        model = hf_model(activation_function="gelu_new")
        model.save_pretrained(tmp_path / name, max_shard_size="100KB" if name == "old" else "5GB")
    opened = 0
    for state, change in STATES.items():
        directory = shutil.copytree(tmp_path / "old", tmp_path / state)
        shutil.copy(tmp_path / "new" / WEIGHTS, directory)
        change(directory)
        try:
            theirs = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32).eval()
        except Exception:  # transformers raises several types
            with refused(str(directory)):
                from_pretrained(directory)
        else:
            ours = from_pretrained(directory).eval()
            opened += 1
            assert_close(ours(INPUT_IDS), theirs(INPUT_IDS).logits)
    assert opened == 5
    save_pretrained(ours, tmp_path / "older shards beside it")
    files = sorted((tmp_path / "older shards beside it").glob("model*"))
    assert [path.name for path in files] == [WEIGHTS]


def test_a_directory_whose_weights_transformers_changes_is_refused(tmp_path):
    hf_model().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    with refused("adapter of peft"):
        from_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    config = read_json(tmp_path / "config.json") | {"transformers_weights": "b.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("'b.safetensors'"):
        from_pretrained(tmp_path)


def test_pipeline_generates_with_a_short_context(tmp_path):
    model = GPT(GPTConfig(257, n_positions=8, n_layer=1, n_head=2, n_embd=8))
    save_pretrained(model, tmp_path, byte_tokenizer())
    [generated] = pipeline("text-generation", model=str(tmp_path))("Hi")
    assert generated["generated_text"].startswith("Hi")


def edit(folder, **tensors):
    """Changes tensors of a saved model; None removes one."""
    stored = load_file(folder / WEIGHTS) | tensors
    save_file({name: t for name, t in stored.items() if t is not None}, folder / WEIGHTS)


def test_prefixless_keys_mask_buffers_a_tied_head_and_half_precision_load(tmp_path):
    hf_model().save_pretrained(tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    tensors = {key.removeprefix("transformer."): t.half() for key, t in stored.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, tmp_path / WEIGHTS)
    state = from_pretrained(tmp_path).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["h.1.mlp.c_fc.weight"], tensors["h.1.mlp.c_fc.weight"].t().float())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("transformer.wpe.weight", torch.ones(3, 3), "wpe.weight.*does not fit"),
        ("transformer.wpe.weight", torch.ones(32, 64, dtype=torch.int8), "wpe.weight .*int8"),
        ("lm_head.weight", torch.ones(257, 64), "not tied"),
        ("transformer.h.1.ln_2.bias", None, "h.1.ln_2.bias, which its config needs"),
        ("transformer.h.9.ln_2.bias", torch.ones(64), "h.9.ln_2.bias, which its config does not"),
    ],
)
def test_a_directory_with_wrong_tensors_is_refused(tmp_path, name, tensor, message):
    hf_model().save_pretrained(tmp_path)
    edit(tmp_path, **{name: tensor})
    with refused(message):
        from_pretrained(tmp_path)


def test_a_bias_in_a_model_without_biases_is_refused(tmp_path):
    save_pretrained(GPT(GPTConfig(**SHAPE, bias=False)), tmp_path)
    edit(tmp_path, **{"transformer.h.0.ln_1.bias": torch.ones(64)})
    with refused("h.0.ln_1.bias is not zero"):
        from_pretrained(tmp_path)


def test_a_tokenizer_with_more_tokens_than_rows_is_refused_before_anything_is_written(tmp_path):
    model = GPT(GPTConfig(**(SHAPE | {"vocab_size": 256})))
    with refused("257 tokens"):
        save_pretrained(model, tmp_path / "out", byte_tokenizer())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_trained_model_keeps_the_generation_settings_of_its_base(architecture, tmp_path):
    tokenizer = byte_tokenizer()
    save_pretrained(own_shape(architecture).build(), tmp_path / "base", tokenizer)
    given = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    file = tmp_path / "base/generation_config.json"
    file.write_text(json.dumps(given | {"eos_token_id": 7}))
    save_pretrained(from_pretrained(tmp_path / "base"), tmp_path / "saved", tokenizer)
    saved = GenerationConfig.from_pretrained(tmp_path / "saved").to_diff_dict()
    ids = {"eos_token_id": 256, "pad_token_id": 256}
    assert saved.items() >= (given | ids).items()
    file.write_text("{")
    with refused("generation_config.json"):
        from_pretrained(tmp_path / "base")

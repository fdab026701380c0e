"""Saved GPT-2 directories have what programs other than transformers require (see docs/hub.md).

llama.cpp (convert_hf_to_gguf.py) reads `n_ctx`, `n_embd`, `n_head`, `n_layer`, `layer_norm_epsilon` and
`architectures` from config.json, assumes an MLP of 4 x n_embd, transposes the four Conv1D matrices, and maps tensor
names by gguf's table. vLLM (vllm/model_executor/models/gpt2.py) reads the fields below, transposes the same matrices,
and has a list of activation names. Both require safetensors with the metadata `{"format": "pt"}` and without unknown tensors.
"""

import json

import pytest
from safetensors import safe_open

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.tokenizer import train_bpe


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tokenizer = train_bpe(["the cat sat on the mat, the rat saw that"] * 2, 265)
    model = GPT(GPTConfig(len(tokenizer), n_positions=32, n_layer=2, n_head=2, n_embd=16)).eval()
    save_pretrained(model, path, tokenizer)
    return path, model


def test_config_fields_tensor_shapes_and_tokenizer_files(saved):
    path, _ = saved
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["model_type"] == "gpt2"
    assert config["n_ctx"] == config["n_positions"] == 32
    assert config["layer_norm_epsilon"] == 1e-5 and config["dtype"] == "float32"
    assert config["n_inner"] is None  # 4 * n_embd
    assert config["activation_function"] == "gelu_pytorch_tanh"  # vLLM's name
    assert config["tie_word_embeddings"] is True
    sizes = {"vocab_size": 265, "n_embd": 16, "n_head": 2, "n_layer": 2}
    assert config.items() >= sizes.items()
    vllm_refuses = (
        "add_cross_attention",
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
    )
    assert not any(config[name] for name in vllm_refuses)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert shapes["transformer.wte.weight"] == (265, 16)  # no pad rows
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (16, 48)  # Conv1D: in, out
    assert shapes["transformer.h.1.mlp.c_proj.weight"] == (64, 16)
    assert not any("lm_head" in name or "attn.masked_bias" in name for name in shapes)
    vocab = json.loads((path / "vocab.json").read_text())
    assert sorted(vocab.values()) == list(range(265))
    assert (path / "merges.txt").read_text().startswith("#version")

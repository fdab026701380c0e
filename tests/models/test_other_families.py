"""Families of `transformers` with something of their own: buffers, positions, kinds of layers."""

import json

import pytest
import torch
from conftest import losses, refused, run
from families import family_model, save_family
from safetensors.torch import load, save_file
from transformers import AutoModelForCausalLM

from gpt2_accel import from_pretrained
from gpt2_accel.generation.sampling import Sampling, tokens
from gpt2_accel.models import convert_parameters
from gpt2_accel.models.any_model import AnyConfig, documents_cross

DECODER = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "d_model": 32}
JAMBA = {"attn_layer_period": 2, "use_mamba_kernels": False, "mamba_d_state": 8, "num_experts": 2}


@pytest.mark.parametrize("kind", ["olmo2", "gemma3_text"])
def test_weights_in_bf16_compute_what_the_class_computes(kind, tmp_path):
    """The class keeps its rotary frequencies in fp32."""
    start = save_family(kind, tmp_path / "start", max_position_embeddings=1024)
    ids = torch.randint(257, (1, 1000))
    expected = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)(ids).logits
    loaded = from_pretrained(start)
    convert_parameters(loaded, torch.bfloat16)
    assert torch.equal(loaded(ids), expected)


def test_rows_of_several_lengths_equal_each_alone_where_the_class_counts_positions(tmp_path):
    save_family("bart", tmp_path, is_decoder=True, is_encoder_decoder=False, **DECODER)
    model = from_pretrained(tmp_path).eval()
    with torch.no_grad():
        for weight in model.parameters():  # else its samples repeat one token
            weight.add_(torch.randn_like(weight) / 10)
    prompts = [[5, 9, 33, 7, 200, 1, 2], [99, 4], [250]]
    rows = zip(*tokens(model, prompts, Sampling(max_new_tokens=12, temperature=0)), strict=True)
    for prompt, row in zip(prompts, rows, strict=True):
        expected = list(prompt)
        for _ in row:
            expected.append(model(torch.tensor([expected]))[0, -1].argmax().item())
        assert expected[len(prompt) :] == list(row)


@pytest.mark.parametrize("offset", [0, 1])
def test_documents_cross_in_any_layer(offset):
    """Jamba has layers of attention and of Mamba; only attention keeps documents apart."""
    model = family_model("jamba", attn_layer_offset=offset, **JAMBA)
    assert documents_cross(AnyConfig(model.config.to_dict()))


def test_directories_that_the_class_cannot_open_are_refused(tmp_path):
    start = save_family("stablelm", tmp_path)
    file, config = start / "model.safetensors", start / "config.json"
    tensors = load(file.read_bytes())
    values = json.loads(config.read_text())
    file.write_bytes(file.read_bytes()[:5000])
    with refused(str(start)):
        from_pretrained(start)
    save_file(tensors | {"lm_head.weight": torch.zeros(100, 32)}, file, {"format": "pt"})
    with refused("lm_head.weight"):
        from_pretrained(start)
    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps(values | {"num_hidden_layers": 1}))
    assert "model.layers.1." in from_pretrained(start).config.note


def test_a_run_in_bf16_resumes_exactly_and_only_in_bf16(tiny, tmp_path):
    start = save_family("stablelm", tmp_path / "start")
    settings = {"init_from": str(start), "dtype": "bfloat16", "save_every": 4}
    alone = run(tiny("alone", **settings))
    settings["resume_from"] = str(tmp_path / "alone/checkpoint-4")
    assert losses(run(tiny("resumed", **settings))) == losses(alone)[4:]
    with refused("dtype bfloat16 -> float32 from update 4: resume with the original"):
        run(tiny("other", **settings | {"dtype": "float32"}))

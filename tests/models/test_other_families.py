"""Families of `transformers` with something of their own: buffers, positions, kinds of layers."""

import json

import pytest
import torch
from conftest import losses, refused, run
from families import family_model, save_family
from safetensors.torch import load, save_file
from transformers import AutoModelForCausalLM

from gpt2_accel import from_pretrained
from gpt2_accel.config import TrainConfig, parse_config
from gpt2_accel.generation.sampling import Sampling, tokens
from gpt2_accel.hf.convert import configured_shape, read_config
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
    found = from_pretrained(start)
    convert_parameters(found, torch.bfloat16)
    assert torch.equal(found(ids), expected)


def test_rows_of_several_lengths_equal_each_alone_where_the_class_counts_positions(tmp_path):
    save_family("bart", tmp_path, is_decoder=True, is_encoder_decoder=False, **DECODER)
    model = from_pretrained(tmp_path).eval()
    with torch.no_grad():
        for weight in model.parameters():  # else its samples repeat one token
            weight.add_(torch.randn_like(weight) / 10)
    prompts = [[5, 9, 33, 7, 200, 1, 2], [99, 4], [250]]
    sampling = Sampling(max_new_tokens=12, temperature=0)
    together = list(zip(*tokens(model, prompts, sampling), strict=True))
    for prompt, row in zip(prompts, together, strict=True):
        assert [ids[0] for ids in tokens(model, [prompt], sampling)] == list(row)
        expected = list(prompt)
        for _ in row:
            expected.append(model(torch.tensor([expected]))[0, -1].argmax().item())
        assert expected[len(prompt) :] == list(row)


def test_a_class_with_a_cache_of_its_own_reads_its_rows_again():
    config = family_model("minimax", num_local_experts=2, num_experts_per_tok=1).config
    model = AnyConfig(config.to_dict()).build().eval()
    prompts = [[5, 9, 33], [7]]
    found = list(zip(*tokens(model, prompts, Sampling(6, temperature=0)), strict=True))
    for prompt, row in zip(prompts, found, strict=True):
        expected = model.inner.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert expected[0, len(prompt) :].tolist() == list(row)


@pytest.mark.parametrize("offset", [0, 1])
def test_documents_cross_in_any_layer(offset):
    """Jamba's layers are attention or Mamba by their number; attention alone keeps documents apart."""
    model = family_model("jamba", attn_layer_offset=offset, **JAMBA)
    assert documents_cross(AnyConfig(model.config.to_dict()))


def test_layers_of_each_kind_are_tried(tmp_path):
    kinds = ["dense", "sparse", "sparse", "sparse"]
    changes = {"num_hidden_layers": 4, "mlp_layer_types": kinds, "moe_intermediate_size": 32}
    changes["layer_types"] = ["full_attention"] * 4
    save_family("exaone_moe", tmp_path, num_experts=4, num_experts_per_tok=2, **changes)
    shape = read_config(tmp_path)
    assert shape.sample().values["mlp_layer_types"] == ["dense", "sparse"]
    assert shape.with_depth(3).n_layer == 3
    # GPT-Neo's kinds are in a form of their own: all its layers are tried.
    neo = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4}
    save_family("gpt_neo", tmp_path / "neo", **neo)
    assert read_config(tmp_path / "neo").sample().n_layer == 2


def test_a_config_with_infinity_is_read(tmp_path):
    save_family("bamba", tmp_path, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert read_config(tmp_path).architecture == "bamba"


def test_a_class_that_fails_on_its_config_is_refused_by_name(tmp_path):
    save_family("deepseek_v3", tmp_path, num_key_value_heads=2)  # it needs as many as heads
    with refused("DeepseekV3ForCausalLM fails on a text with this config"):
        read_config(tmp_path)


def test_directories_that_the_class_cannot_open_are_refused(tmp_path):
    start = save_family("stablelm", tmp_path)
    file, config = start / "model.safetensors", start / "config.json"
    tensors, values = load(file.read_bytes()), json.loads(config.read_text())
    file.write_bytes(file.read_bytes()[:5000])
    with refused(f"transformers cannot open {start}: "):
        from_pretrained(start)
    save_file(tensors | {"lm_head.weight": torch.zeros(100, 32)}, file, {"format": "pt"})
    with refused("lm_head.weight is missing or has another shape"):
        from_pretrained(start)
    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps(values | {"num_hidden_layers": 1}))
    assert "it does not have model.layers.1." in from_pretrained(start).config.note
    config.write_text("{")
    with refused(f"{config}: Expecting property name"):
        from_pretrained(start)


def test_a_router_loss_of_a_model_without_experts_is_refused(tiny, tmp_path):
    start = save_family("olmo2", tmp_path / "start")
    with refused("leave out --router_aux_loss"):
        run(tiny("run", init_from=str(start), router_aux_loss=0.1))


def test_a_run_in_bf16_resumes_exactly_and_only_in_bf16(tiny, tmp_path):
    start = save_family("stablelm", tmp_path / "start")
    settings = {"init_from": str(start), "dtype": "bfloat16", "save_every": 4}
    alone = run(tiny("alone", **settings))
    settings["resume_from"] = str(tmp_path / "alone/checkpoint-4")
    assert losses(run(tiny("resumed", **settings))) == losses(alone)[4:]
    with refused("has weights in bfloat16, not float32: resume with --dtype bfloat16"):
        run(tiny("other", **settings | {"dtype": "float32"}))


def test_another_class_for_the_same_model_is_refused(tiny, tmp_path):
    """Its parameters have other names, and other shapes."""
    with refused("--attn_implementation is for a class of transformers"):
        run(tiny("new", attn_implementation="eager"))
    start = tmp_path / "start"
    run(tiny("start", max_steps=1))
    for attention, other in ((None, "eager"), ("eager", None)):
        folder = tmp_path / f"{attention}"
        settings = {"init_from": str(start), "max_steps": 1}
        run(tiny(folder, attn_implementation=attention, **settings))
        settings["resume_from"] = str(folder / "checkpoint-1")
        with refused("which the model does not have: resume with the --attn_implementation"):
            run(tiny("other", attn_implementation=other, **settings))


def test_sizes_beside_a_config_are_refused(tmp_path):
    family_model("stablelm").config.save_pretrained(tmp_path)
    flags = ["--architecture", str(tmp_path)]
    for size, value in (("n_layer", 3), ("depth", 4), ("n_embd", 64)):
        with refused(f"--{size} {value} is not what the config.json"):
            configured_shape(parse_config(TrainConfig, [*flags, f"--{size}", str(value)]), 257)
    assert configured_shape(parse_config(TrainConfig, [*flags, "--n_layer", "2"]), 257).n_layer == 2


def test_a_resume_with_another_shape_names_what_differs(tiny, tmp_path):
    folder = tmp_path / "shape"
    family_model("stablelm").config.save_pretrained(folder)
    run(tiny("run", architecture=str(folder), max_steps=1))
    family_model("stablelm", intermediate_size=48).config.save_pretrained(folder)
    with refused("has intermediate_size 64 instead of 48: resume with the original values"):
        run(tiny("run", architecture=str(folder), max_steps=2, resume_from="latest"))

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from gpt2_accel import GPT, GPTConfig, from_pretrained, save_pretrained
from gpt2_accel.tokenizer import byte_tokenizer

SHAPE = {"vocab_size": 257, "n_positions": 32, "n_layer": 2, "n_head": 4, "n_embd": 64}
INPUT_IDS = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))


def randomized(model):
    """Every parameter random, biases and norms too, so that none can be mixed up unseen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def hf_model(**changes) -> GPT2LMHeadModel:
    config = GPT2Config(**SHAPE, bos_token_id=256, eos_token_id=256, **changes)
    return randomized(GPT2LMHeadModel(config))


@torch.no_grad()
def test_logits_of_an_hf_model_are_the_same_here(tmp_path):
    hf = hf_model(activation_function="gelu_pytorch_tanh")
    hf.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path).eval()
    assert torch.equal(ours(INPUT_IDS), hf(INPUT_IDS).logits)


@torch.no_grad()
def test_logits_of_openais_activation_agree_to_rounding(tmp_path):
    hf = hf_model(activation_function="gelu_new")
    hf.save_pretrained(tmp_path)
    torch.testing.assert_close(
        from_pretrained(tmp_path).eval()(INPUT_IDS), hf(INPUT_IDS).logits, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_logits_of_our_model_are_the_same_in_hf(tmp_path, bias):
    ours = GPT(GPTConfig(**SHAPE, bias=bias))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter[: SHAPE["vocab_size"]] += (
                torch.randn_like(parameter[: SHAPE["vocab_size"]]) / 10
            )
    ours.eval()
    save_pretrained(ours, tmp_path)
    hf, info = GPT2LMHeadModel.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(info.values()), info
    assert torch.equal(hf.eval()(INPUT_IDS).logits, ours(INPUT_IDS))
    again = from_pretrained(tmp_path)
    assert again.config == ours.config
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


def test_hf_to_here_to_hf_gives_the_same_file(tmp_path):
    hf_model(activation_function="gelu_pytorch_tanh").save_pretrained(tmp_path / "a")
    save_pretrained(from_pretrained(tmp_path / "a"), tmp_path / "b")
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_saved_config_says_what_other_readers_ask_for(tmp_path):
    save_pretrained(GPT(GPTConfig(**SHAPE)), tmp_path, byte_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["n_ctx"] == config["n_positions"] == 32
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["eos_token_id"] == 256
    assert config["vocab_size"] == 257


def test_prefixless_keys_mask_buffers_a_tied_head_and_half_precision_load(tmp_path):
    hf = hf_model()
    hf.save_pretrained(tmp_path)
    tensors = {
        key.removeprefix("transformer."): tensor.half()
        for key, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    state = from_pretrained(tmp_path).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["h.1.mlp.c_fc.weight"], tensors["h.1.mlp.c_fc.weight"].t().float())


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.h.1.ln_2.bias"), "lacks 1 tensors.*h.1.ln_2.bias"),
        (lambda t: t.update({"transformer.extra": torch.ones(1)}), "transformer.extra"),
        (
            lambda t: t.update({"transformer.wpe.weight": torch.ones(3, 3)}),
            "wpe.weight.*does not fit",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(257, 64)}), "not tied"),
    ],
)
def test_a_directory_with_wrong_tensors_is_refused_by_name(tmp_path, change, message):
    hf_model().save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)


def test_a_bias_in_a_model_without_biases_is_refused(tmp_path):
    save_pretrained(GPT(GPTConfig(**SHAPE, bias=False)), tmp_path)
    edit(tmp_path, lambda t: t["transformer.h.0.ln_1.bias"].add_(1))
    with pytest.raises(ValueError, match="h.0.ln_1.bias is not zero"):
        from_pretrained(tmp_path)


def test_a_cut_weights_file_is_named(tmp_path):
    hf_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        from_pretrained(tmp_path)


def test_other_architectures_and_missing_directories_are_refused(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'llama'"):
        from_pretrained(tmp_path)
    hf_model(scale_attn_by_inverse_layer_idx=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx"):
        from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a folder nor a model on the Hub"):
        from_pretrained("nobody/nothing")


def test_a_tokenizer_of_another_size_is_refused_and_leaves_nothing(tmp_path):
    model = GPT(GPTConfig(**{**SHAPE, "vocab_size": 300}))
    with pytest.raises(ValueError, match="257 tokens"):
        save_pretrained(model, tmp_path / "out", byte_tokenizer())
    assert not (tmp_path / "out").exists()

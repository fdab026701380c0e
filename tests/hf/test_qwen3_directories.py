"""Qwen3 directories: from transformers to here and back."""

import json

import pytest
import torch
from conftest import losses, make_text, run, run_recipe, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer, Qwen3ForCausalLM

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.data.prepare import prepare
from gpt2_accel.generation.sampling import Sampling, complete, load
from gpt2_accel.hf import qwen3
from gpt2_accel.hf.convert import read_config
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import byte_tokenizer, load_tokenizer, train_bpe

SHAPE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_embd": 48, "n_inner": 96}

# Values of Qwen/Qwen3-0.6B's config.json, in the spelling of transformers 4.
PUBLISHED = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def published(request, tmp_path):
    """A directory that transformers wrote."""
    config = Qwen3Config(100, 64, **SHAPE, tied=request.param)
    model = Qwen3ForCausalLM(qwen3.hf_config(config, None))
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_weights_go_there_and_back_to_the_byte(published, tmp_path):
    save_pretrained(from_pretrained(published), tmp_path / "ours")
    weights = "model.safetensors"
    assert (tmp_path / "ours" / weights).read_bytes() == (published / weights).read_bytes()
    reference = AutoModelForCausalLM.from_pretrained(published)
    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(loading.values())
    input_ids = torch.randint(100, (2, 20))
    assert torch.equal(model(input_ids).logits, reference(input_ids).logits)
    ours, theirs = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "ours", published)
    )
    assert ours == theirs


def test_bf16_weights_keep_their_values_and_if_asked_their_dtype(published, tmp_path):
    reference = AutoModelForCausalLM.from_pretrained(published).to(torch.bfloat16)
    reference.save_pretrained(tmp_path / "bf16")
    model = from_pretrained(tmp_path / "bf16")
    for name, tensor in qwen3.to_hf(model).items():
        assert torch.equal(tensor, reference.state_dict()[name].float())
    save_pretrained(model.to(torch.bfloat16), tmp_path / "again")
    weights = "model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / "bf16" / weights).read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").dtype == torch.bfloat16


def write(folder, **changes):
    values = {key: value for key, value in (PUBLISHED | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_published_config_is_read(tmp_path):
    assert read_config(write(tmp_path)) == Qwen3Config()
    assert read_config(write(tmp_path)).parameter_count == 596_049_920
    changed = {"rope_theta": "absent", "rope_scaling": "absent"}
    changed["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    assert read_config(write(tmp_path, **changed)).rope_theta == 5000.0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_bias": True}, "attention_bias = True; only False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; only 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True; only False"),
        ({"layer_types": ["sliding_attention"] * 28}, "layer_types has other layers"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "scaled .yarn."),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "scaled .linear."),
        ({"rope_theta": "much"}, "rope_theta is 'much'"),
        ({"num_key_value_heads": 3}, "not a multiple of n_kv_head"),
        ({"hidden_size": 10.5}, "hidden_size = 10.5; expected int"),
        ({"model_type": "mistral"}, "type 'mistral'; only gpt2, qwen3"),
    ],
)
def test_configs_that_the_model_cannot_be_are_refused_by_name(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_config(write(tmp_path, **changes))
    with pytest.raises(ValueError, match="no dropout"):
        read_config(write(tmp_path), dropout=0.1)


# Published Qwen3s have more rows than their tokenizer has tokens: 151,936 and 151,669.


@pytest.fixture
def more_rows(tmp_path):
    """A directory that transformers wrote: 300 rows, and a tokenizer of 280 tokens."""
    bpe = json.loads(train_bpe([make_text(200, 0)], 278).backend_tokenizer.to_str())["model"]
    ends = {
        "eos_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    merges = [tuple(merge) for merge in bpe["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=bpe["vocab"], merges=merges, model_max_length=64, **ends)
    assert len(tokenizer) == 280
    tokenizer.save_pretrained(tmp_path / "theirs")
    config = qwen3.hf_config(Qwen3Config(300, 64, **SHAPE), tokenizer.eos_token_id)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_a_vocabulary_with_more_rows_than_tokens_goes_there_and_back(more_rows, tmp_path):
    save_pretrained(from_pretrained(more_rows), tmp_path / "ours", load_tokenizer(more_rows))
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (more_rows / name).read_bytes(), name


def test_a_vocabulary_with_more_rows_than_tokens_is_finetuned_sampled_and_evaluated(
    more_rows, tmp_path
):
    splits = {"train": [make_text(150, i) for i in range(4)], "val": [make_text(100, 9)]}
    prepare(splits, load_tokenizer(more_rows), tmp_path / "data", source="made up")
    settings = {"init_from": str(more_rows), "eval_every": 2, "sample_every": 4, "save_every": 2}
    settings |= {"max_steps": 4, "sample_tokens": 5, "sequence_length": 64, "micro_batch_size": 2}
    whole = run(tiny_config(tmp_path / "data", tmp_path / "run", **settings))
    settings["resume_from"] = str(tmp_path / "run/checkpoint-2")
    resumed = run(tiny_config(tmp_path / "data", tmp_path / "resumed", **settings))
    assert losses(resumed) == losses(whole)[2:] and losses(whole)[3] < losses(whole)[0]

    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert reference.config.vocab_size == 300
    flags = ["--model", tmp_path / "run", "--data_dir", tmp_path / "data"]
    run_recipe("evaluate", *flags)
    [found] = json.loads((tmp_path / "run/evaluation.json").read_text()).values()
    assert found["results"]["val/loss"] == pytest.approx(whole[-1]["val/loss"], abs=1e-5)


def test_an_id_without_a_token_is_generated_as_by_transformers(more_rows):
    reference = AutoModelForCausalLM.from_pretrained(more_rows)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0 if parameter.ndim > 1 else 1, 0.5)
    reference.save_pretrained(more_rows)
    model, tokenizer = load(str(more_rows))
    prompt = "the cat sat on"
    inputs = AutoTokenizer.from_pretrained(more_rows)(prompt, return_tensors="pt")
    expected = reference.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    [found] = complete(model, tokenizer, [prompt], Sampling(40, temperature=0.0))
    assert found.ids == expected[inputs["input_ids"].shape[1] :].tolist()
    assert max(found.ids) >= len(tokenizer)
    assert found.text == tokenizer.decode([token for token in found.ids if token < len(tokenizer)])


def test_data_of_another_smaller_vocabulary_is_refused(more_rows, data_dir, tmp_path):
    assert len(byte_tokenizer()) == 257
    for changes in ({}, {"ignore_changes": True}):
        config = tiny_config(data_dir, tmp_path / "run", init_from=str(more_rows), **changes)
        with pytest.raises(ValueError, match="vocabulary of 300, but .* with one of 257"):
            run(config)

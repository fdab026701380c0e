"""Llama, Qwen3 and nanochat directories: from transformers to here and back."""

import json
from pathlib import Path

import pytest
import torch
from conftest import losses, make_text, read_json, refused, run, run_recipe, tiny_config
from tables import table
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.data.prepare import prepare
from gpt2_accel.hf.convert import hf_config, read_config
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.models.nanochat import NanochatConfig
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import load_tokenizer, train_bpe

SHAPE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_embd": 48, "n_inner": 96}

CASES = table("hf/cases")
CONFIGS = Path(__file__).parents[1] / "fixtures/configs"
SMOLLM2 = read_json(CONFIGS / "smollm2-135m.json")
QWEN3 = read_json(CONFIGS / "qwen3-0.6b.json")
NANOCHAT = read_json(CONFIGS / "nanochat-d32.json")
KINDS = {"llama": LlamaConfig, "qwen3": Qwen3Config, "nanochat": NanochatConfig}


@pytest.fixture(params=KINDS)
def architecture(request):
    return request.param


def random_hf(config, end=None):
    """A model of transformers with random weights."""
    ids = {"bos_token_id": end, "eos_token_id": end}
    return AutoModelForCausalLM.from_config(hf_config(config, ids))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def published(request, architecture, tmp_path):
    """A directory that transformers wrote."""
    config = KINDS[architecture](100, 64, **SHAPE, tied=request.param, norm_eps=1e-4)
    random_hf(config).save_pretrained(tmp_path / "published")
    return tmp_path / "published"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_and_saved_again_the_files_are_equal(published, dtype, tmp_path):
    theirs = tmp_path / "theirs"
    ours = tmp_path / "ours"
    weights = "model.safetensors"
    reference = AutoModelForCausalLM.from_pretrained(published).to(dtype)
    reference.save_pretrained(theirs)
    model = from_pretrained(theirs)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    save_pretrained(model.to(dtype), ours)
    assert (ours / weights).read_bytes() == (theirs / weights).read_bytes()
    assert read_json(ours / "config.json") == read_json(theirs / "config.json")
    again, loading = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(loading.values())
    assert again.dtype == dtype


def write(folder, published, **changes):
    """Writes a changed config.json."""
    values = {key: value for key, value in (published | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "published, config, parameters",
    [
        (SMOLLM2, LlamaConfig, 134_515_008),
        (QWEN3, Qwen3Config, 596_049_920),
        # 32 layers of 12 squares of the width, and two matrices of the vocabulary.
        (NANOCHAT, NanochatConfig, 32 * 12 * 2048**2 + 2 * 65536 * 2048),
    ],
)
def test_published_config_is_read(published, config, parameters, tmp_path):
    assert read_config(write(tmp_path, published)) == config()
    assert config().parameter_count == parameters
    changed = dict.fromkeys(["rope_theta", "rope_scaling", "rope_parameters"], "absent")
    assert read_config(write(tmp_path, published, **changed)).rope_theta == 10_000
    changed["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    assert read_config(write(tmp_path, published, **changed)).rope_theta == 5000.0
    with refused("no dropout"):
        read_config(tmp_path, dropout=0.1)


@pytest.mark.parametrize("value", ["absent", None])
def test_missing_sizes_of_a_llama_follow_from_others(value, tmp_path):
    changes = {"num_key_value_heads": value, "head_dim": value}
    config = read_config(write(tmp_path, SMOLLM2, **changes))
    assert config.n_kv_head == 9
    assert config.head_dim == 64
    assert read_config(write(tmp_path, SMOLLM2, head_dim=32)).head_dim == 32


@pytest.mark.parametrize(("published", "changes", "reason"), CASES["other modules"])
def test_a_config_that_our_module_does_not_cover_takes_the_class_of_transformers(
    published, changes, reason, tmp_path
):
    published = read_json(CONFIGS / f"{published}.json")
    shape = read_config(write(tmp_path, published, **CASES["small"], **changes))
    assert reason in shape.note


# Published Qwen3s have more rows than their tokenizer has tokens: 151,936 and 151,669.


def smollm2_tokenizer(bpe):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", model_max_length=64
    )


@pytest.fixture
def more_rows(tmp_path):
    """A directory that transformers wrote: 300 rows, and a tokenizer of 280 tokens."""
    bpe = train_bpe([make_text(200, 0)], 278).backend_tokenizer
    tokenizer = smollm2_tokenizer(bpe)
    assert len(tokenizer) == 280
    tokenizer.save_pretrained(tmp_path / "theirs")
    config = Qwen3Config(300, 64, **SHAPE)
    random_hf(config, tokenizer.eos_token_id).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_a_vocabulary_with_more_rows_than_tokens_is_saved_trained_and_evaluated(
    more_rows, tmp_path
):
    save_pretrained(from_pretrained(more_rows), tmp_path / "ours", load_tokenizer(more_rows))
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (more_rows / name).read_bytes(), name
    splits = {"train": [make_text(150, i) for i in range(4)], "val": [make_text(100, 9)]}
    prepare(splits, load_tokenizer(more_rows), tmp_path / "data", source="made up")
    settings = {"init_from": str(more_rows), "eval_every": 2, "sample_every": 4, "max_steps": 4}
    settings |= {"sample_tokens": 5, "sequence_length": 64, "micro_batch_size": 2}
    lines = run(tiny_config(tmp_path / "data", tmp_path / "run", **settings))
    assert losses(lines)[3] < losses(lines)[0]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert reference.config.vocab_size == 300
    flags = ["--model", tmp_path / "run", "--data_dir", tmp_path / "data"]
    run_recipe("evaluate", *flags)
    [evaluation] = read_json(tmp_path / "run/evaluation.json").values()
    assert evaluation["results"]["val/loss"] == pytest.approx(lines[-1]["val/loss"], abs=1e-5)

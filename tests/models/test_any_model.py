"""Classes of `transformers` for which the package has no module: opened, trained and saved."""

import os
import re

import pytest
import torch
from conftest import (
    as_flags,
    assert_close,
    chat_rows,
    long,
    losses,
    make_text,
    metrics,
    run,
    run_recipe,
    weights_digest,
    write_lines,
)
from families import FAMILIES, SIZES, family_model, own_tokenizer, save_family
from launching import EAGER, launch
from tables import table
from test_references import PEAK, WARMUP, plain_losses
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, pipeline

from gpt2_accel import from_pretrained
from gpt2_accel.data.shards import TokenStream
from gpt2_accel.generation.sampling import Sampling, tokens
from gpt2_accel.models import any_model
from gpt2_accel.models.any_model import AnyConfig, AnyModel, documents_cross
from gpt2_accel.optim import hidden_matrices
from gpt2_accel.optim.muon import Muon

MODELS = os.environ.get("MODELS")  # `make test-models` tries all families
FEW = ["gemma3_text", "opt", "mixtral"]


@pytest.mark.parametrize("kind", FAMILIES if MODELS == "long" else FEW)
def test_training_equals_a_plain_loop_around_the_class(kind, tiny, data_dir, tmp_path):
    start = save_family(kind, tmp_path / "start")
    settings = {"max_steps": 3, "warmup_steps": WARMUP, "learning_rate": PEAK}
    lines = run(tiny("run", init_from=str(start), total_batch_size=8 * 32, **settings))
    expected, model = plain_losses(start, data_dir, [8] * 3)
    assert losses(lines) == pytest.approx(expected, abs=1e-5)
    folder = tmp_path / "run"
    final = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    final.save_pretrained(tmp_path / "again")
    assert weights_digest(tmp_path / "again") == weights_digest(folder)
    ids = torch.arange(32)[None]
    assert_close(final(ids).logits, model.eval()(ids).logits, 1e-4)


@long
@pytest.mark.parametrize("kind", FAMILIES if MODELS == "long" else ["mixtral"])
def test_sharded_runs_and_resumes_equal_one_process(kind, tiny, tmp_path):
    start = save_family(kind, tmp_path / "start")
    settings = {"init_from": str(start), "optimizer": "muon", "learning_rate": 1e-3}
    settings |= {"save_every": 2, "max_steps": 4}
    alone = run(tiny("alone", **settings))
    resumed = run(tiny("resumed", **settings, resume_from=str(tmp_path / "alone/checkpoint-2")))
    assert losses(resumed) == losses(alone)[2:]
    assert weights_digest(tmp_path / "resumed") == weights_digest(tmp_path / "alone")

    def several(name, config, script, **changes):
        flags = as_flags(tiny(name, **settings, **changes))
        launch(*EAGER, script, *flags, processes=2, config=config)
        return losses(metrics(tmp_path / name))

    ddp = several("ddp", "8xa100", "tests/train_script.py")
    fsdp = several("fsdp", "8xa100_fsdp2", "tests/fsdp_script.py")
    assert ddp == pytest.approx(losses(alone), abs=1e-4)
    assert fsdp == pytest.approx(ddp, abs=1e-4)
    from_sharded = str(tmp_path / "fsdp/checkpoint-2")
    back = several("back", "8xa100", "tests/train_script.py", resume_from=from_sharded)
    assert back == pytest.approx(ddp[2:], abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "has_own_module"), table("models/cases")["own modules"]
)
def test_our_module_is_taken_where_it_computes_the_same(kind, changes, has_own_module, tmp_path):
    model = family_model(kind, **changes)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert isinstance(loaded, AnyModel) != has_own_module
    ids = torch.arange(32)[None]
    assert_close(loaded.eval()(ids), model.eval()(ids).logits)


def test_a_new_model_of_a_config_is_initialised_as_its_class(tiny, tmp_path):
    """Phi3's own padding token, 399, lies beyond the vocabulary of the data."""
    folder = tmp_path / "shape"
    given = CONFIG_MAPPING["phi3"](**SIZES | {"vocab_size": 400, "pad_token_id": 399})
    given.save_pretrained(folder)
    config = tiny("run", architecture=str(folder), max_steps=1, learning_rate=0.0)
    run(config)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32)
    assert saved.config.eos_token_id == 256
    assert saved.config.pad_token_id is None
    torch.manual_seed(config.seed)
    expected = AutoModelForCausalLM.from_config(CONFIG_MAPPING["phi3"](**SIZES)).state_dict()
    assert saved.state_dict().keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(saved.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", FEW)
def test_a_sample_computes_each_position_once(kind):
    model = AnyConfig(family_model(kind).config.to_dict()).build()
    computed = []
    embedding = model.inner.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: computed.append(out.shape[1]))
    list(tokens(model, [[5, 9, 33]], Sampling(max_new_tokens=20)))
    assert computed == [3] + [1] * 19


# Attention's and the MLP's matrices of a layer; not a router, and not Mamba's convolution.
MATRICES = {"olmo2": 7, "gpt_neox": 4, "mixtral": 6, "mamba": 4, "gpt2": 4}


@pytest.mark.parametrize("kind", MATRICES)
def test_muon_updates_the_matrices_of_the_blocks(kind):
    model = AnyConfig(family_model(kind).config.to_dict()).build()
    names = list(hidden_matrices(model))
    assert len(names) == MATRICES[kind] * model.config.n_layer
    for name in names:
        assert re.search(r"\.\d+\.", name)
        assert not re.search("gate.weight|router|conv|norm", name)


def muon_update(weights, gradients):
    """Returns the weights after one update of Muon."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    Muon([{"params": named, "muon": True}], lr=0.1, betas=(0.9, 0.95)).step()
    return [parameter.detach() for parameter in parameters]


def test_muon_updates_each_expert_and_a_transposed_weight_as_a_matrix():
    """An update equals that of a separate matrix of `nn.Linear`, up to rounding in bf16."""
    experts, gradients = torch.randn(2, 3, 8, 4)
    [update] = muon_update([experts], [gradients])
    expected = torch.stack(muon_update(list(experts), list(gradients)))
    torch.testing.assert_close(update, expected, atol=1e-3, rtol=0)
    assert (update - experts).abs().max() > 1e-2
    conv1d, gradient = torch.randn(2, 6, 10)
    [update] = muon_update([conv1d], [gradient])
    [expected] = muon_update([conv1d.T], [gradient.T])
    torch.testing.assert_close(update, expected.T, atol=1e-3, rtol=0)


@pytest.mark.parametrize("backend", [None, "aot_eager"] if MODELS == "long" else [None])
@pytest.mark.parametrize("kind", ["gemma3_text", "mixtral", "opt"])
def test_documents_stay_apart_or_the_class_is_refused(kind, backend, monkeypatch):
    shape = AnyConfig(family_model(kind).config.to_dict())
    assert documents_cross(shape, backend is not None, backend) == (kind == "opt")

    def run_on(documents, n_positions):  # planted
        return torch.arange(documents.shape[1]).expand_as(documents)

    monkeypatch.setattr(any_model, "document_positions", run_on)
    assert documents_cross(shape)


@pytest.mark.parametrize("kind", FAMILIES if MODELS == "long" else ["gemma3_text"])
def test_text_chat_and_samples_use_the_tokenizer_of_a_family(kind, tmp_path, capsys):
    text = "".join(make_text(40, seed) for seed in range(90))
    tokenizer = own_tokenizer(kind, [text])
    base = tmp_path / "base"
    tuned = tmp_path / "tuned"
    family_model(kind, vocab_size=len(tokenizer), max_position_embeddings=128).save_pretrained(base)
    tokenizer.save_pretrained(base)
    (tmp_path / "text.txt").write_text(text)
    flags = ["--tokenizer", base, "--data_dir", tmp_path / "data"]
    run_recipe("prepare_data", "text", tmp_path / "text.txt", *flags)
    stream = TokenStream(tmp_path / "data", "train")
    ids = stream.read(0, stream.tokens).tolist()
    assert tokenizer.decode(ids, skip_special_tokens=True) in text
    settings = "--max_steps 4 --micro_batch_size 2 --sequence_length 64 --total_batch_size 256"
    settings = settings.split() + ["--eval_tokens", 256]
    flags = ["--init_from", base, "--data_dir", tmp_path / "data", "--output_dir", tuned]
    run_recipe("finetune_shakespeare", *flags, *settings, "--dropout", 0, "--keep_best", "false")
    flags = ["--data", write_lines(tmp_path / "chat.jsonl", chat_rows(30)), "--model", tuned]
    run_recipe("chat_sft", *flags, *settings, "--output_dir", tmp_path / "chat")
    capsys.readouterr()
    flags = ["--chat", "false", "--prompt", "the cat", "--max_new_tokens", 8, "--temperature", 0]
    run_recipe("sample", "--model", tmp_path / "chat", *flags)
    output = capsys.readouterr().out
    saved = pipeline("text-generation", model=str(tmp_path / "chat"), device="cpu")
    ids = saved.tokenizer("the cat", return_tensors="pt")["input_ids"]
    expected = saved.model.generate(ids, max_new_tokens=8, do_sample=False)[0]
    continued = saved.tokenizer.decode(expected[ids.shape[1] :], skip_special_tokens=True)
    assert continued.strip() in output

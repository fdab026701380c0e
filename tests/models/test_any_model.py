"""Models of `transformers` that the package has no module for: opened, trained, saved as their own class would."""

import json
import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    as_flags,
    chat_rows,
    long,
    losses,
    make_text,
    metrics,
    read_json,
    refused,
    reset_accelerate,
    run,
    run_recipe,
    tiny_config,
    write_lines,
)
from families import FAMILIES, SIZES, family_model, own_tokenizer, save_family
from launching import launch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, pipeline

from gpt2_accel import from_pretrained
from gpt2_accel.data.conversations import prepare_conversations
from gpt2_accel.data.loader import TrainLoader, open_split
from gpt2_accel.data.shards import TokenStream, load_data_tokenizer
from gpt2_accel.hf.convert import read_config
from gpt2_accel.models import any_model
from gpt2_accel.models.any_model import AnyConfig, AnyModel, documents_cross
from gpt2_accel.optim import hidden_matrices
from gpt2_accel.optim.muon import Muon
from gpt2_accel.train import train

UPDATES, PEAK = 20, 3e-3
MODELS = os.environ.get("MODELS")  # `make test-models` tries more of them


def plain_losses(directory, data_dir, updates):
    """Returns the losses of a plain loop around the class of transformers, and the model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    experts = (
        {"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}
    )
    named = dict(model.named_parameters()).values()
    groups = [
        {"params": [p for p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    split = open_split(data_dir, "train")
    loader = TrainLoader(split, sequence_length=32, micro_batch_size=4, seed=1337)
    found = []
    for step in range(updates):
        total = 0.0
        for input_ids, targets, *_ in loader.update(step * 8, 8):
            out = model(input_ids, use_cache=False, **experts)
            loss = F.cross_entropy(out.logits.float().flatten(0, 1), targets.flatten())
            if experts:
                loss = loss + model.config.router_aux_loss_coef * out.aux_loss
            (loss / 2).backward()
            total += loss.item() / 2
        torch.nn.utils.clip_grad_norm_(list(named), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = PEAK / 10 + 0.45 * PEAK * (1 + math.cos(math.pi * step / updates))
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found, model


@pytest.mark.parametrize("kind", FAMILIES)
def test_training_equals_a_plain_loop_around_the_class(kind, tiny, data_dir, tmp_path):
    start = save_family(kind, tmp_path / "start")
    config = tiny(
        "run",
        init_from=str(start),
        max_steps=UPDATES,
        warmup_steps=0,
        learning_rate=PEAK,
        total_batch_size=8 * 32,
    )
    lines = run(config)
    expected, model = plain_losses(start, data_dir, UPDATES)
    assert losses(lines) == pytest.approx(expected, abs=1e-6)
    assert expected[-1] < expected[0] - 0.5
    folder = tmp_path / "run"
    final = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    final.save_pretrained(tmp_path / "again")
    saved, again = (load_file(p / "model.safetensors") for p in (folder, tmp_path / "again"))
    assert (folder / "model.safetensors").read_bytes() == (
        tmp_path / "again/model.safetensors"
    ).read_bytes()
    assert saved.keys() == again.keys()
    ids = torch.arange(32)[None]
    torch.testing.assert_close(final(ids).logits, model.eval()(ids).logits, atol=1e-4, rtol=0)


# Dense, fused matrices, experts.
@long
@pytest.mark.parametrize("kind", FAMILIES if MODELS == "long" else ["mixtral"])
def test_sharded_runs_and_resumes_equal_one_process(kind, tiny, tmp_path):
    start = save_family(kind, tmp_path / "start")
    settings = {
        "init_from": str(start),
        "optimizer": "muon",
        "learning_rate": 1e-3,
        "save_every": 4,
    }
    alone = run(tiny("alone", **settings))
    resumed = run(tiny("resumed", **settings, resume_from=str(tmp_path / "alone/checkpoint-4")))
    assert losses(resumed) == losses(alone)[4:]
    paths = [tmp_path / name / "model.safetensors" for name in ("alone", "resumed")]
    assert paths[0].read_bytes() == paths[1].read_bytes()

    def several(name, config, script, **changes):
        flags = ("--mixed_precision", "no", "--dynamo_backend", "no", script)
        config_of_run = tiny(name, **settings, **changes)
        launch(*flags, *as_flags(config_of_run), processes=2, config=config)
        return losses(metrics(tmp_path / name))

    ddp = several("ddp", "8xa100", "tests/train_script.py")
    fsdp = several("fsdp", "8xa100_fsdp2", "tests/fsdp_script.py")
    assert ddp == pytest.approx(losses(alone), abs=1e-4)
    assert fsdp == pytest.approx(ddp, abs=1e-4)
    from_sharded = str(tmp_path / "fsdp/checkpoint-4")
    back = several("back", "8xa100", "tests/train_script.py", resume_from=from_sharded)
    assert back == pytest.approx(ddp[4:], abs=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2},
            "BertLMHeadModel sees",
        ),
        ({"model_type": "roberta"}, "RobertaForCausalLM sees later tokens"),
        ({"model_type": "electra"}, "ElectraForCausalLM sees later tokens"),
        ({"model_type": "gemma3"}, "Gemma3ForConditionalGeneration is a multimodal model"),
        ({"model_type": "t5"}, "t5 is not a causal language model"),
        (
            {"model_type": "olmo2", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantized",
        ),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}},
            "'mine' without remote code",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(values, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with refused(message):
        read_config(tmp_path)
    with refused(message):
        from_pretrained(tmp_path)


def test_a_directory_without_a_tensor_is_refused(tmp_path):
    start = save_family("olmo2", tmp_path / "start")
    tensors = load_file(start / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, start / "model.safetensors", {"format": "pt"})
    with refused("model.norm.weight is missing"):
        from_pretrained(start)


def test_the_own_module_is_taken_where_it_computes_the_same(tmp_path):
    for name, changes, own in (
        ("llama", {}, True),
        ("llama", {"attention_bias": True}, False),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            False,
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, False),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, False),
        ("gpt2", {"n_inner": 48}, False),
    ):
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        model = family_model(name, **changes)
        model.save_pretrained(folder)
        found = from_pretrained(folder)
        assert isinstance(found, AnyModel) != own, (name, changes)
        ids = torch.arange(32)[None]
        torch.testing.assert_close(found.eval()(ids), model.eval()(ids).logits, atol=1e-5, rtol=0)


def test_a_new_model_of_a_config_is_initialised_as_its_class(tiny, tmp_path):
    """Phi3's own padding token, 32,000, lies beyond the vocabulary of the data."""
    folder = tmp_path / "shape"
    CONFIG_MAPPING["phi3"](**SIZES | {"vocab_size": 400, "pad_token_id": 399}).save_pretrained(
        folder
    )
    config = tiny("run", architecture=str(folder), max_steps=1, learning_rate=0.0)
    run(config)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32)
    torch.manual_seed(config.seed)
    shape = CONFIG_MAPPING["phi3"](**SIZES | {"pad_token_id": None})
    expected = AutoModelForCausalLM.from_config(shape)
    assert saved.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor), name
    assert saved.config.eos_token_id == 256
    assert saved.config.pad_token_id is None
    model = from_pretrained(tmp_path / "run")
    ids = torch.arange(32)[None]
    model(ids, ids).backward()
    gradient = model.inner.get_input_embeddings().weight.grad
    assert (gradient[:32].abs().sum(dim=1) > 0).all()


MUON = {  # below a layer
    "olmo2": "mlp.{down,gate,up}_proj.weight self_attn.{k,o,q,v}_proj.weight",
    "gpt_neox": "attention.{dense,query_key_value}.weight mlp.dense_{4h_to_h,h_to_4h}.weight",
    "mixtral": "mlp.experts.{down,gate_up}_proj self_attn.{k,o,q,v}_proj.weight",
    "phi3": "mlp.{down,gate_up}_proj.weight self_attn.{o,qkv}_proj.weight",
    "opt": "fc{1,2}.weight self_attn.{k_proj,out_proj,q_proj,v_proj}.weight",
    "mamba": "mixer.{dt,in,out,x}_proj.weight",
    "gpt2": "attn.c_{attn,proj}.weight mlp.c_{fc,proj}.weight",
}


@pytest.mark.parametrize("kind", MUON)
def test_muon_updates_the_matrices_of_the_blocks(kind):
    model = AnyConfig(family_model(kind).config.to_dict()).build()
    found = {re.split(r"\.\d+\.", name)[1] for name, _ in hidden_matrices(model)}
    expected = set()
    for words in MUON[kind].split():
        before, middle, after = re.match(r"([^{]*)\{([^}]*)\}(.*)", words).groups()
        expected |= {f"{before}{word}{after}" for word in middle.split(",")}
    assert found == expected
    blocks = model.config.n_layer * len(expected)
    assert len(hidden_matrices(model)) == blocks


def test_muon_updates_each_expert_and_a_transposed_weight_as_a_matrix():
    """An update equals that of a matrix of its own, in the form of `nn.Linear`."""
    experts, conv1d = torch.randn(3, 8, 4), torch.randn(6, 10)
    for weight, matrices in ((experts, list(experts)), (conv1d, [conv1d.T])):
        gradient = torch.randn_like(weight)
        gradients = list(gradient) if weight.ndim == 3 else [gradient.T]
        results = []
        for values, grads in (([weight], [gradient]), (matrices, gradients)):
            parameters = [torch.nn.Parameter(value.clone()) for value in values]
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad.clone()
            named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
            Muon([{"params": named, "muon": True}], lr=0.1, betas=(0.9, 0.95)).step()
            results.append([parameter.detach() for parameter in parameters])
        [whole], single = results
        single = torch.stack(single) if weight.ndim == 3 else single[0].T
        torch.testing.assert_close(whole, single, atol=1e-3, rtol=0)  # the iteration is in bf16
        assert (whole - weight).abs().max() > 1e-2


@pytest.mark.parametrize("backend", [None, "aot_eager"] if MODELS == "long" else [None])
@pytest.mark.parametrize("kind", ["gemma3_text", "mixtral", "opt"])
def test_documents_stay_apart_or_the_class_is_refused(kind, backend, monkeypatch):
    shape = AnyConfig(family_model(kind).config.to_dict())
    assert documents_cross(shape, backend is not None, backend) == (kind == "opt")

    def run_on(documents, n_positions):  # planted
        return torch.arange(documents.shape[1]).expand_as(documents)

    monkeypatch.setattr(any_model, "document_positions", run_on)
    assert documents_cross(shape)


def test_conversations_of_a_class_that_lets_documents_cross_are_not_packed(tmp_path, capsys):
    """OPT learns each conversation as if it were alone: the first loss is that of the rows one by one."""
    data = write_lines(tmp_path / "chat.jsonl", chat_rows(40))
    base = save_family("opt", tmp_path / "base", max_position_embeddings=128)
    flags = (
        f"--data {data} --model {base} --max_steps 2 --micro_batch_size 2 --total_batch_size 256"
    )
    run_recipe("chat_sft", *flags.split(), "--output_dir", tmp_path / "run")
    assert "each window has one conversation" in capsys.readouterr().out
    [folder] = (tmp_path / "run").glob("data-*")
    manifest = read_json(folder / "manifest.json")
    entry = manifest["splits"]["train"]
    assert entry["tokens"] == entry["documents"] * manifest["sequence_length"]
    reset_accelerate()
    packed = folder.parent / "packed"
    prepare_conversations(
        [str(data)],
        load_data_tokenizer(folder),
        packed,
        sequence_length=128,
        source="",
        model=str(base),
    )
    with refused("OPTForCausalLM does not keep documents apart"):
        train(tiny_config(packed, tmp_path / "other", init_from=str(base), sequence_length=128))


@pytest.mark.parametrize("kind", FAMILIES if MODELS == "long" else ["gemma3_text", "phi3"])
def test_text_chat_and_samples_with_a_tokenizer_of_the_familys_kind(kind, tmp_path, capsys):
    text = "".join(make_text(40, seed) for seed in range(90))
    tokenizer, base, chat = own_tokenizer(kind, [text]), tmp_path / "base", tmp_path / "chat.jsonl"
    family_model(kind, vocab_size=len(tokenizer), max_position_embeddings=128).save_pretrained(base)
    tokenizer.save_pretrained(base)
    (tmp_path / "text.txt").write_text(text)
    run_recipe(
        "prepare_data",
        "text",
        tmp_path / "text.txt",
        "--tokenizer",
        base,
        "--data_dir",
        tmp_path / "data",
    )
    stream = TokenStream(tmp_path / "data", "train")
    ids = stream.read(0, stream.tokens).tolist()
    assert (
        tokenizer.decode(ids, skip_special_tokens=True) in text
    )  # a single text gives its last part to validation
    settings = "--max_steps 4 --micro_batch_size 2 --sequence_length 64 --total_batch_size 256 --eval_tokens 256"
    tuned = [
        "--init_from",
        base,
        "--data_dir",
        tmp_path / "data",
        "--dropout",
        0,
        *settings.split(),
    ]
    run_recipe(
        "finetune_shakespeare", *tuned, "--output_dir", tmp_path / "tuned", "--keep_best", "false"
    )
    write_lines(chat, chat_rows(30))
    flags = ["--data", chat, "--model", tmp_path / "tuned", *settings.split()]
    run_recipe("chat_sft", *flags, "--output_dir", tmp_path / "chat")
    capsys.readouterr()
    run_recipe(
        "sample",
        "--model",
        tmp_path / "chat",
        "--prompt",
        "the cat",
        "--max_new_tokens",
        8,
        "--temperature",
        0,
    )
    said = capsys.readouterr().out
    saved = pipeline("text-generation", model=str(tmp_path / "chat"), device="cpu")
    ids = saved.tokenizer("the cat", return_tensors="pt")["input_ids"]
    expected = saved.model.generate(ids, max_new_tokens=8, do_sample=False)[0]
    continued = saved.tokenizer.decode(expected[ids.shape[1] :], skip_special_tokens=True)
    assert continued.strip() in said

"""Families of `transformers` with something of their own: buffers, positions, kinds of layers."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import LONG, losses, refused, run
from families import family_model, save_family
from packaging.version import Version
from safetensors.torch import load, save_file
from tables import table
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.models import convert_parameters
from gpt2_accel.models.any_model import AnyConfig, documents_cross
from gpt2_accel.tokenizer import byte_tokenizer

CASES = table("models/cases")
JAMBA = {"attn_layer_period": 2, "use_mamba_kernels": False, "mamba_d_state": 8, "num_experts": 2}


def test_weights_in_bf16_compute_what_the_class_computes(tmp_path):
    """The class keeps its rotary frequencies in fp32."""
    start = save_family("gemma3_text", tmp_path / "start", max_position_embeddings=1024)
    ids = torch.randint(257, (1, 1000))
    expected = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)(ids).logits
    loaded = from_pretrained(start)
    convert_parameters(loaded, torch.bfloat16)
    assert torch.equal(loaded(ids), expected)


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


@pytest.mark.parametrize(("given", "left", "dropped"), CASES["generation configs"])
def test_contradictions_in_a_generation_config_are_left_out(given, left, dropped, tmp_path):
    """Old Vicunas have a temperature without sampling; transformers refuses to save that."""
    start = save_family("mistral", tmp_path / "start")
    (start / "generation_config.json").write_text(json.dumps(given))
    model = from_pretrained(start)
    save_pretrained(model, tmp_path / "saved", byte_tokenizer())
    saved = GenerationConfig.from_pretrained(tmp_path / "saved").to_diff_dict()
    assert saved["eos_token_id"] == 256
    assert {name: saved[name] for name in left} == left
    assert not saved.keys() & {"top_p", "pad_token_id", "early_stopping"}
    assert "temperature" in left or "temperature" not in saved
    note = model.config.note
    assert dropped in note if dropped else "left out" not in note


EXPERTS, BALANCING = CASES["experts"], CASES["balancing"]
if Version(transformers.__version__) >= Version("5.23"):  # the class of older ones cannot run
    BALANCING.append(("doge", {"is_moe": True}, 0.001))
if LONG:
    BALANCING += [(kind, {}, True) for kind in CASES["balanced"] if kind in CONFIG_MAPPING]
    BALANCING += [(kind, {}, None) for kind in CASES["unbalanced"] if kind in CONFIG_MAPPING]


@pytest.mark.parametrize(("kind", "changes", "weight"), BALANCING)
def test_whether_a_class_computes_a_load_balancing_loss_is_tried(kind, changes, weight):
    known = CONFIG_MAPPING[kind]().to_dict()
    sizes = {name: value for name, value in EXPERTS.items() if name in known}
    config = family_model(kind, **sizes | changes).config
    model = AnyConfig(config.to_dict()).build()
    if weight is True:
        weight = config.router_aux_loss_coef
    assert model.aux_coefficient == weight
    ids = torch.arange(40)[None]
    options = {"output_router_logits": True} if weight is not None else {}
    out = model.inner(ids, use_cache=False, **options)
    result = model(ids, ids)
    expected = F.cross_entropy(out.logits[0], ids[0])
    if weight:
        result, figure = result
        expected = expected + weight * out.aux_loss
        assert figure.item() == pytest.approx(out.aux_loss.item(), rel=1e-5)
    assert result.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_class_without_a_load_balancing_loss_says_so(tiny, tmp_path, capsys):
    start = save_family("llama4_text", tmp_path / "start", **EXPERTS)
    settings = {"init_from": str(start), "max_steps": 1}
    run(tiny("run", **settings))
    assert capsys.readouterr().out.count("it has no load balancing loss of its experts") == 1
    with refused("leave out --router_aux_loss"):
        run(tiny("other", **settings, router_aux_loss=0.1))
    start = save_family("mixtral", tmp_path / "off", router_aux_loss_coef=0.0)
    settings["init_from"] = str(start)
    assert "train/aux_loss" in run(tiny("on", **settings, router_aux_loss=0.1))[0]


def test_a_run_in_bf16_resumes_exactly_and_only_in_bf16(tiny, tmp_path):
    start = save_family("stablelm", tmp_path / "start")
    settings = {"init_from": str(start), "dtype": "bfloat16", "save_every": 4}
    alone = run(tiny("alone", **settings))
    settings["resume_from"] = str(tmp_path / "alone/checkpoint-4")
    assert losses(run(tiny("resumed", **settings))) == losses(alone)[4:]
    with refused("dtype bfloat16 -> float32 from update 4: resume with the original"):
        run(tiny("other", **settings | {"dtype": "float32"}))

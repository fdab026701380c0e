"""GGUF files and checkpoints of nanoGPT and build-nanogpt are imported."""

import math
import os
import sys

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import assert_close, randomized, refused, run_recipe
from packaging.version import Version
from tables import table
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt2_accel import GPT, GPTConfig, from_pretrained
from gpt2_accel.tokenizer import byte_symbols, load_tokenizer
from gpt2_accel.tools.importers import read_checkpoint, read_gguf

SHAPE = {"n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
ARGS = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
INPUT_IDS = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(1))


def random_model(vocab_size, **options):
    return randomized(GPT(GPTConfig(vocab_size, **SHAPE, **options)))


def as_theirs(model, rows, prefix=""):
    """Returns a state dict of nanoGPT: Linear weights, a head, random padding rows."""
    state = {f"{prefix}transformer.{k}": v.clone() for k, v in model.state_dict().items()}
    wte = f"{prefix}transformer.wte.weight"
    vocab_size = model.config.vocab_size
    state[wte] = torch.cat((state[wte][:vocab_size], torch.randn(rows - vocab_size, 16)))
    state[f"{prefix}lm_head.weight"] = state[wte]
    return state


def same(model, expected):
    with torch.no_grad():
        return torch.equal(model.eval()(INPUT_IDS), expected(INPUT_IDS))


@pytest.mark.parametrize(("vocab_size", "rows"), [(65, 65), (50257, 50304)])
def test_a_checkpoint_of_nanogpt_is_read_and_converted(tmp_path, vocab_size, rows):
    theirs = random_model(vocab_size, bias=False, gelu="none")
    args = ARGS | {"bias": False, "vocab_size": rows, "dropout": 0.2}
    file = tmp_path / "ckpt.pt"
    for prefix in ("", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."):
        state = as_theirs(theirs, rows, prefix)
        state[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # before PyTorch 2
        torch.save({"model": state, "optimizer": {}, "model_args": args, "iter_num": 5}, file)
        assert same(read_checkpoint(file), theirs)

    # The recipe converts it for transformers, with the exact GELU.
    out = tmp_path / "hf"
    flags = "--input", file, "--output_dir", out, "--tokenizer", "none"
    run_recipe("import_checkpoint", *flags)
    hf = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert hf.config.vocab_size == vocab_size
    assert hf.config.activation_function == "gelu"
    with torch.no_grad():
        assert_close(hf(INPUT_IDS).logits, theirs(INPUT_IDS))
    assert from_pretrained(out).config == theirs.config


def test_a_checkpoint_of_build_nanogpt_is_read(tmp_path, monkeypatch):
    theirs = random_model(50257)
    # build-nanogpt pickles an object of its own class `__main__.GPTConfig`, which a reader lacks.
    GPTConfig = type("GPTConfig", (), {"__module__": "__main__"})
    config = GPTConfig()
    vars(config).update(ARGS, vocab_size=50304)
    file = tmp_path / "model_19072.pt"
    with monkeypatch.context() as patch:
        patch.setitem(vars(sys.modules["__main__"]), "GPTConfig", GPTConfig)
        torch.save({"model": as_theirs(theirs, 50304), "config": config, "step": 19072}, file)
    assert same(read_checkpoint(file), theirs)


def test_a_truncated_file_is_refused(tmp_path):
    file = tmp_path / "ckpt.pt"
    torch.save({"model": as_theirs(random_model(65), 65), "model_args": ARGS}, file)
    for size in (file.stat().st_size - 2000, 3):
        os.truncate(file, size)
        with refused("ckpt.pt is damaged"):
            read_checkpoint(file)


class Unknown:
    """A class that a reader must not build."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {}, "config": Unknown()}, "other objects could run code"),
        ({"weights": {}}, "not a checkpoint of nanoGPT"),
        ({"model": {}, "model_args": {"block_size": 4}}, "vocab_size"),
    ],
)
def test_a_file_that_is_not_a_checkpoint_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "a.pt")
    with refused(message):
        read_checkpoint(tmp_path / "a.pt")


# GGUF

TEMPLATE = "{% for message in messages %}{{ message.content }}<|endoftext|>{% endfor %}"


needs_5_23 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="older ones do not open this file"
)


BASE = 500_000.0


def write_gguf(path, without="", tensors=(), head=False, splits="gpt-2", **more):
    """Writes a Llama of one layer with matrices in Q8_0, and a byte-level BPE of 258 tokens.

    Has other `tensors`, by name, with `head` a copy of the embedding, and values, with `__` for the
    dots of their names; `splits` names the splitting of words.
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(BASE)
    for name, value in more.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name.replace("__", "."), value, kind)
    writer.add_vocab_size(258)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list([*byte_symbols(), "\u0120t", "<|endoftext|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["\u0120 t"])
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    rows = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 64}
    shapes = {f"blk.0.{name}.weight": (count, 32) for name, count in rows.items()}
    shapes |= {"blk.0.ffn_up.weight": (64, 32), "blk.0.ffn_down.weight": (32, 64)}
    shapes |= {"token_embd.weight": (258, 32), "output_norm.weight": (32,)}
    shapes |= {"blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,)}
    for name, shape in shapes.items():
        values = generator.standard_normal(shape).astype(np.float32)
        if name == without:
            continue
        if len(shape) == 1:
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        for each in [name, "output.weight"] if head and "token" in name else [name]:
            writer.add_tensor(each, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in dict(tensors).items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scaled(kind, plain):
    """Returns rotary frequencies and the factor of their cosines, by the papers' formulas.

    Position interpolation by 4 (Chen et al., 2023), YaRN from 16 to 64 positions with its ramp over
    channels (Peng et al., 2023, and its code), or Llama 3.1's scaling by 8.
    """
    if kind == "linear":
        return plain / 4, 1.0
    if kind == "yarn":
        low, high = (4 * math.log(8 / (turns * math.pi)) / math.log(BASE) for turns in (32, 1))
        low, high = max(math.floor(low), 0), math.ceil(high)
        ramp = ((torch.arange(4) - low) / (high - low)).clamp(0, 1)
        return plain * (1 - ramp + ramp / 4), 0.1 * math.log(4) + 1
    turns = 8192 * plain / (2 * math.pi)  # in the original context
    smooth = ((turns - 1) / 3).clamp(0, 1)
    return plain * ((1 - smooth) / 8 + smooth), 1.0


PLAIN = BASE ** (-torch.arange(4) / 4)
FACTORS = {"rope_freqs.weight": (PLAIN / scaled("llama3", PLAIN)[0]).numpy()}
KIND = "llama__rope__scaling__type"
BY_4 = {"llama__rope__scaling__factor": 4.0}
YARN = {KIND: "yarn", **BY_4, "llama__rope__scaling__original_context_length": 16}
IMPORTED = [
    ("", {}),
    ("", {KIND: "none", **BY_4}),
    ("", {"head": True}),
    ("linear", BY_4),
    ("yarn", YARN),
    ("llama3", {"tensors": FACTORS}),
]


@needs_5_23
@pytest.mark.parametrize(("kind", "values"), IMPORTED)
def test_a_gguf_file_is_imported(kind, values, tmp_path):
    plain = write_gguf(tmp_path / "plain.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=plain.name, dtype=torch.float32
    ).eval()
    if kind:
        rotary = theirs.model.rotary_emb
        rotary.inv_freq, rotary.attention_scaling = scaled(kind, PLAIN)
    file = write_gguf(tmp_path / "model.gguf", **values)
    run_recipe("import_checkpoint", "--input", file, "--output_dir", tmp_path / "hf")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert reopened.dtype == torch.float32
    assert reopened.config.tie_word_embeddings != values.get("head", False)
    ours = from_pretrained(tmp_path / "hf").eval()
    assert ours.config.architecture == "llama"
    with torch.no_grad():
        expected = theirs(INPUT_IDS).logits
        assert_close(reopened(INPUT_IDS).logits, expected)
        assert_close(ours(INPUT_IDS), expected)
    tokenizer = load_tokenizer(tmp_path / "hf")
    assert tokenizer.chat_template == TEMPLATE
    text = "to be or not<|endoftext|>"
    kept = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert tokenizer(text)["input_ids"] == kept(text)["input_ids"]


@needs_5_23
def test_a_gguf_file_splits_words_as_its_model_did(tmp_path):
    def read(splits):
        return read_gguf(write_gguf(tmp_path / "a.gguf", splits=splits))[1]

    digits = read("smollm").backend_tokenizer
    words = digits.pre_tokenizer.pre_tokenize_str("12 t")
    assert [word for word, _ in words] == ["1", "2", "\u0120t"]
    for unknown in ("other", "default"):
        with refused(f"rules '{unknown}': give --tokenizer"):
            read(unknown)
    digits.save(str(tmp_path / "tokenizer.json"))
    with refused("would take the tokenizer.json beside it: give --tokenizer"):
        read("gpt-2")


@needs_5_23
@pytest.mark.parametrize(("values", "words"), table("tools/cases")["refused GGUF files"])
def test_a_gguf_file_of_something_else_is_refused(values, words, tmp_path):
    values = {"name": "a.gguf"} | values
    with refused(f"cannot read .*{words}"):
        read_gguf(write_gguf(tmp_path / values.pop("name"), **values))


@needs_5_23
def test_a_damaged_gguf_file_is_refused(tmp_path):
    file = write_gguf(tmp_path / "a.gguf")
    for size in (2000, 3):
        os.truncate(file, size)
        with refused("cannot read .*a.gguf"):
            read_gguf(file)

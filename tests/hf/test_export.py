"""`recipes/export.py`: GGUF files give transformers the same tokens and logits."""

import socket

import pytest
import torch
from conftest import randomized, refused, run_recipe
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.models.nanochat import NanochatConfig
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import char_tokenizer, encode, train_bpe
from gpt2_accel.tools.gguf import write_gguf

gguf = pytest.importorskip("gguf", reason="needs the extra: pip install 'gguf>=0.17'")

SHAPE = {"n_positions": 48, "n_layer": 2, "n_head": 2, "n_embd": 64}
NASTY = (
    "I'll he'LL don't\n\n\t x=1234567;  日本語 ☃️🦙👩‍👧 café naïve \u00a0\u3000\u200b ½²٣ …—"
    "  the cat   \r\n  #include <a.h> \x00\x7f <|endoftext|>  <|end "
)
TOLERANCE = 2e-6  # largest difference of a logit, as a share of the largest logit; measured: 4e-7


def random_model(vocab_size, **options):
    """A model with weights of a trained size, also in the biases."""
    return randomized(GPT(GPTConfig(vocab_size, **{**SHAPE, **options})))


def random_llama(kind, vocab_size, **changes):
    """A Llama or Qwen3 with random weights."""
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_embd": 64, "n_inner": 96}
    return randomized(kind(vocab_size, 48, **sizes | changes).build())


def own_bpe():
    return train_bpe(["the cat sat on the mat, he'll say don't to 1234 rats"] * 2, 280)


def read_tokenizer(path):
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def assert_same_tokens(read, tokenizer):
    assert encode(read, [NASTY]) == encode(tokenizer, [NASTY])
    assert read(NASTY)["input_ids"] == tokenizer(NASTY)["input_ids"]
    assert read.decode(read(NASTY)["input_ids"]) == NASTY
    assert read.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("bias", [True, False])
def test_transformers_reads_the_same_tokens_and_logits_from_gguf(bias, tmp_path):
    tokenizer = own_bpe()
    model = random_model(len(tokenizer), bias=bias)
    ids = torch.randint(0, len(tokenizer), (2, 40))
    path = tmp_path / "a.gguf"
    write_gguf(model, tokenizer, path)
    # transformers does not read the number of positions from a GPT-2's GGUF file.
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, n_positions=SHAPE["n_positions"]
    )
    with torch.no_grad():
        expected, logits = model(ids), found.eval()(ids).logits
    assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert_same_tokens(read_tokenizer(path), tokenizer)


def test_gpt2s_own_bpe_gives_the_same_tokens(gpt2, tmp_path):
    write_gguf(random_model(len(gpt2), n_layer=1, n_embd=2), gpt2, tmp_path / "gpt2.gguf")
    # Not by `AutoTokenizer`, which reads the whole file again for its config, slowly.
    read = GPT2Tokenizer.from_pretrained(tmp_path, gguf_file="gpt2.gguf")
    assert_same_tokens(read, gpt2)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config], ids=["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_a_llama_from_gguf(tied, kind, tmp_path):
    tokenizer, name = own_bpe(), kind.architecture
    model = random_llama(kind, 280, tied=tied)
    ids = torch.randint(0, 280, (2, 40))
    write_gguf(model, tokenizer, tmp_path / "a.gguf")
    # transformers does not read the channels of a head from a Qwen3's GGUF file.
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32, head_dim=16
    ).eval()
    assert read.config.model_type == name and read.config.tie_word_embeddings == tied
    with torch.no_grad():
        expected, found = model(ids), read(ids).logits
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert_same_tokens(read_tokenizer(tmp_path / "a.gguf"), tokenizer)
    found = metadata(tmp_path / "a.gguf")
    assert found[f"{name}.attention.head_count_kv"] == 2
    assert found[f"{name}.attention.key_length"] == found[f"{name}.attention.value_length"] == 16
    assert found[f"{name}.rope.freq_base"] == model.config.rope_theta


def metadata(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def test_metadata_and_tensors_follow_llama_cpps_converter(tmp_path):
    """llama.cpp reads a GPT-2 with these keys; rows without a token are unused tokens."""
    tokenizer = own_bpe()
    tokenizer.chat_template = "{{ messages }}"
    write_gguf(random_model(300, n_embd=40), tokenizer, tmp_path / "a.gguf", "mine")
    found = metadata(tmp_path / "a.gguf")
    assert found["general.architecture"] == "gpt2" and found["general.name"] == "mine"
    assert found["general.file_type"] == gguf.LlamaFileType.ALL_F32
    assert found["gpt2.context_length"] == 48 and found["gpt2.feed_forward_length"] == 160
    assert found["gpt2.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id == 279
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert found["tokenizer.ggml.tokens"][279:281] == ["<|endoftext|>", "[PAD280]"]
    kinds = gguf.TokenType
    assert found["tokenizer.ggml.token_type"][278:281] == [
        kinds.NORMAL,
        kinds.CONTROL,
        kinds.UNUSED,
    ]
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert "output.weight" not in tensors  # tied
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"F32"}
    assert list(tensors["blk.0.attn_qkv.weight"].shape) == [40, 120]  # in, out


def normalizing(tokenizer):
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


REFUSED = {
    "characters": lambda: char_tokenizer("abc"),
    "normalizer": lambda: normalizing(own_bpe()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(reason, tmp_path):
    tokenizer = REFUSED[reason]()
    with refused("cannot encode text as the tokenizer does"):
        write_gguf(random_model(300), tokenizer, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_a_model_that_gguf_cannot_hold_is_refused(tmp_path):
    exact = random_model(280, gelu="none")
    with refused("exact GELU, but GGUF's GPT-2 has the tanh"):
        write_gguf(exact, own_bpe(), tmp_path / "a.gguf")
    with refused("llama.cpp does not have nanochat: serve the model by transformers serve"):
        write_gguf(random_llama(NanochatConfig, 280), own_bpe(), tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    save_pretrained(random_model(280), path, own_bpe())
    return path


def test_the_recipe_writes_gguf_and_replaces_nothing(saved, tmp_path, capsys):
    output = tmp_path / "new/tiny.gguf"
    killed = output.with_name(f".files.{socket.gethostname()}.4194304.0.partial")
    killed.mkdir(parents=True)
    flags = ("--model", saved, "--output", output)
    run_recipe("export", *flags)
    assert capsys.readouterr().out.startswith(f"The model is in {output}, 0.")
    assert [path.name for path in output.parent.iterdir()] == ["tiny.gguf"]
    assert metadata(output)["general.name"] == saved.name
    before = output.read_bytes()
    with refused("an export does not overwrite it"):
        run_recipe("export", *flags)
    assert output.read_bytes() == before


def test_an_export_on_a_full_disk_names_its_file(saved, small_disk):
    output = small_disk(1) / "out/tiny.gguf"
    (output.parents[1] / "filler").write_bytes(bytes(700_000))
    with refused(f"^{output} could not be written .* free disk space"):
        run_recipe("export", "--model", saved, "--output", output)
    assert list(output.parent.iterdir()) == []

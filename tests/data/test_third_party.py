"""Token files of other trainers open and train as they are."""

import subprocess

import numpy as np
import pytest
from conftest import ROOT, make_text, write_lines

from gpt2_accel.data.mixture import write_mixture
from gpt2_accel.data.shards import (
    TokenStream,
    data_fingerprint,
    load_data_tokenizer,
    read_manifest,
    verify_data,
)
from gpt2_accel.tokenizer import fingerprint, save_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2")


def llmc(tokens, magic=20240520, version=1):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + tokens.tobytes()


@pytest.mark.parametrize(
    "files",
    [
        {"train.bin": TOKENS[:4000].tobytes(), "val.bin": TOKENS[4000:].tobytes()},
        {
            "fineweb_train_000001.bin": llmc(TOKENS[:2500]),
            "fineweb_train_000002.bin": llmc(TOKENS[2500:4000]),
            "fineweb_val_000000.bin": llmc(TOKENS[4000:]),
        },
    ],
    ids=["nanoGPT", "llm.c"],
)
def test_files_of_other_trainers_are_read_without_conversion(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    train, val = (TokenStream(tmp_path, split) for split in ("train", "val"))
    assert train.read(0, train.tokens).tolist() == TOKENS[:4000].tolist()
    assert train.read(2490, 20).tolist() == TOKENS[2490:2510].tolist()
    assert val.read(0, val.tokens).tolist() == TOKENS[4000:].tolist()
    assert read_manifest(tmp_path)["tokenizer"]["end_of_text"] == 50256
    assert verify_data(tmp_path) == len(files)
    before = data_fingerprint(tmp_path)
    (tmp_path / list(files)[-1]).unlink()
    assert data_fingerprint(tmp_path) != before


@pytest.mark.parametrize("content", [TOKENS.tobytes()[:-1], llmc(TOKENS)[:-2]])
def test_truncated_files_are_refused(tmp_path, content):
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(
        ValueError, match="train.bin is not the shard .*, by its header or its size"
    ):
        TokenStream(tmp_path, "train")


def test_nanogpt_character_data_and_missing_manifests_are_refused(tmp_path, data_dir):
    (tmp_path / "train.bin").write_bytes(TOKENS.tobytes())
    (tmp_path / "meta.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match="vocabulary is in a pickle"):
        read_manifest(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "train_000000.bin").write_bytes((data_dir / "train_000000.bin").read_bytes())
    with pytest.raises(FileNotFoundError, match="manifest.json is missing"):
        read_manifest(tmp_path)


def test_what_datatrove_writes_with_gpt2s_bpe_trains_under_other_names(gpt2, tmp_path):
    """The pipeline of docs/data.md, by the local executor; the last of four tasks has no file."""
    pytest.importorskip("datatrove")
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger

    texts, data = [make_text(60, seed) for seed in range(90)], tmp_path / "data"
    (tmp_path / "text").mkdir()
    for number in range(3):
        write_lines(tmp_path / f"text/{number}.jsonl", [{"text": t} for t in texts[number::3]])
    save_tokenizer(gpt2, tmp_path / "gpt2")
    tokenizer = DocumentTokenizer(
        str(tmp_path / "tokens"),
        tokenizer_name_or_path=str(tmp_path / "gpt2/tokenizer.json"),
        eos_token="<|endoftext|>",
        seed=1,
    )
    tokenize = [JsonlReader(str(tmp_path / "text")), tokenizer]
    LocalPipelineExecutor(tokenize, tasks=4, logging_dir=str(tmp_path / "logs/1")).run()
    options = {"max_tokens_per_file": 2000, "seed": 1, "progress": False}
    merger = DocumentTokenizerMerger(str(tmp_path / "tokens"), str(data), "words", **options)
    LocalPipelineExecutor([merger], tasks=1, logging_dir=str(tmp_path / "logs/2")).run()
    rename = "for f in *.ds; do mv $f train_${f%%_*}.bin; done; mv train_000.bin val_000.bin"
    assert f"`{rename}`" in (ROOT / "docs/data.md").read_text()
    subprocess.run(rename, shell=True, cwd=data, check=True)
    train, val = (TokenStream(data, split) for split in ("train", "val"))
    ids = np.concatenate([stream.read(0, stream.tokens) for stream in (train, val)])
    text = load_data_tokenizer(data).decode(ids.tolist())
    assert sorted(text.split("<|endoftext|>")[:-1]) == sorted(texts)
    assert verify_data(data) > 2 and train.tokens > val.tokens > 1000
    write_mixture(tmp_path / "mix", {str(data): 1})
    assert fingerprint(load_data_tokenizer(tmp_path / "mix")) == fingerprint(gpt2)

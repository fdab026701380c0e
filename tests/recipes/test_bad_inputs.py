"""Bad inputs to all recipes: each ends in one sentence that names the mistake, and nothing is written.

`wrong_commands.txt` lists those that are a command line; those that have files or environment variables of their own are here.
"""

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
from conftest import make_text, run, tiny_config
from launching import ROOT, python

from gpt2_accel.data.prepare import prepare
from gpt2_accel.tokenizer import char_tokenizer

TEXT = make_text(400, 0)
DEEP = "[" * 100_000
BINARY = bytes(range(256)) * 40
FLAGS = {
    "small": "--n_layer 2 --n_head 2 --n_embd 32 --n_positions 32 --micro_batch_size 4 --total_batch_size 128 "
    "--max_steps 8 --eval_every 0 --sample_every 0 --save_every 0 --resume_from latest"
}
FLAGS["tiny"] = "--data_dir {data} " + FLAGS["small"]


class Copy(NamedTuple):
    """A copy of a valid folder of the fixture `whole`, which the row damages."""

    name: str


class Row(NamedTuple):
    """A command line, words of its message, files of its folder, and environment variables.

    `files` are written in order: text, bytes, a `Copy`, or None to remove a file of a copy.
    """

    command: str
    words: str
    files: Mapping[str, str | bytes | Copy | None] = MappingProxyType({})
    env: Mapping[str, str] = MappingProxyType({})


def damaged(folder: str, name: str, changes: dict) -> dict:
    """Returns the files of a copy of a folder of `whole`, under a name, with some of its files changed."""
    return {name: Copy(folder), **{f"{name}/{file}": content for file, content in changes.items()}}


def command_lines() -> Iterator[Row]:
    for line in Path(__file__).with_name("wrong_commands.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            yield Row(*line.split(" => "))


def config_files() -> Iterator[Row]:
    for recipe, content, words in (
        ("quickstart", "sample_prompts: once", "c.yaml: sample_prompts is 'once'"),
        ("push_to_hub", "repo_id: a/b", "required: --model"),
    ):
        yield Row(f"{recipe} --config c.yaml", words, {"c.yaml": content})


def environment() -> Iterator[Row]:
    for name, value, words in (
        ("ACCELERATE_MIXED_PRECISION", "fp7", "Unknown mixed_precision mode: fp7"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "Accelerate has no fp16 here"),
        ("WORLD_SIZE", "2", "WORLD_SIZE is 2, but Accelerate has num_processes 1"),
    ):
        yield Row("pretrain_124m {tiny} --output_dir run", words, {}, {name: value})
    yield Row("speed_ladder", "start it with python", {}, {"WORLD_SIZE": "2"})


def data() -> Iterator[Row]:
    train = "pretrain_124m {small} --data_dir d --output_dir run"
    for name, content, words in (
        ("manifest.json", DEEP, "d/manifest.json is damaged"),
        ("manifest.json", '{"format": "gpt2_accel token shards", "version": 9}', "newer release"),
        ("train_000000.bin", BINARY, "train_000000.bin"),
        ("tokenizer/tokenizer.json", None, "tokenizer"),
    ):
        yield Row(train, words, damaged("data", "d", {name: content}))
    short = "--eval_every 2 --n_positions 1000 --total_batch_size 4000"
    for flags, words in (("--n_positions 100000", "tokens"), (short, "val")):
        yield Row(f"{train} {flags}", words, {"d": Copy("data")})
    for command in ("evaluate --model {run}", "prepare_data --verify", "prepare_data"):
        files = damaged("data", "d", {"train_000000.bin": BINARY})
        yield Row(command + " --data_dir d", "train_000000.bin", files)
    yield Row("shakespeare_char --input x.txt", "x.txt", {"x.txt": TEXT.encode("utf-16")})


def checkpoints() -> Iterator[Row]:
    resume = "pretrain_124m {tiny} --output_dir run --resume_from c"
    for name, content, words in (
        ("model.safetensors", BINARY, "model.safetensors"),
        ("training_state/manifest.json", DEEP, "manifest"),
        ("tokenizer.json", "{}", "tokenizer.json"),
    ):
        yield Row(resume, words, damaged("checkpoint", "c", {name: content}))
    words = "but the settings say GPTConfig("
    yield Row(resume + " --n_layer 3", words, {"c": Copy("checkpoint")})


def models() -> Iterator[Row]:
    for command, name, content, words in (
        ("sample --model m", "config.json", None, "m"),
        ("finetune_shakespeare --init_from m --input {text}", "config.json", DEEP, "JSON"),
        ("sample --model m", "config.json", '{"model_type": "mistral"}', "of the type 'mistral'"),
        ("sample --model m", "config.json", '{"model_type": "gpt2", "n_embd": 76800000}', "m"),
        ("evaluate --model m --tasks text --data {text}", "model.safetensors", None, "m"),
        ("sample --model m", "model.safetensors", BINARY, "m"),
        ("sample --model m", "tokenizer.json", None, "tokenizer"),
        ("finetune_shakespeare --init_from m --input {text}", "tokenizer.json", DEEP, "tokenizer"),
    ):
        yield Row(command, words, damaged("model", "m", {name: content}))
    yield Row("sample --model m", "m", {"m": TEXT})


def sources() -> Iterator[Row]:
    """Files from which a recipe makes something else."""
    for task, content, words in (
        ("hellaswag", "{", "x.jsonl, line 1"),
        ("text", '{"text": ""}', "text"),
    ):
        command = f"evaluate --model {{run}} --data x.jsonl --tasks {task}"
        yield Row(command, words, {"x.jsonl": content})
    table = pyarrow.table({"text": [make_text(50, seed) for seed in range(50)]})
    pyarrow.parquet.write_table(table, sink := pyarrow.BufferOutputStream())
    parquet = sink.getvalue().to_pybytes()
    flipped = parquet[:200] + bytes(byte ^ 255 for byte in parquet[200:400]) + parquet[400:]
    packed = gzip.compress(b'{"text": "a"}\n' * 1000)
    for name, content, words in (
        ("x.jsonl", '{"text": "a"}\n[1, 2]\n', "x.jsonl, line 2, holds"),
        ("x.jsonl.gz", packed[: len(packed) // 2], "x.jsonl.gz"),
        ("x.parquet", flipped, "x.parquet"),
        ("x.txt", "", "x.txt"),
        ("x.pdf", b"%PDF-1.7\n" + BINARY, "x.pdf"),
    ):
        command = f"prepare_data text {name} --data_dir d --tokenizer bytes --workers 1"
        yield Row(command, words, {name: content})
    command = "import_checkpoint --input x.bin --output_dir m --tokenizer none"
    yield Row(command, "x.bin", {"x.bin": BINARY})


def chat() -> Iterator[Row]:
    said = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    good = "".join(json.dumps({"messages": said}) + "\n" for _ in range(3))
    usual = "--model {model} --sequence_length 32"
    for content, options, words in (
        ('{"question": "Why?"}', usual, "r.jsonl, line 1, has the fields question, but a conv"),
        ("not json", usual, "r.jsonl, line 1, is not valid JSON"),
        ("", usual, "holds no conversation for the split 'train'"),
        (good, "--model {model} --sequence_length 9", "3 conversations of more tokens than"),
        (good, "--model {model} --sequence_length 999", "exceeds the 32 positions"),
        (good, "--model {data} --sequence_length 32", "is not a Hugging Face model"),
        (good, "--model {chars_model} --sequence_length 32", "cannot be trained with"),
        (good, "--sequence_length 32", "required: --model"),
    ):
        command = f"prepare_data chat r.jsonl {options} --data_dir d"
        yield Row(command, words, {"r.jsonl": content})
    command = "python_conversations --functions 9 --invented 1 --output ."
    yield Row(command, "other questions", {"train.jsonl": "mine\n"})
    command = "evaluate --model {model} --tasks chat --data r.jsonl"
    yield Row(command, "has no chat template", {"r.jsonl": '{"prompt": "a", "answer": "b"}'})
    for arguments, words in (
        ("none.yaml", "none.yaml: there is no such file"),
        ("--output_dir d", "the following arguments are required: --study"),
    ):
        study = {"s.yaml": "recipe: quickstart\nvariants: {a: {}}"}
        yield Row(f"compare {arguments}", words, study)


SECTIONS = (command_lines, config_files, environment, data, checkpoints, models, sources, chat)
ROWS = [row for section in SECTIONS for row in section()]


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """Valid folders and files by name."""
    folder = tmp_path_factory.mktemp("whole")
    texts = {"train": [TEXT] * 3, "val": [TEXT]}
    prepare(texts, char_tokenizer(TEXT), folder / "chars", source="characters")
    shutil.copytree(data_dir, folder / "data")
    run(tiny_config(folder / "data", folder / "run", max_steps=2, save_every=1))
    run(tiny_config(folder / "chars", folder / "chars_model", max_steps=1))
    shutil.copytree(folder / "run" / "checkpoint-1", folder / "checkpoint")
    (folder / "model").mkdir()
    own = {"run.json", "status.json"}
    for path in folder.joinpath("run").iterdir():
        if path.suffix in (".json", ".safetensors") and path.name not in own:
            shutil.copy(path, folder / "model")
    (folder / "text").write_text(TEXT)
    (folder / "play").write_text(make_text(300, 1))
    return {path.name: path for path in folder.iterdir()}


def lay_out(files: dict, folder: Path, whole: dict[str, Path]) -> None:
    """Writes the files of a row."""
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.unlink()
        elif isinstance(content, Copy):
            shutil.copytree(whole[content.name], path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def everything(*folders: Path) -> dict[str, tuple[int, int]]:
    """Returns all paths below the folders, with their modification times and sizes."""
    found = [path for folder in folders for path in sorted(folder.rglob("*"))]
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in found}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.command[:70])
def test_a_bad_input_prints_one_sentence_and_writes_nothing(row, whole, tmp_path):
    lay_out(row.files, tmp_path, whole)
    names = {name: str(path) for name, path in whole.items()}
    line = re.sub(r"{(small|tiny)}", lambda flags: FLAGS[flags[1]], row.command)
    recipe, *arguments = (part.format(**names) for part in shlex.split(line))
    root = whole["data"].parent
    before = everything(tmp_path, root)
    done = python(ROOT / "recipes" / f"{recipe}.py", *arguments, cwd=tmp_path, **row.env)
    words = re.sub(r"{(\w+)}", lambda name: names[name[1]], row.words)
    assert done.returncode >= 1, done
    *progress, line = done.stderr.splitlines()
    assert all(
        re.match(r"about [\d.]+ (bytes|kB|MB) of text, |tokenizing the", text) for text in progress
    ), done.stderr
    assert line.startswith(f"{recipe}.py: ") and words in line
    assert everything(tmp_path, root) == before


def test_the_table_covers_all_recipes():
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert {row.command.split()[0] for row in ROWS} == recipes

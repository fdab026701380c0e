"""Bad inputs to all recipes: each prints one sentence about the mistake and writes nothing.

`wrong_commands.txt` lists command lines, `wrong_inputs.yaml` those with files or variables.
"""

import gzip
import re
import shlex
import shutil
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import make_text, reset_accelerate, run, tiny_config, write_lines
from launching import ROOT, in_process
from tables import table

from gpt2_accel.data.prepare import prepare
from gpt2_accel.tokenizer import char_tokenizer

TEXT = make_text(400, 0)
SMALL = (
    "--n_layer 2 --n_head 2 --n_embd 32 --n_positions 32 --micro_batch_size 4 "
    "--total_batch_size 128 --max_steps 8 --eval_every 0 --sample_every 0 --save_every 0 "
    "--resume_from latest"
)
FLAGS = {"{small}": SMALL, "{tiny}": f"--data_dir {{data}} {SMALL}"}


def broken_parquet() -> bytes:
    table = pyarrow.table({"text": [make_text(50, 0)] * 50})
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    content = sink.getvalue().to_pybytes()
    return content[:200] + bytes(byte ^ 255 for byte in content[200:400]) + content[400:]


SPECIAL = {
    "BINARY": bytes(range(256)) * 40,
    "UTF16": TEXT.encode("utf-16"),
    "DEEP": b'{"text":' * 100_000,
    "GZIP": gzip.compress(b'{"text": "a"}\n' * 1000)[:30],
    "PARQUET": broken_parquet(),
}


def rows() -> list[dict]:
    """Returns the wrong inputs: `command`, `words` of its message, and perhaps `files`, `env`."""
    lines = (ROOT / "tests/recipes/wrong_commands.txt").read_text().splitlines()
    pairs = (line.split(" => ") for line in lines if line and line[0] != "#")
    cases = [{"command": command, "words": words} for command, words in pairs]
    return cases + table("recipes/wrong_inputs")


@pytest.fixture(scope="module")
def valid(data_dir, tmp_path_factory):
    """Valid folders and files by name."""
    folder = tmp_path_factory.mktemp("valid")
    texts = {"train": [TEXT] * 3, "val": [TEXT]}
    prepare(texts, char_tokenizer(TEXT), folder / "chars", source="characters")
    shutil.copytree(data_dir, folder / "data")
    run(tiny_config(folder / "data", folder / "run", max_steps=2, save_every=1))
    run(tiny_config(folder / "chars", folder / "chars_model", max_steps=1))
    shutil.copytree(folder / "run" / "checkpoint-1", folder / "checkpoint")
    (folder / "model").mkdir()
    not_of_a_model = {"run.json", "status.json", "model.manifest.json"}
    for path in folder.joinpath("run").iterdir():
        if path.suffix in (".json", ".safetensors") and path.name not in not_of_a_model:
            shutil.copy(path, folder / "model")
    (folder / "text").write_text(TEXT)
    (folder / "play").write_text(make_text(300, 1))
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    write_lines(folder / "chats.jsonl", [{"messages": messages}] * 3)
    return {path.stem: path for path in folder.iterdir()}


def lay_out(files: dict, folder: Path, valid: dict[str, Path]) -> None:
    """Writes the files of a row."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if content is None:
            path.unlink()
        elif isinstance(content, dict):
            shutil.copytree(valid[content["copy"]], path)
        else:
            path.write_bytes(SPECIAL.get(content) or content.encode())


def everything(*folders: Path) -> dict[str, tuple[int, int]]:
    """Returns all paths below the folders, with their modification times and sizes."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*"))]
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["command"][:70])
def test_a_bad_input_prints_one_sentence_and_writes_nothing(row, valid, tmp_path, monkeypatch):
    lay_out(row.get("files", {}), tmp_path, valid)
    line, words = row["command"], row["words"]
    for name, value in FLAGS.items():
        line = line.replace(name, value)
    for name, path in valid.items():
        line = line.replace(f"{{{name}}}", str(path))
        words = words.replace(f"{{{name}}}", str(path))
    recipe, *arguments = shlex.split(line)
    reset_accelerate()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "recipes")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO()))
    for name, value in row.get("env", {}).items():
        monkeypatch.setenv(name, value)
    before = everything(tmp_path, valid["data"].parent)
    done = in_process(ROOT / "recipes" / f"{recipe}.py", *arguments, fails=True)
    *progress, message = done.stderr.splitlines()
    assert all(re.match("about .* of text, |tokenizing ", text) for text in progress), done.stderr
    assert message.startswith(f"{recipe}.py: ")
    assert words in message
    assert everything(tmp_path, valid["data"].parent) == before


def test_the_tables_cover_all_recipes():
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert {row["command"].split()[0] for row in rows()} == recipes

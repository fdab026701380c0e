"""Imports the token files of other trainers into a data folder.

| trainer               | files                             | content                             |
|-----------------------|-----------------------------------|-------------------------------------|
| nanoGPT               | `train.bin`, `val.bin`            | uint16 ids                          |
| llm.c, modded-nanogpt | `fineweb_train_000001.bin`        | 256 int32 (magic, version, tokens), |
|                       |                                   | then the ids: `HEADERS`             |
| datatrove             | `00000_00000_doc_shuffled.ds` and | uint16 or uint32 ids; two lines:    |
|                       | `….ds.metadata`                   | `TOKENIZER|BYTES PER ID`, tokens    |

The names of the first two give the split. Their ids are of the tokenizer in the folder's
`tokenizer/`; without it uint16 ids are of GPT-2's BPE. datatrove's `DocumentTokenizer` and
`DocumentTokenizerMerger` write files with any tokenizer. The last 5% of their tokens, at most
`MOST_HELD_OUT`, are the validation split. None of these files has checksums or a count of the
text's bytes.
"""

import re
from pathlib import Path
from typing import Any

from gpt2_accel.data.prepare import make_data, plan_of, tokenizer_entry
from gpt2_accel.data.shards import MAGIC, VERSION, ShardWriter, TokenStream
from gpt2_accel.data.sources import state_of
from gpt2_accel.runtime.progress import progress
from gpt2_accel.tokenizer import gpt2_tokenizer, load_tokenizer, text_ends, text_start

NAME = re.compile(r"(?:.*_)?(train|val)(?:_\d+)?\.bin|.*\.ds")
# The first 8 of 1,024 bytes: the magics 20240520 and 20240801, the versions 1 and 7.
HEADERS = {b"\x88\xd84\1\1\0\0\0": 2, b"\xa1\xd94\1\7\0\0\0": 4}  # -> bytes per id
PROBED = 2**22  # bytes that show whether ids without a header are wider than 16 bits
MOST_HELD_OUT = 10_000_000  # tokens
CHUNK = 2**24  # tokens in memory, and in a shard


def import_tokens(source: str, data_dir: str | Path, command: str) -> dict:
    """Copies the token files of another trainer, a file or a folder, into the folder `data_dir`.

    The tokens and their order stay the same. Returns the manifest; its `imported` has the splits
    as 0.5 described them, which trained on the files as they are. Raises `ValueError` if a file is
    damaged or of another format, or has ids that the tokenizer does not have, `FileNotFoundError`
    if there is no tokenizer, and what `make_data` raises.
    """
    path = Path(source)
    paths = sorted([path, *path.glob("*")])
    files = {path: read_header(path) for path in paths if NAME.fullmatch(path.name)}
    kinds = {file[:2] for file in files.values()}
    if len(kinds) != 1:
        raise ValueError(
            f"{source} holds token files of {len(kinds)} kinds {sorted(kinds)}: give files of one, "
            "with names as train.bin, val.bin, fineweb_train_000001.bin or 000_datatrove.ds"
        )
    [(name, width)] = kinds
    folder = min(files).parent
    own = folder / "tokenizer"
    where = own if name == "tokenizer/" or own.is_dir() else name.removesuffix("/tokenizer.json")
    tokenizer = gpt2_tokenizer() if where == "gpt2" else load_tokenizer(where)
    marks = text_start(tokenizer)
    left = sum(file[2] for file in files.values())
    left -= min(left // 20, MOST_HELD_OUT)  # datatrove's tokens for training
    splits: dict[str, dict] = {}
    for path, (_, _, tokens, offset) in files.items():
        parts = {NAME.sub(r"\1", path.name): tokens}
        if path.suffix == ".ds":
            marks = text_ends(tokenizer)[-1:]  # a token follows each document
            train = min(tokens, left)
            left -= train
            parts = {"train": train, "val": tokens - train}
        for split, count in parts.items():
            new: dict[str, Any] = {"tokens": 0, "documents": None, "bytes": None, "shards": []}
            entry = splits.setdefault(split, new)
            entry["tokens"] += count
            shard = {"file": path.name, "tokens": count, "offset": offset, "sha256": None}
            entry["shards"].append(shard)
            offset += count * width
    manifest = {
        "version": VERSION,
        "dtype": f"uint{8 * width}",
        "tokenizer": tokenizer_entry(tokenizer, name, marks),
        "splits": splits,
        "imported": splits,
    }

    def write(target: Path, record: dict) -> dict:
        copied = {}
        for split, entry in splits.items():
            stream = TokenStream(folder, split, manifest)
            shards: list[dict] = []
            starts = range(0, stream.tokens, CHUNK)
            for start in progress(starts, f"importing {split}", len(starts)):
                writer = ShardWriter(target / f"{split}_{len(shards):06d}.bin", stream.dtype)
                writer.append(stream.read(start, min(CHUNK, stream.tokens - start)))
                shards.append(writer.close())
            copied[split] = entry | {"shards": shards}
        return manifest | {"splits": copied}

    plan = plan_of([manifest, [state_of(str(path)) for path in files]], tokenizer)
    return make_data(write, tokenizer, data_dir, plan, source=source, command=command)


def read_header(path: Path) -> tuple[str, int, int, int]:
    """Returns a file's tokenizer, bytes per id, number of ids and offset of the first in bytes.

    Raises `ValueError` if the file has another format.
    """
    if path.suffix == ".ds":
        kind, count, *_ = Path(f"{path}.metadata").read_text().splitlines()
        name, _, size = kind.removeprefix("openai-community/").partition("|")
        return name, int(size or 2), int(count), 0  # older versions have no width
    with open(path, "rb") as file:
        start = file.read(PROBED)
    width = HEADERS.get(start[:8])
    if width:
        tokens = int.from_bytes(start[8:12], "little")
        return "gpt2" if width == 2 else "tokenizer/", width, tokens, 1024
    # The third byte of 32-bit ids is that small.
    wide = max(start[2::4], default=0) < 8
    if wide or start.startswith(MAGIC) or path.with_name("meta.pkl").exists():
        raise ValueError(
            f"{path} does not hold uint16 ids of GPT-2's BPE, by its beginning or meta.pkl: "
            "prepare nanoGPT's characters by prepare_data.py shakespeare-char --input, write wider "
            "ids as llm.c does, and restore the manifest.json of this package's shards"
        )
    # Rounded up, so that a file that ends in the middle of a token is refused.
    return "gpt2", 2, (path.stat().st_size + 1) // 2, 0

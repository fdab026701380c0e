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

import numpy as np

from gpt2_accel.data.prepare import make_data, plan_of, tokenizer_entry
from gpt2_accel.data.shards import VERSION, ShardWriter
from gpt2_accel.data.sources import state_of
from gpt2_accel.tokenizer import gpt2_tokenizer, load_tokenizer, text_ends, text_start

NAME = re.compile(r"(?:.*_)?(train|val)(?:_\d+)?\.bin|.*\.ds")
# The first 8 of 1,024 bytes, the magics 20240520 and 20240801 with the versions 1 and 7 -> the
# tokenizer, and the bytes per id.
HEADERS = {
    b"\x88\xd84\1\1\0\0\0": ("gpt2", 2),
    b"\xa1\xd94\1\7\0\0\0": ("tokenizer/", 4),
}
PROBED = 2**21  # ids that show whether those without a header are wider than 16 bits
MOST_HELD_OUT = 10_000_000  # tokens


def import_tokens(source: str, data_dir: str | Path, command: str) -> dict:
    """Copies the token files of another trainer, a file or a folder, into the folder `data_dir`.

    The tokens and their order stay the same. Returns the manifest. Raises `ValueError` if a file is
    damaged or of another format, or has ids that the tokenizer does not have, `FileNotFoundError`
    if there is no tokenizer, and what `make_data` raises.
    """
    path = Path(source)
    paths = sorted([path, *path.glob("*")])
    files = {path: open_tokens(path) for path in paths if NAME.fullmatch(path.name)}
    kinds = {(name, ids.dtype) for name, ids in files.values()}
    if len(kinds) != 1:
        raise ValueError(
            f"{source} holds token files of {len(kinds)} kinds {sorted(map(str, kinds))}: give "
            "files of one, with names as train.bin, val.bin, fineweb_train_000001.bin or "
            "000_datatrove.ds"
        )
    [(name, dtype)] = kinds
    own = min(files).with_name("tokenizer")
    where = own if own.is_dir() else name.removesuffix("/tokenizer.json")
    tokenizer = gpt2_tokenizer() if where == "gpt2" else load_tokenizer(where)

    marks = text_start(tokenizer)
    if min(files).suffix == ".ds":
        marks = text_ends(tokenizer)[-1:]  # a token follows each document

    def write(folder: Path, record: dict) -> dict:
        left = sum(len(ids) for _, ids in files.values())
        left -= min(left // 20, MOST_HELD_OUT)  # datatrove's tokens for training
        writers = {s: ShardWriter(folder / f"{s}_000000.bin", dtype) for s in ("train", "val")}
        for path, (_, ids) in files.items():
            if ids.max(initial=0) >= len(tokenizer):
                raise ValueError(
                    f"{path} holds the token id {ids.max()}, and its tokenizer {len(tokenizer)} "
                    f"tokens: put the files' own tokenizer into {own}"
                )
            cut = {"train": len(ids), "val": 0}.get(NAME.sub(r"\1", path.name), left)
            writers["train"].append(ids[:cut])
            writers["val"].append(ids[cut:])
            left = max(0, left - len(ids))
        counts = {"documents": None, "bytes": None}
        splits = {
            split: {"tokens": writer.tokens} | counts | {"shards": [writer.close()]}
            for split, writer in writers.items()
        }
        return {
            "version": VERSION,
            "dtype": dtype.name,
            "tokenizer": tokenizer_entry(tokenizer, name, marks),
            "splits": splits,
        }

    plan = plan_of([(path.name, state_of(str(path))) for path in files], tokenizer)
    return make_data(write, tokenizer, data_dir, plan, source=source, command=command)


def open_tokens(path: Path) -> tuple[str, np.ndarray]:
    """Returns the name of a file's tokenizer, and its token ids, mapped into memory, (n,).

    Raises `ValueError` if the file has another format or is not complete.
    """
    name = "gpt2"
    width = 2
    offset = 0
    size = path.stat().st_size
    tokens = (size + 1) // 2  # rounded up: refuses a file that ends in the middle of a token
    start = np.fromfile(path, "<u2", PROBED)
    header = start[:4].tobytes()
    if path.suffix == ".ds":
        kind, count, *_ = Path(f"{path}.metadata").read_text().splitlines()
        name, _, own_width = kind.removeprefix("openai-community/").partition("|")
        width = int(own_width or 2)  # older versions have none
        tokens = int(count)
    elif header in HEADERS:
        name, width = HEADERS[header]
        tokens = int(start[4:6].view("<u4")[0])
        offset = 1024
    # The second half of 32-bit ids is small.
    elif start[1::2].max(initial=0) < 8 or path.with_name("meta.pkl").exists():
        raise ValueError(
            f"{path} does not hold uint16 ids of GPT-2's BPE, by its beginning or meta.pkl: "
            "prepare nanoGPT's characters by prepare_data.py shakespeare-char --input, and write "
            "wider ids as llm.c does, with the tokenizer in tokenizer/"
        )
    if tokens * width > size - offset:
        raise ValueError(f"{path} does not hold {tokens:,} tokens: copy or download it again")
    if not tokens:  # a task of datatrove without documents; an empty file cannot be mapped
        return name, np.empty(0, f"<u{width}")
    return name, np.memmap(path, f"<u{width}", "r", offset, tokens)

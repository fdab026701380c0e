"""Writes the data of the study of many epochs (docs/results.md): parts of two corpora, with large
validation splits.

    python benchmarks/little_texts.py

`data/little_python` and `data/little_shakespeare` have 200,000 characters of training text in a BPE
of 1,024 tokens; `data/own_python` and `data/own_shakespeare` have 900,000 characters in a BPE of
4,096. The Python text consists of full files of the standard library, ordered by a hash of their
names. The other text is the beginning of tiny Shakespeare; its last 15% are for validation.
"""

import sysconfig
from itertools import accumulate
from pathlib import Path

from gpt2_accel.data.documents import split_of, text_digest
from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.sources import read_text, tiny_shakespeare
from gpt2_accel.tokenizer import train_bpe

SIZES = {"little": (200_000, 1024), "own": (900_000, 4096)}  # characters, vocabulary
LONGEST = 40_000  # bytes of a file
# Tests, other people's packages, and files that are mostly tables.
LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "turtledemo", "pydoc_data", "encodings"}
LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__"}


def library() -> dict[str, str]:
    """Returns texts of the standard library by file name, ordered by a hash of the name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder)
        if not path.is_file() or not 0 < path.stat().st_size < LONGEST:
            continue
        if not LEFT_OUT.intersection(name.parts):
            names.append(name.as_posix())
    names.sort(key=text_digest)
    return {name: read_text(folder / name) for name in names}


def main() -> None:
    files = library()
    text = tiny_shakespeare()
    val = [content for name, content in files.items() if split_of(name) == "val"]
    train = [content for name, content in files.items() if split_of(name) == "train"]
    ends = list(accumulate(map(len, train)))
    for kind, (size, vocabulary) in SIZES.items():
        count = 1 + sum(end < size for end in ends)
        corpora = {
            "python": {"train": train[:count], "val": val},
            "shakespeare": {"train": [text[:size]], "val": [text[int(0.85 * len(text)) :]]},
        }
        for name, splits in corpora.items():
            tokenizer = train_bpe(splits["train"], vocabulary)
            prepare(splits, tokenizer, f"data/{kind}_{name}", source=f"a part of {name}")


if __name__ == "__main__":
    main()

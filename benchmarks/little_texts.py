"""Writes the data of the study of many epochs (docs/results.md): parts of two corpora, with large validation splits.

    python benchmarks/little_texts.py

Training text of 200,000 characters in a BPE of 1,024 tokens, in `data/little_python` and `data/little_shakespeare`, and of 900,000
characters in a BPE of 4,096, in `data/own_python` and `data/own_shakespeare`. Python's are whole files of its standard library in an
order by a hash of their names; Shakespeare's are the beginning of tiny Shakespeare, with its last 15% for validation.
"""

import sysconfig
from itertools import accumulate
from pathlib import Path

from gpt2_accel.data.documents import held_out, text_digest
from gpt2_accel.data.prepare import prepare
from gpt2_accel.data.sources import read_text, tiny_shakespeare
from gpt2_accel.tokenizer import train_bpe

SIZES = {"little": (200_000, 1024), "own": (900_000, 4096)}  # characters, vocabulary
LONGEST = 40_000  # bytes of a file
# Tests, other people's packages, and files that are mostly tables.
LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "turtledemo", "pydoc_data", "encodings"}
LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__"}


def library() -> dict[str, str]:
    """Returns the texts of files of the standard library by name, in the order of a hash of the name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = {path.relative_to(folder): path for path in folder.rglob("*.py") if path.is_file()}
    names = [n for n, path in found.items() if 0 < path.stat().st_size < LONGEST]
    names = [n for n in names if not LEFT_OUT & {*n.parts}]
    ordered = sorted((name.as_posix() for name in names), key=text_digest)
    return {name: read_text(folder / name) for name in ordered}


def main() -> None:
    files, text = library(), tiny_shakespeare()
    val = [content for name, content in files.items() if held_out(name)]
    train = [content for name, content in files.items() if not held_out(name)]
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

"""Sources of text: files of plain text, files of rows, data sets of the Hub, and texts in memory."""

import codecs
import http.client
import itertools
import os
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_accel.data.documents import (
    CHUNK,
    VAL_SHARE,
    Document,
    Rule,
    by_hash,
    chunks,
    fitting_share,
    last_part,
    next_cut,
    text_digest,
)
from gpt2_accel.data.rows import ROW_SUFFIXES, column_of, place_of, read_rows, reading, row_suffix
from gpt2_accel.runtime.files import first_line

if TYPE_CHECKING:
    from huggingface_hub import DatasetInfo

COMPRESSION = {".parquet": 2, ".gz": 3, ".zst": 3, ".bz2": 4}  # about
SAMPLED_ROWS = 2000  # that decide how rows are held out
SECONDS_TO_ANSWER = 8
TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


class ChangedSource(OSError):
    """A file has changed while it was read."""


@dataclass(frozen=True)
class Source:
    """A part of a corpus, with its documents.

    `size` is an estimate of its text in bytes. `modified` is the time of a local file: a remote one's name has the commit.
    The `repr` changes with the text.
    """

    name: str
    documents: Callable[[], Iterator[Document]] = field(repr=False)
    size: int = 0
    modified: float | None = None


def texts(name: str, splits: Mapping[str, Iterable[str]], size: int = 0) -> Source:
    """Returns the source of each split's documents in memory, `size` bytes together."""

    def documents() -> Iterator[Document]:
        for split, own in splits.items():
            for text in own:
                yield Document(split, chunks([text]))

    return Source(name, documents, size)


def text_file(path: Path, split: str | None) -> Source:
    """Returns the source of a file of plain text, one document. Without a `split` its last `VAL_SHARE` is for validation."""
    size = path.stat().st_size
    state = state_of(str(path))

    def documents() -> Iterator[Document]:
        cut = size
        if split is None:
            cut = next_cut(path, int(size * (1 - VAL_SHARE)))
        rest = unchanged(read_part(path, cut, size), str(path), state)
        yield Document(split or "train", chunks(read_part(path, 0, cut)), str(path))
        yield Document("val", chunks(rest), str(path))

    return Source(f"{path}, {split}", documents, *state)


def read_part(path: Path, start: int, end: int) -> Iterator[str]:
    """Yields the text in bytes [start, end) of a file, without a byte-order mark."""
    with open(path, "rb") as file:
        file.seek(start)
        blocks = iter(lambda: file.read(min(end - file.tell(), CHUNK)), b"")
        encoding = "utf-8" if start else "utf-8-sig"
        yield from codecs.iterdecode(blocks, encoding, "surrogateescape")


def row_file(path: str, column: str, rule: Rule) -> Source:
    """Returns the source of a local or remote file with a document in the `column` of each row, held out by `rule`."""

    state = state_of(path)

    def documents() -> Iterator[Document]:
        for row, place in unchanged(read_rows(path, column), path, state):
            for split, text in rule(column_of(row, column, place)):
                yield Document(split, chunks([text]), place)

    return Source(f"{path}, {column}", documents, *state)


# Files of a corpus


def corpus_files(names: Mapping[Path, str], column: str) -> list[Source]:
    """Returns the sources of files, given with their names: first plain text, then rows.

    Plain text is held out by a hash of the name. If that is too little or too much of the text, the last `VAL_SHARE` of each
    file is held out instead. Raises `ValueError` if the first rows are not documents with a text in `column`.
    """
    splits: dict[Path, str | None] = {
        path: by_hash(name)[0][0] for path, name in names.items() if not row_suffix(path)
    }
    rows = [str(path) for path in names if path not in splits]
    sizes = {"train": 0, "val": 0}
    for path, split in splits.items():
        sizes[split] += path.stat().st_size
    if not fits(sizes):
        splits = dict.fromkeys(splits)
    return [*(text_file(*file) for file in splits.items()), *row_files(rows, column)]


def row_files(paths: Sequence[str], column: str, rule: Rule = by_hash) -> list[Source]:
    """Returns the sources of files of rows.

    Rows are held out by `rule`. If that is `by_hash`, and no fitting share of the text in the first `SAMPLED_ROWS` rows,
    it is by `last_part`; raises `ValueError` if one of these rows has no text in `column`.
    """
    files = [row_file(path, column, rule) for path in paths]
    if rule is not by_hash:
        return files
    sizes = {"train": 0, "val": 0}
    documents = itertools.chain.from_iterable(file.documents() for file in files)
    for document in itertools.islice(documents, SAMPLED_ROWS):
        sizes[document.split] += sum(map(len, document.chunks))
    if fits(sizes):
        return files
    return [row_file(path, column, last_part) for path in paths]


def fits(sizes: Mapping[str, int]) -> bool:
    """Whether the sizes of the splits, in bytes or characters, are a `fitting_share`."""
    return fitting_share(sizes["val"] / (sum(sizes.values()) or 1))


def state_of(path: str) -> tuple[int, float | None]:
    """Returns an estimate of the text in a file, in bytes, and the time at which a local one was
    modified."""
    with reading(path):
        file_system, name = place_of(path)
        info = file_system.info(name)
    return info["size"] * COMPRESSION.get(Path(path).suffix.lower(), 1), info.get("mtime")


def unchanged(parts: Iterable, path: str, state: tuple[int, float | None]) -> Iterator:
    """Yields the parts of a file. Raises `ChangedSource` at their end, or instead of an error in
    between, if the file's `state_of` is no longer `state`."""
    try:
        yield from parts
    finally:
        if state_of(path) != state:
            raise ChangedSource(
                f"{path} has changed since the preparation began: start the same command again, "
                "it starts anew"
            )


def find_files(
    source: str | Path, accepts: Callable[[Path], bool], kind: str, pattern: str | None = None
) -> dict[Path, str]:
    """Finds a file, or the sorted files below a folder that match `pattern` and are not hidden; returns those that
    `accepts` takes, with their names below the folder. Prints for a folder how many files are taken and left out.

    Raises `FileNotFoundError` if the source does not exist, `ValueError` if no file is of the `kind`.
    """
    source = Path(source)
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: give a file or a folder")
    found = {source: source.name}
    if source.is_dir():
        matching = set(source.rglob(pattern or "*"))
        files = [path for path in visible_files(source) if path in matching]
        found = {path: path.relative_to(source).as_posix() for path in files}
    elif not source.is_file():
        raise ValueError(f"{source} is a pipe or a device, not a regular file: write it to a file")
    taken = {path: name for path, name in found.items() if path.is_file() and accepts(path)}
    others = [path for path in found if path not in taken]
    line = f"{source}: took {len(taken):,} files"
    if others:
        line += f"; left out {len(others):,}, not {kind}, the first: {others[0].name}"
    if not taken:
        raise ValueError(f"{line}: give {kind}, or another --pattern of a folder's files")
    if source.is_dir():
        print(line, file=sys.stderr)
    return taken


def visible_files(folder: str | Path) -> list[Path]:
    """Returns the files below a folder that are not hidden, sorted. Raises `OSError` if a folder cannot be read, which
    `rglob` and `datasets` leave out."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [Path(parent, name) for name in names if name[0] != "."]
    return sorted(found)


def is_text(path: Path) -> bool:
    """Whether a path is a file of rows, or of UTF-8 text by its beginning; a few invalid bytes are allowed."""
    if row_suffix(path) and path.suffix.lower() in COMPRESSION:
        return True
    with open(path, "rb") as file:
        text = file.read(CHUNK).decode("utf-8", "replace")
    return "\0" not in text and 1000 * text.count("\ufffd") <= len(text)


def read_text(path: str | Path) -> str:
    """Returns the text of a UTF-8 file.

    Raises `FileNotFoundError` if it does not exist, `ValueError` if it is empty or not UTF-8.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it to UTF-8") from error
    if not text:
        raise ValueError(f"{path} is empty: give a file with text")
    return text


# Data sets of the Hub


def hub_files(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    data_files: str | None = None,
) -> tuple[list[str], str | None]:
    """Returns the files of a data set on the Hub or in a folder, and its revision (a commit).

    Raises `ValueError` if the data set, its configuration or split does not exist, or its files are
    not of `ROW_SUFFIXES`, `OSError` if the Hub has no such data set or cannot be reached, or if a
    folder cannot be read.
    """
    from datasets import load_dataset_builder
    from datasets.data_files import FILES_TO_IGNORE
    from huggingface_hub import constants

    if not (os.path.exists(name) or constants.HF_HUB_OFFLINE):
        revision = data_set_info(name, revision).sha  # `datasets` retries for longer
    local = visible_files(Path(name).resolve()) if os.path.isdir(name) else []
    try:
        builder = load_dataset_builder(name, config, data_files=data_files, revision=revision)
    except Exception as error:  # for an empty name, an IndexError
        raise ValueError(
            f"the data set {name} cannot be opened ({first_line(error)}): check its name, --config and --data_files, and "
            "the network; if it has a script, try --revision refs/convert/parquet"
        ) from error
    splits = builder.config.data_files or {}
    if split not in splits:
        known = ", ".join(map(str, splits)) or "none"
        raise ValueError(f"the data set {name} has no split {split!r}, only {known}: set --split")
    for file in splits[split]:
        if not row_suffix(file):
            raise ValueError(
                f"{file} is not a file of rows ({', '.join(ROW_SUFFIXES)}): convert it, or give "
                "--revision refs/convert/parquet, where the Hub has data sets as Parquet"
            )
    known_files = set(itertools.chain.from_iterable(splits.values()))
    for path in local if not (config or data_files) else []:
        # `datasets` takes the commonest format only, and only names with a split in them if there are such names.
        if row_suffix(path) and path.name not in FILES_TO_IGNORE and str(path) not in known_files:
            raise ValueError(
                f"{path} is in none of the splits that datasets finds in {name}: prepare all "
                "files by the command text, or choose some by --data_files"
            )
    return list(splits[split]), revision


def data_set_info(name: str, revision: str | None, **options: bool) -> "DatasetInfo":
    """Returns what the Hub knows of a data set, such as its commit; `options` are those of the client's `dataset_info`.

    One request, so that a wrong name or a missing network is reported within seconds. Raises `OSError` if the Hub has no
    such data set or revision that may be read, or cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=revision, timeout=SECONDS_TO_ANSWER, **options)
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise OSError(
            f"the data set {name} cannot be found on the Hub ({first_line(error)}): check its name and the network, log in "
            "by `hf auth login` if it is private, or set HF_HUB_OFFLINE=1 to use what was downloaded before"
        ) from error


# One text


def one_text(path: str | Path | None = None) -> tuple[str, Source]:
    """Returns the text of the file `path`, by default tiny Shakespeare, and its source: the first 90% for training, the rest
    for validation, as nanoGPT has it. The source's name is the text's file or name, and its SHA-256.

    Raises the errors of `read_text` and `tiny_shakespeare`."""
    text = tiny_shakespeare() if path is None else read_text(path)
    cut = int(len(text) * 0.9)
    splits = {"train": [text[:cut]], "val": [text[cut:]]}
    name = f"{path or 'tiny Shakespeare'}, SHA-256 {text_digest(text)}"
    return text, texts(name, splits, len(text.encode()))


def tiny_shakespeare() -> str:
    """Downloads tiny Shakespeare. Raises `OSError` if it cannot be read."""
    try:
        with urllib.request.urlopen(TINY_SHAKESPEARE, timeout=8) as response:
            return response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"{TINY_SHAKESPEARE} cannot be read ({first_line(error)}): try again, or give the text by --input FILE"
        ) from error

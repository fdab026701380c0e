"""Sources of text: files of plain text, files of rows, data sets of the Hub, and texts in memory."""

import codecs
import hashlib
import http.client
import itertools
import os
import sys
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt2_accel.data.documents import (
    CHUNK,
    VAL_SHARE,
    Document,
    Rule,
    by_hash,
    chunks,
    fitting_share,
    held_out,
    last_part,
    next_cut,
)
from gpt2_accel.data.rows import ROW_SUFFIXES, column_of, place_of, read_rows, reading, row_suffix
from gpt2_accel.runtime.files import first_line

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
        encoding = "utf-8" if start else "utf-8-sig"
        decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
        while data := file.read(min(end - file.tell(), CHUNK)):
            yield decoder.decode(data, final=file.tell() == end)


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
    sizes = {path: path.stat().st_size for path in names if not row_suffix(path)}
    share = sum(size for path, size in sizes.items() if held_out(names[path]))
    whole = fitting_share(share / (sum(sizes.values()) or 1))
    splits = {path: by_hash(names[path])[0][0] if whole else None for path in sizes}
    found = [text_file(path, split) for path, split in splits.items()]
    return [*found, *row_files([str(path) for path in names if path not in sizes], column)]


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
    if fitting_share(sizes["val"] / (sum(sizes.values()) or 1)):
        return files
    return [row_file(path, column, last_part) for path in paths]


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
        check_folders(source)
        files = [path for path in sorted(source.rglob(pattern or "*")) if not path.is_dir()]
        names = {path: path.relative_to(source).as_posix() for path in files}
        found = {path: name for path, name in names.items() if "/." not in f"/{name}"}
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


def check_folders(source: str | Path) -> None:
    """Raises `OSError` if a folder in `source` that is not hidden cannot be read, since `rglob` and
    `datasets` leave it out."""

    def fail(error: OSError) -> None:
        raise error

    for _, folders, _ in os.walk(source, onerror=fail):
        folders[:] = [name for name in folders if name[0] != "."]


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
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: give a text file")
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

    revision = pinned_revision(name, revision)
    if os.path.isdir(name):
        check_folders(name)
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
    if os.path.isdir(name) and not (config or data_files):
        check_all_found(name, set(itertools.chain.from_iterable(splits.values())))
    return list(splits[split]), revision


def check_all_found(folder: str, found: Collection[str]) -> None:
    """Raises `ValueError` if a folder has files of rows that are not `found`: `datasets` takes only
    those of the commonest format, and only names with a split in them if there are such names."""
    from datasets.data_files import FILES_TO_IGNORE

    root = Path(folder).resolve()
    for path in root.rglob("*"):
        hidden = "/." in f"/{path.relative_to(root).as_posix()}"
        ignored = hidden or path.name in FILES_TO_IGNORE
        if row_suffix(path) and not ignored and str(path) not in found:
            raise ValueError(
                f"{path} is in none of the splits that datasets finds in {folder}: prepare all "
                "files by the command text, or choose some by --data_files"
            )


def pinned_revision(name: str, revision: str | None) -> str | None:
    """Resolves the `revision` of a data set to a commit; returns `revision` for a local folder or in offline mode.

    One request, so that a wrong name or a missing network is reported within seconds, where `datasets` retries. Raises
    `OSError` if the Hub has no such data set or revision that may be read, or cannot be reached.
    """
    from huggingface_hub import HfApi, constants

    if os.path.exists(name) or constants.HF_HUB_OFFLINE:
        return revision
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=SECONDS_TO_ANSWER).sha
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise OSError(
            f"the data set {name} cannot be found on the Hub ({first_line(error)}): check its name and the network, log in "
            "if it is not public, or set HF_HUB_OFFLINE=1 to use what was downloaded before"
        ) from error


# One text


def one_text(path: str | Path | None = None) -> tuple[str, Source]:
    """Returns the text of the file `path`, by default tiny Shakespeare, and its source: the first 90% for training, the rest
    for validation, as nanoGPT has it. The source's name is the text's file or name, and its SHA-256.

    Raises the errors of `read_text` and `tiny_shakespeare`."""
    text = tiny_shakespeare() if path is None else read_text(path)
    content, cut = text.encode(), int(len(text) * 0.9)
    splits = {"train": [text[:cut]], "val": [text[cut:]]}
    name = f"{path or 'tiny Shakespeare'}, SHA-256 {hashlib.sha256(content).hexdigest()}"
    return text, texts(name, splits, len(content))


def tiny_shakespeare() -> str:
    """Downloads tiny Shakespeare. Raises `OSError` if it cannot be read."""
    try:
        with urllib.request.urlopen(TINY_SHAKESPEARE, timeout=8) as response:
            return response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"{TINY_SHAKESPEARE} cannot be read ({first_line(error)}): try again, or give the text by --input FILE"
        ) from error

"""Sources of text: plain text files, files of rows, data sets of the Hub, texts in memory."""

import codecs
import itertools
import os
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt2_accel.data.documents import (
    CHUNK,
    HELD_OUT,
    VAL_SHARE,
    Document,
    chunks,
    enough_held_out,
    last_part,
    next_cut,
    open_text,
    reading,
    separated,
    separator_pattern,
    split_of,
    text_size,
)
from gpt2_accel.data.rows import ROW_SUFFIXES, column_of, read_rows, row_suffix
from gpt2_accel.runtime.files import check_pointer, first_line
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, document_marks, text_separators

NOT_TEXT = {".tsv", ".ipynb"}  # not read; their syntax is not text
# What `save_to_disk` of datasets writes beside its files of rows.
SAVED = {"state.json", "dataset_info.json", "dataset_dict.json"}
COMPRESSION = {".parquet": 2, ".gz": 3, ".zst": 3, ".bz2": 4}  # approximate factors
SAMPLED_ROWS = 2000  # rows sampled to decide how rows are held out
SECONDS_TO_ANSWER = 8
TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


class ChangedSource(OSError):
    """A file has changed while it was read."""


@dataclass(frozen=True)
class Source:
    """A part of a corpus, with its documents.

    `size` estimates the bytes of its text. `modified` is the time of a local file; the name of a
    remote file has the commit. The `repr` changes with the text.
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


def text_file(path: Path, split: str | None, separator: re.Pattern) -> Source:
    """Returns the source of a file of plain text, whose documents `separator` parts.

    Without a `split` the last `VAL_SHARE` of the file is for validation.
    """
    check_pointer(path)
    size = text_size(path)
    state = state_of(str(path))

    def documents() -> Iterator[Document]:
        cut = size if split else next_cut(path, int(size * (1 - VAL_SHARE)), separator)
        rest = unchanged(read_part(path, cut, size), str(path), state)
        for own, parts in ((split or "train", read_part(path, 0, cut)), ("val", rest)):
            for pieces in separated(parts, separator):
                yield Document(own, chunks(pieces), str(path))

    return Source(f"{path}, {split}", documents, *state)


def read_part(path: Path, start: int, end: int) -> Iterator[str]:
    """Yields the text in bytes [start, end) of a file, without a byte-order mark.

    A part ends at the end of a line, or is a piece of a line of more than `CHUNK` bytes. Raises
    `ValueError` if it is not UTF-8.
    """
    with reading(str(path)), open_text(path) as file:
        file.seek(start)

        def block() -> bytes:
            lines = file.read(min(end - file.tell(), CHUNK))
            return lines + file.readline(min(end - file.tell(), CHUNK))

        yield from codecs.iterdecode(iter(block, b""), "utf-8" if start else "utf-8-sig")


def row_file(path: str, column: str, one_in: int | None) -> Source:
    """Returns the source of a local or remote file with a document in the `column` of each row.

    One row in `one_in` is held out; if that is None, the last part of each row.
    """
    state = state_of(path)

    def documents() -> Iterator[Document]:
        for row, place in unchanged(read_rows(path, column), path, state):
            text = column_of(row, column, place)
            if one_in:
                parts = {split_of(text, one_in): text}
            else:
                cut = last_part(text)
                parts = {"train": text[:cut], "val": text[cut:]}
            for split, part in parts.items():
                yield Document(split, chunks([part]), place)

    return Source(f"{path}, {column}", documents, *state)


# Files of a corpus


def corpus_files(
    names: Mapping[Path, str],
    column: str,
    tokenizer: "PreTrainedTokenizerBase | None",
    separator: str | None = None,
) -> list[Source]:
    """Returns the sources of files: first plain text, then rows. `names` maps paths to names.

    A line that is `separator`, by default one of `text_separators`, parts documents of plain text;
    if it is empty, each file is one document.

    Plain text is held out by a hash of the name. If the held-out share does not fit, the last
    `VAL_SHARE` of each file is held out instead. `row_files` describes `column`. Raises
    `ValueError` if a row has no text in `column`.
    """
    rows = [str(path) for path in names if row_suffix(path)]
    held = {path: split_of(name) for path, name in names.items() if not row_suffix(path)}
    splits: dict[Path, str | None] = dict.fromkeys(held)
    if enough_held_out((split, text_size(path)) for path, split in held.items()):
        splits |= held
    lines = text_separators(tokenizer) if separator is None else filter(None, [separator])
    pattern = separator_pattern(lines)
    plain = [text_file(path, split, pattern) for path, split in splits.items()]
    return plain + row_files(rows, column)


def row_files(paths: Sequence[str], column: str, one_in: int = HELD_OUT) -> list[Source]:
    """Returns the sources of files of rows with a text in `column`.

    One row in `one_in` is held out by a hash of its text. If `one_in` is `HELD_OUT` and the share
    does not fit in the first `SAMPLED_ROWS` rows, the last part of each row is held out instead.
    Raises `ValueError` if one of these rows has no text in `column`.
    """
    files = [row_file(path, column, one_in) for path in paths]
    if one_in != HELD_OUT:
        return files
    documents = (document for file in files for document in file.documents())
    first = itertools.islice(documents, SAMPLED_ROWS)
    if enough_held_out((own.split, sum(map(len, own.chunks))) for own in first):
        return files
    return [row_file(path, column, None) for path in paths]


def state_of(path: str) -> tuple[int, float | None]:
    """Returns the estimated bytes of text in a file, and a local file's time of modification."""
    import fsspec

    with reading(path):
        file_system, name = fsspec.core.url_to_fs(path)
        info = file_system.info(name)
    return info["size"] * COMPRESSION.get(Path(path).suffix.lower(), 1), info.get("mtime")


def unchanged(parts: Iterable, path: str, state: tuple[int, float | None]) -> Iterator:
    """Yields the parts of a file.

    Raises `ChangedSource` at the end, or in place of another error, if the `state_of` the file is
    no longer `state`.
    """
    try:
        yield from parts
    finally:
        if state_of(path) != state:
            raise ChangedSource(
                f"{path} has changed since the preparation began: start the same command again, it "
                "starts from the beginning"
            )


def find_files(
    source: str | Path, accepts: Callable[[Path], bool], kind: str, pattern: str | None = None
) -> dict[Path, str]:
    """Finds a file, or the files below a folder that match `pattern` and are not hidden, sorted.

    Returns those that `accepts` takes, with their names below the folder. Links to folders are not
    followed. Prints how many files of a folder are taken, and what is left out. Raises
    `FileNotFoundError` if the source does not exist, `ValueError` if no file is of the `kind` or
    the folder has splits, `OSError` if a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    source = Path(source)
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: give a file or a folder")
    paths = [source]
    if source.is_dir():
        if (source / "dataset_dict.json").exists():
            raise ValueError(f"{source} has several splits: give the folder of one of them")
        paths = []
        for parent, folders, names in os.walk(source, onerror=fail):
            folders[:] = [name for name in folders if name[0] != "."]
            links = [name for name in folders if Path(parent, name).is_symlink()]
            for name in names + links:
                path = Path(parent, name)
                if name[0] != "." and path.match(pattern or "*"):
                    paths.append(path)
    skipped = SAVED if any(path.suffix == ".arrow" for path in paths) else ()
    taken = {}
    left_out = []
    for path in sorted(paths):
        if path.name in skipped:
            continue
        if path.is_file() and accepts(path):
            taken[path] = path.relative_to(source).as_posix() if path != source else path.name
        else:
            left_out.append(path.suffix or path.name)
    line = f"{source}: took {len(taken):,} files"
    if left_out:
        kinds = ", ".join(f"{n} {suffix}" for suffix, n in Counter(left_out).most_common(9))
        line += f"; left out {len(left_out):,}, not {kind}: {kinds}"
    if not taken:
        raise ValueError(f"{line}: give {kind}, or another --pattern of a folder's files")
    if source.is_dir():
        print(line, file=sys.stderr)
    return taken


def is_text(path: Path) -> bool:
    """Whether a path is a file of rows, or of UTF-8 text by its beginning."""
    if row_suffix(path):
        return True
    if path.suffix.lower() in NOT_TEXT:
        return False
    with reading(str(path)), open_text(path) as file:
        start = file.read(CHUNK)
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False


def read_text(path: str | Path) -> str:
    """Returns the text of a UTF-8 file.

    Raises `FileNotFoundError` if it does not exist, `ValueError` if it is empty or not UTF-8.
    """
    check_pointer(path)
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
    """Returns the files of a data set on the Hub, and its revision (a commit).

    Raises `ValueError` if `name` is a local path, if the data set, its configuration or split does
    not exist, or its files are not of `ROW_SUFFIXES`; `OSError` if the Hub has no such data set or
    cannot be reached.
    """
    from datasets import load_dataset_builder
    from huggingface_hub import constants

    if os.path.exists(name):
        raise ValueError(
            f"{name} is a file or folder on this machine, not a data set on the Hub: prepare it by "
            "the command text, or conversations by chat without options of the Hub; --pattern "
            "selects files of a folder"
        )
    if not constants.HF_HUB_OFFLINE:
        revision = commit_of(name, revision)  # `datasets` retries for longer
    try:
        builder = load_dataset_builder(name, config, data_files=data_files, revision=revision)
    except Exception as error:  # several types; an empty name gives an IndexError
        raise ValueError(
            f"the data set {name} cannot be opened ({first_line(error)}): check its name, --config "
            "and --data_files, and the network; if it has a script, try --revision "
            "refs/convert/parquet"
        ) from error
    splits = builder.config.data_files or {}
    files = list(splits.get(split, []))
    if not files or not all(map(row_suffix, files)):
        raise ValueError(
            f"the data set {name} has no files of rows ({', '.join(ROW_SUFFIXES)}) in the split "
            f"{split!r}, of {', '.join(map(str, splits)) or 'none'}: set --split, or --revision "
            "refs/convert/parquet, where the Hub has data sets as Parquet"
        )
    return files, revision


def commit_of(name: str, revision: str | None) -> str | None:
    """Returns the commit of a data set on the Hub.

    It sends one request, so that a wrong name or a missing network is reported within seconds.
    Raises `OSError` if the Hub has no such data set or revision that may be read, or cannot be
    reached.
    """
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=revision, timeout=SECONDS_TO_ANSWER).sha
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise OSError(
            f"the data set {name} cannot be found on the Hub ({first_line(error)}): check its name "
            "and the network, log in by `hf auth login` if it is private, or set HF_HUB_OFFLINE=1 "
            "to use what was downloaded before"
        ) from error


# One text


def text_source(text: str, name: str, tokenizer: "PreTrainedTokenizerBase") -> Source:
    """Returns the source of one text, of which the first 90% is for training, as in nanoGPT.

    Lines that are `text_separators` part documents if `tokenizer` has a token between documents.
    """
    marks, _ = document_marks(tokenizer)
    pattern = separator_pattern(text_separators(tokenizer) if marks else ())
    cut = int(len(text) * 0.9)
    splits = {}
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        splits[split] = ["".join(pieces) for pieces in separated([part], pattern)]
    return texts(name, splits, len(text.encode()))


def tiny_shakespeare() -> str:
    """Downloads tiny Shakespeare. Raises `OSError` if it cannot be read."""
    try:
        with urllib.request.urlopen(TINY_SHAKESPEARE, timeout=8) as response:
            return response.read().decode()
    except Exception as error:  # the HTTP client raises several
        raise ConnectionError(
            f"{TINY_SHAKESPEARE} cannot be read ({first_line(error)}): try again, or give the text "
            "by --input FILE"
        ) from error

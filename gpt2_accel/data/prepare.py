"""Text -> token shards, by many processes, restartable.

Each piece of the corpus (`sources.py`) is tokenized into a file of its own beside a record of it. When all
are there they are laid end to end and cut into shards of equal size, so that shards, and every byte of
them, depend on the corpus and the tokenizer alone: not on the number of workers, nor on where a kill fell.
Until that is done all is in `.NAME.partial` beside the folder to be made; starting again goes on there.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import BinaryIO

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from gpt2_accel.data.shards import (
    MANIFEST,
    MANIFEST_FORMAT,
    VERSION,
    ShardWriter,
    read_manifest,
    token_dtype,
)
from gpt2_accel.data.sources import Document, Piece, Texts
from gpt2_accel.files import exclusive, replace_file, sync, sync_tree, write_json
from gpt2_accel.tokenizer import (
    END_OF_TEXT,
    GPT2_FINGERPRINT,
    bytes_per_token,
    fingerprint,
    load_tokenizer,
    token_encoder,
)

SHARD_TOKENS = 100_000_000
BLOCK = 2**22  # tokens copied at once
# What is counted of the documents, beside how many they are: those without any text, which are left out;
# those with bytes that are not UTF-8, which become U+FFFD; those that hold the literal <|endoftext|>, which
# is encoded as text; and the bytes of the longest.
COUNTS = ("empty", "not_utf8", "literal_separator", "longest")

Progress = Callable[[int, int, int], None]
"""Is told of further documents, tokens and bytes of text."""


@dataclass
class Plan:
    """What is to become of which text. `pieces` are the corpus; `splits` those that must not be without text.

    `source`, `revision` and `command` say in the manifest where the text came from. Shards hold
    `shard_tokens` each, the last of a split fewer; with `validation_shard` the first shard is for
    validation and all others are for training. Work on a plan that is not `restartable` begins afresh.
    """

    pieces: Sequence[Piece]
    tokenizer: PreTrainedTokenizerBase
    data_dir: Path
    source: str
    revision: str | None = None
    command: str | None = None
    shard_tokens: int = SHARD_TOKENS
    validation_shard: bool = False
    splits: tuple[str, ...] = ("train", "val")
    restartable: bool = True

    @property
    def work(self) -> Path:
        """Where the pieces' files are made, and then the shards."""
        return self.data_dir.with_name(f".{self.data_dir.name}.partial")

    @property
    def separator(self) -> int | None:
        return self.tokenizer.convert_tokens_to_ids(END_OF_TEXT)

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(len(self.tokenizer))

    @functools.cached_property
    def mark(self) -> str | None:
        """SHA-256 (hex) of all that the result depends on, None if that cannot be told."""
        if not self.restartable:
            return None
        content = [*map(repr, self.pieces), fingerprint(self.tokenizer)]
        content += [str(self.shard_tokens), str(self.validation_shard)]
        return hashlib.sha256("\n".join(content).encode("utf-8", "replace")).hexdigest()


def prepare(
    splits: Mapping[str, Iterable[str]],
    tokenizer: PreTrainedTokenizerBase,
    data_dir: str | Path,
    *,
    source: str,
    shard_tokens: int = SHARD_TOKENS,
) -> dict:
    """Tokenizes the documents of each split, which are at hand, into `data_dir`; returns the manifest.

    `source` says in the manifest what the text was. Raises what `carry_out` raises; then, and when it
    is interrupted, nothing is left behind.
    """
    pieces = [Texts(split, texts) for split, texts in splits.items()]
    return carry_out(
        Plan(
            pieces,
            tokenizer,
            Path(data_dir),
            source,
            shard_tokens=shard_tokens,
            splits=tuple(splits),
            restartable=False,
        )
    )


def carry_out(plan: Plan, workers: int = 1) -> dict:
    """Makes `plan.data_dir`, in the format of `shards.py`, in `workers` processes; returns the manifest.

    Killed and called again, it goes on where it was; what is complete is left as it is.

    Raises `FileExistsError` if the folder was made of something else, `ValueError` if a split would
    be without text or the work begun is of something else, `OSError` if the disk is too small or
    another process is preparing the same folder.
    """
    if plan.data_dir.exists():
        return finished_before(plan)
    with exclusive(plan.work, "choose another --data_dir"):
        try:
            begin(plan)
            tokenize(plan, workers)
            return finish(plan)
        except BaseException:
            if not plan.restartable:
                shutil.rmtree(plan.work, ignore_errors=True)
            raise


def finished_before(plan: Plan) -> dict:
    """The manifest of a folder that is there already, if it is what was asked for."""
    if plan.mark is not None and (plan.data_dir / MANIFEST).exists():
        manifest = read_manifest(plan.data_dir)
        if manifest.get("plan") == plan.mark:
            return manifest
    raise FileExistsError(f"{plan.data_dir} exists already: remove it or choose another folder")


def begin(plan: Plan) -> None:
    """Makes the work folder ready, with what an earlier call left of the same work."""
    work, begun = plan.work, plan.work / "plan.json"
    work.mkdir(parents=True, exist_ok=True)
    if not plan.restartable:
        for path in work.iterdir():
            if path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif begun.exists() and json.loads(begun.read_text())["plan"] != plan.mark:
        raise ValueError(
            f"{work} holds work begun on other text or with other settings: finish that with its own "
            "command, or remove the folder"
        )
    (work / "pieces").mkdir(exist_ok=True)
    for path in (work / "pieces").glob("*.tmp"):
        path.unlink(missing_ok=True)
    if not begun.exists():
        plan.tokenizer.save_pretrained(work / "tokenizer")
        write_json(begun, {"plan": plan.mark})


# Tokenizing


def tokenize(plan: Plan, workers: int) -> None:
    """Makes the pieces that are not there yet."""
    todo = [i for i in range(len(plan.pieces)) if not record_path(plan.work, i).exists()]
    size = sum(plan.pieces[i].size for i in todo)
    if size:
        check_disk(plan, todo, size)
    with tqdm(
        total=size or None, unit="B", unit_scale=True, desc="tokenizing", disable=None
    ) as bar:
        if min(workers, len(todo)) <= 1:
            writer = PieceWriter(plan.work, plan.tokenizer)
            for number in todo:
                writer.write(number, plan.pieces[number].documents(), Bar(bar).add)
        else:
            tokenize_in_parallel(plan, todo, min(workers, len(todo)), Bar(bar))


class Bar:
    """The progress bar: bytes of text, and with them documents and tokens."""

    def __init__(self, bar: tqdm):
        self.bar, self.totals = bar, [0, 0, 0]

    def add(self, *done: int) -> None:
        """Further documents, tokens and bytes."""
        self.set([total + more for total, more in zip(self.totals, done, strict=True)])

    def set(self, totals: list[int]) -> None:
        """All documents, tokens and bytes so far."""
        self.bar.set_postfix_str(f"{totals[0]:,} documents, {totals[1]:,} tokens", refresh=False)
        self.bar.update(totals[2] - self.totals[2])
        self.totals = totals


def check_disk(plan: Plan, todo: list[int], size: int) -> None:
    """Says how much room the shards will take; raises `OSError` if there is less."""
    document = next(plan.pieces[todo[0]].documents(), None)
    text = next(iter(document.chunks), "") if document else ""
    sample = clean(text)[0]
    per_byte = len(token_encoder(plan.tokenizer)(sample)) / max(1, len(sample.encode()))
    tokens = round(size * (per_byte or 1))
    needed = tokens * plan.dtype.itemsize + min(tokens, plan.shard_tokens) * plan.dtype.itemsize
    free = shutil.disk_usage(plan.work).free
    print(
        f"about {size / 1e9:.2f} GB of text, {tokens:,} tokens, {needed / 1e9:.2f} GB of disk; "
        f"{free / 1e9:.0f} GB are free",
        file=sys.stderr,
    )
    if needed > free:
        raise OSError(
            f"{plan.work.parent} has {free / 1e9:.1f} GB free, the shards need about "
            f"{needed / 1e9:.1f}: make room, or choose another --data_dir"
        )


def tokenize_in_parallel(plan: Plan, todo: list[int], workers: int, bar: Bar) -> None:
    """Makes the pieces `todo` in `workers` processes."""
    context = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
    if os.name != "nt":
        context.set_forkserver_preload(["gpt2_accel.data.prepare"])
    totals = context.Array("q", [0, 0, 0, 0])  # documents, tokens, bytes; whether to stop
    with ProcessPoolExecutor(workers, context, start_worker, (plan.work, totals)) as pool:
        futures = [pool.submit(make_piece, i, plan.pieces[i]) for i in todo]
        try:
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
                bar.set(list(totals)[:3])
                for future in done:
                    future.result()
        except BrokenProcessPool as error:
            raise OSError(
                "a worker process was killed, perhaps for lack of memory: start again, with fewer --workers"
            ) from error
        finally:
            totals[3] = 1
            pool.shutdown(cancel_futures=True)


worker_writes: Callable[[int, Iterable[Document]], None]  # in a worker process


def start_worker(work: Path, totals) -> None:
    """Readies this worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process says when to stop
    Thread(target=end_with_parent, daemon=True).start()

    def progress(*done: int) -> None:
        if totals[3]:  # the main process stops
            os._exit(1)
        with totals.get_lock():
            for i, more in enumerate(done):
                totals[i] += more

    global worker_writes
    writer = PieceWriter(work, load_tokenizer(work / "tokenizer"))
    worker_writes = functools.partial(writer.write, progress=progress)


def end_with_parent() -> None:
    """Ends this process once the main one has ended, be it by a kill, of which nobody else would tell."""
    multiprocessing.parent_process().join()
    os._exit(1)


def make_piece(number: int, piece: Piece) -> None:
    """Makes one piece, in a worker process."""
    worker_writes(number, piece.documents())


def record_path(work: Path, number: int) -> Path:
    """Where the record of a finished piece is."""
    return work / "pieces" / f"{number:06d}.json"


def tokens_path(work: Path, number: int, split: str) -> Path:
    """Where the tokens of a piece are."""
    return work / "pieces" / f"{number:06d}.{split}"


def clean(text: str) -> tuple[str, bool]:
    """The text with U+FFFD for what is not UTF-8, and whether there was such a thing."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        # A pair of surrogates is a character; one alone is none.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return whole, "\ufffd" in whole
    return text, False


class PieceWriter:
    """Tokenizes the documents of one piece after another into its files.

    They get their names when they are complete and on disk, the record last; the names they have on the
    way are of this process alone.
    """

    def __init__(self, work: Path, tokenizer: PreTrainedTokenizerBase):
        self.work = work
        self.encode, self.dtype = token_encoder(tokenizer), token_dtype(len(tokenizer))
        separator = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        self.separator = [] if separator is None else [separator]

    def write(self, number: int, documents: Iterable[Document], progress: Progress) -> None:
        """Makes piece `number`; leaves nothing half-made if that fails."""
        splits: dict[str, Counter] = {}
        counts = Counter(dict.fromkeys(COUNTS, 0))
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for document in documents:
                split = document.split
                if split not in files:
                    path = tokens_path(self.work, number, split)
                    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
                    stack.callback(scratch.unlink, missing_ok=True)
                    files[split] = stack.enter_context(open(scratch, "wb", 2**20))
                    splits[split] = Counter(tokens=0, documents=0, bytes=0)
                for more in self.write_document(document, files[split], counts):
                    splits[split].update(more)
                    progress(more["documents"], more["tokens"], more["bytes"])
            for split, file in files.items():
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, tokens_path(self.work, number, split))
        record = {"splits": splits, "counts": counts}
        replace_file(record_path(self.work, number), json.dumps(record).encode())

    def write_document(
        self, document: Document, file: BinaryIO, counts: Counter
    ) -> Iterator[dict[str, int]]:
        """Appends a document's tokens; yields, chunk by chunk, what was added."""
        size, odd, literal = 0, False, False
        for i, chunk in enumerate(document.chunks):
            text, replaced = clean(chunk)
            separator = self.separator if document.begins and i == 0 else []
            tokens = self.encode(text)
            file.write(np.array(separator, self.dtype).tobytes())
            file.write(tokens.astype(self.dtype, copy=False).tobytes())
            more = {
                "documents": int(document.begins and i == 0),
                "tokens": len(separator) + len(tokens),
                "bytes": len(text) if text.isascii() else len(text.encode()),
            }
            size += more["bytes"]
            odd |= replaced
            literal |= END_OF_TEXT in text
            yield more
        counts.update(empty=int(size == 0), not_utf8=int(odd), literal_separator=int(literal))
        counts["longest"] = max(counts["longest"], size)


# From pieces to shards


def finish(plan: Plan) -> dict:
    """Cuts the pieces into shards, writes the manifest, gives the folder its name; returns the manifest."""
    count = len(plan.pieces)
    records = [json.loads(record_path(plan.work, i).read_text()) for i in range(count)]
    manifest = {
        "format": MANIFEST_FORMAT,
        "version": VERSION,
        "tokenizer": {
            "name": tokenizer_name(plan.tokenizer),
            "vocab_size": len(plan.tokenizer),
            "fingerprint": fingerprint(plan.tokenizer),
            "end_of_text": plan.separator,
        },
        "dtype": plan.dtype.name,
        "source": plan.source,
        "revision": plan.revision,
        "command": plan.command,
        "plan": plan.mark,
        "counts": total_counts(records),
        "splits": write_shards(plan, records),
    }
    for split in plan.splits:
        if not manifest["splits"].get(split, {}).get("bytes"):
            shorter = ", or lower --shard_tokens" if plan.validation_shard else ""
            raise ValueError(
                f"{plan.source} holds no text for the split {split!r}: add documents{shorter}"
            )
    write_json(plan.work / MANIFEST, manifest)
    shutil.rmtree(plan.work / "pieces")
    (plan.work / "plan.json").unlink()
    (plan.work / ".lock").unlink(missing_ok=True)
    sync_tree(plan.work)
    plan.work.rename(plan.data_dir)
    sync(plan.data_dir.parent)
    return manifest


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the manifest calls a tokenizer."""
    if fingerprint(tokenizer) == GPT2_FINGERPRINT:
        return "gpt2"
    return tokenizer.name_or_path or type(tokenizer).__name__


def total_counts(records: list[dict]) -> dict[str, int]:
    """The counts of all pieces together."""
    totals = {
        name: sum(record["counts"][name] for record in records)
        for name in COUNTS
        if name != "longest"
    }
    return {
        **totals,
        "longest": max((record["counts"]["longest"] for record in records), default=0),
    }


def write_shards(plan: Plan, records: list[dict]) -> dict[str, dict]:
    """The shards of all splits, from the pieces' files, which go as they are used up.

    Returns the splits' entries in the manifest.
    """
    jobs: list[tuple[str, str, list[tuple[Path, int, int]]]] = []  # split, file, parts
    for split in sorted({split for record in records for split in record["splits"]}):
        for number, parts in enumerate(layout(plan, records, split)):
            validates = plan.validation_shard and number == 0
            name = (
                "val_000000.bin"
                if validates
                else f"{split}_{number - plan.validation_shard:06d}.bin"
            )
            jobs.append(("val" if validates else split, name, parts))
    uses = Counter(path for _, _, parts in jobs for path, _, _ in parts)
    lock = Lock()
    table = bytes_per_token(plan.tokenizer) if plan.validation_shard else None

    def make(job: tuple[str, str, list[tuple[Path, int, int]]]) -> dict:
        _, name, parts = job
        entry = make_shard(plan, name, parts, table)
        with lock:
            uses.subtract(path for path, _, _ in parts)
            for path, _, _ in parts:
                if not uses[path]:
                    path.unlink(missing_ok=True)
        return entry

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        entries = list(tqdm(pool.map(make, jobs), "writing shards", len(jobs), disable=None))
    splits: dict[str, dict] = {}
    for (split, _, _), entry in zip(jobs, entries, strict=True):
        totals = splits.setdefault(split, {"tokens": 0, "documents": 0, "bytes": 0, "shards": []})
        totals["tokens"] += entry["tokens"]
        totals["documents"] += entry["documents"]
        totals["bytes"] += entry.pop("bytes")
        totals["shards"].append(entry)
    if not plan.validation_shard:  # the records are exact with any tokenizer
        for split, totals in splits.items():
            of_split = [r["splits"][split] for r in records if split in r["splits"]]
            for name in ("documents", "bytes"):
                totals[name] = sum(part[name] for part in of_split)
    return splits


def layout(plan: Plan, records: list[dict], split: str) -> list[list[tuple[Path, int, int]]]:
    """For each shard of a split the parts of the pieces' files it is made of: path, first token, tokens."""
    shards: list[list[tuple[Path, int, int]]] = []
    room = 0
    for number, record in enumerate(records):
        start, end = 0, record["splits"].get(split, {}).get("tokens", 0)
        while start < end:
            if not room:
                shards.append([])
                room = plan.shard_tokens
            count = min(room, end - start)
            shards[-1].append((tokens_path(plan.work, number, split), start, count))
            start += count
            room -= count
    return shards


def make_shard(
    plan: Plan, name: str, parts: list[tuple[Path, int, int]], table: np.ndarray | None
) -> dict:
    """Writes a shard, unless an earlier call did; returns its entry in the manifest, and its text's bytes by
    the `table` of each token's, 0 without one."""
    note = plan.work / "pieces" / f"{name}.json"
    if note.exists():
        return json.loads(note.read_text())
    writer = ShardWriter(plan.work / f"{name}.tmp", plan.dtype)
    documents = size = 0
    for path, start, count in parts:
        with open(path, "rb") as file:
            file.seek(start * plan.dtype.itemsize)
            while count:
                tokens = np.fromfile(file, plan.dtype, min(count, BLOCK))
                assert len(tokens), path
                count -= len(tokens)
                writer.append(tokens)
                if table is not None:
                    size += int(table[tokens].sum())
                if plan.separator is not None:
                    documents += int(np.count_nonzero(tokens == plan.separator))
    entry = {**writer.close(), "file": name, "documents": documents, "bytes": size}
    sync(writer.path)
    writer.path.rename(plan.work / name)
    replace_file(note, json.dumps(entry).encode())
    return entry

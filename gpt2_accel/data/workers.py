"""Makes the shards of a data folder from the parts of a source, with several processes, and restarts after a kill.

Worker processes write the files of a part, and last its record, into `.NAME.partial` beside the output folder. When all
parts have a record, the manifest is written and the folder gets its name. The same command does what is missing. If the
source, the tokenizer or the options have changed in between, it starts anew.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from filelock import FileLock, Timeout

from gpt2_accel.data.shards import MANIFEST, MANIFEST_FORMAT, listed_shards, read_manifest
from gpt2_accel.files import remove, sync, sync_tree, write_file, write_json
from gpt2_accel.progress import Progress
from gpt2_accel.tokenizer import END_OF_TEXT, GPT2_FINGERPRINT, fingerprint, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Writer(Protocol):
    """Turns parts of a corpus into the shards of a folder. Each worker process gets a copy by `pickle`.

    `write` writes the files of part `number`, and syncs them to disk; returns the part's record, which JSON can hold.
    `assemble` returns the manifest's entries of all parts: version, dtype, counts, splits and others (see `shards.py`).
    """

    def write(self, folder: Path, number: int, part: Any) -> dict: ...

    def assemble(self, folder: Path, records: list[dict]) -> dict: ...


def run_parts(
    parts: Sequence[Any],
    writer: Writer,
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    *,
    plan: str | None = None,
    workers: int = 1,
    **about: str | None,
) -> dict:
    """Writes the shards of all parts into `data_dir`, in the format of `shards.py`; returns the manifest.

    Does what an earlier call with the same `plan` left undone, nothing if that is complete. A `plan` of None is not
    restarted. `about` is recorded in the manifest: `source`, `revision`, `command`.

    Raises `FileExistsError` if the folder holds other data, `OSError` if another process is preparing it or a worker is
    killed, and the errors of `writer`.
    """
    data_dir = Path(data_dir)
    if not data_dir.name:
        raise ValueError(f"data_dir is {str(data_dir)!r}: give the path of a new folder")
    work = data_dir.with_name(f".{data_dir.name}.partial")
    with locked(data_dir):
        if os.path.lexists(data_dir):
            return finished_before(data_dir, plan)
        begin(work, plan)
        try:
            if not (work / MANIFEST).exists():
                records = make_parts(parts, writer, work, workers)
                save_tokenizer(tokenizer, work / "tokenizer", data_dir / "tokenizer")
                try:
                    entries = writer.assemble(work, records)
                except ValueError:  # such as an empty split: no other plan can use the parts
                    shutil.rmtree(work)
                    raise
                write_json(
                    work / MANIFEST, {**head_of(tokenizer), "plan": plan, **about, **entries}
                )
            return finish(work, data_dir)
        except BaseException:
            if plan is None or not any((work / "records").glob("*.json")):
                shutil.rmtree(work, ignore_errors=True)
            raise


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Keeps other processes from preparing the same folder. Raises `OSError` if one does."""
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    path = data_dir.with_name(f".{data_dir.name}.lock")
    try:
        with FileLock(path, timeout=0):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # a process that has opened it tries again
    except Timeout as error:
        raise OSError(
            f"another process is preparing {data_dir}: wait for it to end, or choose another --data_dir"
        ) from error


def plan_of(parts: Sequence[Any], tokenizer: "PreTrainedTokenizerBase", *options: Any) -> str:
    """Returns the SHA-256 (hex) of everything that a preparation depends on."""
    content = [*map(repr, parts), fingerprint(tokenizer), *map(repr, options)]
    return sha256("\n".join(content).encode("utf-8", "replace")).hexdigest()


def finished_before(data_dir: Path, plan: str | None) -> dict:
    """Returns the manifest of an existing folder of this plan. Raises `FileExistsError` for another folder."""
    if plan is not None and (data_dir / MANIFEST).exists():
        manifest = read_manifest(data_dir)
        if manifest.get("plan") == plan:
            return manifest
    raise FileExistsError(
        f"{data_dir} exists already, and not from the same files (their names, sizes, times) and settings: choose another "
        "folder"
    )


def begin(work: Path, plan: str | None) -> None:
    """Makes the work folder, unless it holds an earlier call's finished parts of the same plan."""
    plan_file = work / "plan"
    if plan_file.exists():
        if plan_file.read_text() == plan:
            return
        print(
            f"the source, the tokenizer or the options have changed since the work in {work} began: it starts anew",
            file=sys.stderr,
        )
    remove(work)
    work.mkdir()
    write_file(plan_file, str(plan))


def make_parts(parts: Sequence[Any], writer: Writer, work: Path, workers: int) -> list[dict]:
    """Makes the parts that have no record yet, in `workers` processes; returns all records."""
    records = [work / "records" / f"{number:06d}.json" for number in range(len(parts))]
    todo = [number for number, record in enumerate(records) if not record.exists()]
    make = partial(make_part, writer, work)
    size = sum(parts[number].size for number in todo)
    with Progress("tokenizing", size, shown=size > 0, unit="B", unit_scale=True) as bar:
        several = min(workers, len(todo))
        tasks = [(records[number], number, parts[number]) for number in todo]
        made = made_by_workers(make, tasks, several) if several > 1 else map(make, tasks)
        for number in made:
            bar.update(parts[number].size)
    return [json.loads(record.read_text()) for record in records]


def make_part(writer: Writer, work: Path, task: tuple[Path, int, Any]) -> int:
    """Writes a part, and last its record; returns its number."""
    record, number, part = task
    write_file(record, json.dumps(writer.write(work, number, part)))
    return number


def worker_context() -> BaseContext:
    """Starts the process from which the workers fork, unless it runs; returns its context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    return context


def made_by_workers(make: Callable[[Any], int], tasks: list[Any], workers: int) -> Iterator[int]:
    """Calls `make` for the tasks in `workers` processes; yields each result when it is there.

    Raises the first error of a worker, `OSError` if a worker is killed; the other workers then end.
    """
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(workers, worker_context(), start_worker, (make,)) as pool:
        try:
            for future in as_completed([pool.submit(in_worker, task) for task in tasks]):
                if error := future.exception():
                    raise error  # here, so that `cli.run` prints one sentence
                yield future.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - set(others):
                worker.terminate()
            if isinstance(error, BrokenProcessPool):
                raise OSError(
                    "a worker process was killed, perhaps for lack of memory: start again, with fewer --workers"
                ) from error
            raise


make_in_worker: Callable[[Any], int]  # set in a worker process


def start_worker(make: Callable[[Any], int]) -> None:
    """Initializes this worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    Thread(target=end_with_parent, daemon=True).start()
    global make_in_worker
    make_in_worker = make


def end_with_parent() -> None:
    """Ends this process when the main process has ended, also after a kill."""
    multiprocessing.parent_process().join()
    os._exit(1)


def in_worker(task: Any) -> int:
    """Does a task in a worker process."""
    return make_in_worker(task)


def head_of(tokenizer: "PreTrainedTokenizerBase") -> dict:
    """Returns the entries of a manifest that depend on the tokenizer only."""
    mark = fingerprint(tokenizer)
    name = tokenizer.name_or_path or type(tokenizer).__name__
    return {
        "format": MANIFEST_FORMAT,
        "tokenizer": {
            "name": "gpt2" if mark == GPT2_FINGERPRINT else name,
            "vocab_size": len(tokenizer),
            "fingerprint": mark,
            "end_of_text": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        },
    }


def finish(work: Path, data_dir: Path) -> dict:
    """Removes all but the data from the work folder, renames it to `data_dir`, and returns the manifest."""
    manifest = read_manifest(work)
    kept = {MANIFEST, "tokenizer", *(shard["file"] for shard in listed_shards(manifest))}
    for path in work.iterdir():
        if path.name not in kept:
            remove(path)
    sync_tree(work)
    work.rename(data_dir)
    sync(data_dir.parent)
    return manifest

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

from gpt2_accel.data.shards import MANIFEST, MANIFEST_FORMAT, read_manifest
from gpt2_accel.files import (
    remove,
    remove_leftovers,
    sync,
    sync_tree,
    write_file,
    write_json,
)
from gpt2_accel.progress import Progress
from gpt2_accel.tokenizer import END_OF_TEXT, GPT2_FINGERPRINT, fingerprint, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORDS = "records"  # the folder of the parts' records in a work folder


class Writer(Protocol):
    """Turns parts of a corpus into the shards of a folder. Each worker process gets a copy by `pickle`.

    `write` writes the files of part `number`, each under its name when it is complete, and returns the part's record,
    which JSON can hold. `assemble` returns the manifest's entries of all parts: version, dtype, counts, splits and
    others (see `shards.py`).
    """

    def write(self, folder: Path, number: int, part: Any) -> dict: ...

    def assemble(self, folder: Path, records: list[dict]) -> dict: ...


def run_parts(
    parts: Sequence[Any],
    writer: Writer,
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    *,
    source: str,
    plan: str | None = None,
    revision: str | None = None,
    command: str | None = None,
    workers: int = 1,
) -> dict:
    """Writes the shards of all parts into `data_dir`, in the format of `shards.py`; returns the manifest.

    Does what an earlier call with the same `plan` left undone, nothing if that is complete. A `plan` of None is not
    restarted. `source`, `revision` and `command` are recorded in the manifest.

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
        try:
            begin(work, plan, tokenizer, data_dir)
            if not (work / MANIFEST).exists():
                records = make_parts(parts, writer, work, workers)
                head = {"plan": plan, "source": source, "revision": revision, "command": command}
                try:
                    entries = writer.assemble(work, records)
                except ValueError:  # such as an empty split: no other plan can use the parts
                    shutil.rmtree(work)
                    raise
                write_json(work / MANIFEST, {**head_of(tokenizer), **head, **entries})
            return finish(work, data_dir)
        except BaseException:
            if plan is None or not any((work / RECORDS).glob("*.json")):
                shutil.rmtree(work, ignore_errors=True)
            raise


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Keeps other processes from preparing the same folder. Raises `OSError` if one does."""
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(data_dir.with_name(f".{data_dir.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise OSError(
            f"another process is preparing {data_dir}: wait for it to end, or choose another --data_dir"
        ) from error
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # a process that has opened it tries again
        lock.release()


def plan_of(parts: Sequence[Any], tokenizer: "PreTrainedTokenizerBase", *options: Any) -> str:
    """Returns the SHA-256 (hex) of everything that a preparation depends on."""
    content = [*map(repr, parts), fingerprint(tokenizer), *map(repr, options)]
    return sha256("\n".join(content).encode("utf-8", "replace")).hexdigest()


def finished_before(data_dir: Path, plan: str | None) -> dict:
    """Returns the manifest of an existing folder of this plan. Raises `FileExistsError` for another plan's folder."""
    if plan is not None and (data_dir / MANIFEST).exists():
        manifest = read_manifest(data_dir)
        if manifest.get("plan") == plan:
            return manifest
    others = ", made from other files (their names, sizes or times) or with other settings"
    what = others if (data_dir / MANIFEST).exists() else ""
    raise FileExistsError(f"{data_dir} exists already{what}: choose another folder")


def begin(
    work: Path, plan: str | None, tokenizer: "PreTrainedTokenizerBase", data_dir: Path
) -> None:
    """Makes the work folder, and keeps an earlier call's finished parts if its plan was the same."""
    plan_file = work / "plan.json"
    before = json.loads(plan_file.read_text()).get("plan") if plan_file.exists() else None
    if before is None or before != plan:
        if before is not None:
            print(
                f"the source, the tokenizer or the options have changed since the work in {work} began: it starts anew",
                file=sys.stderr,
            )
        remove(work)
        work.mkdir()
        save_tokenizer(tokenizer, work / "tokenizer", data_dir / "tokenizer")
        write_json(plan_file, {"plan": plan})
    remove_leftovers(work)


def make_parts(parts: Sequence[Any], writer: Writer, work: Path, workers: int) -> list[dict]:
    """Makes the parts that have no record yet, in `workers` processes; returns all records."""
    todo = [i for i in range(len(parts)) if not record_path(work, i).exists()]
    size = sum(parts[i].size for i in todo)
    with Progress("tokenizing", size, shown=size > 0, unit="B", unit_scale=True) as bar:
        if min(workers, len(todo)) > 1:
            made = made_by_workers(parts, todo, writer, work, min(workers, len(todo)))
        else:
            made = (make_part(writer, work, i, parts[i]) for i in todo)
        for number in made:
            bar.update(parts[number].size)
    return [json.loads(record_path(work, i).read_text()) for i in range(len(parts))]


def record_path(work: Path, number: int) -> Path:
    """Returns the path of a finished part's record."""
    return work / RECORDS / f"{number:06d}.json"


def make_part(writer: Writer, work: Path, number: int, part: Any) -> int:
    """Writes a part and its record; returns its number."""
    write_file(record_path(work, number), json.dumps(writer.write(work, number, part)))
    return number


def worker_context(*modules: str) -> BaseContext:
    """Starts the process from which the workers fork, unless it runs; returns its context. It imports `modules`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])
    forkserver.ensure_running()
    return context


def made_by_workers(
    parts: Sequence[Any], todo: list[int], writer: Writer, work: Path, workers: int
) -> Iterator[int]:
    """Makes the parts `todo` in `workers` processes; yields the number of each when it is finished.

    Raises the first error of a worker, `OSError` if a worker is killed; the other workers then end.
    """
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(workers, worker_context(), start_worker, (writer, work)) as pool:
        try:
            for future in as_completed([pool.submit(in_worker, i, parts[i]) for i in todo]):
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


worker_makes: Callable[[int, Any], int]  # set in a worker process


def start_worker(writer: Writer, work: Path) -> None:
    """Initializes this worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    Thread(target=end_with_parent, daemon=True).start()
    global worker_makes
    worker_makes = partial(make_part, writer, work)


def end_with_parent() -> None:
    """Ends this process when the main process has ended, also after a kill."""
    multiprocessing.parent_process().join()
    os._exit(1)


def in_worker(number: int, part: Any) -> int:
    """Makes one part in a worker process."""
    return worker_makes(number, part)


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
    splits = manifest["splits"].values()
    files = {shard["file"] for split in splits for shard in split["shards"]}
    files |= {split["targets"]["file"] for split in splits if "targets" in split}
    for path in work.iterdir():
        if path.name not in {*files, MANIFEST, "tokenizer"}:
            remove(path)
    sync_tree(work)
    work.rename(data_dir)
    sync(data_dir.parent)
    return manifest

"""Prepares data on several machines: a datatrove pipeline that writes token shards (package datatrove).

Each task tokenizes one piece. After all tasks a last step writes the shards and the manifest. The steps also work
after the readers and filters of another datatrove pipeline:

    LocalPipelineExecutor([JsonlReader("s3://…"), MyFilter(), WritePiece(plan)], tasks=…)

The plan then needs one piece per task; the pieces' content is not read.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2_accel.data.assembly import finish
from gpt2_accel.data.documents import Document, chunks, held_out, split_of
from gpt2_accel.data.plan import Plan
from gpt2_accel.data.prepare import HINT, begin, finished_before, plan_hash, run_plan
from gpt2_accel.data.shards import MANIFEST
from gpt2_accel.data.tokenizing import PieceWriter, record_path
from gpt2_accel.files import lock_folder
from gpt2_accel.tokenizer import load_tokenizer

try:
    import datatrove.data
    from datatrove.pipeline.base import PipelineStep
except ImportError as error:
    raise ImportError(
        "preparation on a cluster needs datatrove: pip install 'datatrove>=0.10'"
    ) from error


class ReadPiece(PipelineStep):
    """Yields the documents of piece `rank`."""

    name, type = "piece", "READER"

    def __init__(self, plan: Plan):
        super().__init__()
        self.pieces = plan.pieces

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        for number, document in enumerate(self.pieces[rank].documents()):
            metadata = {"split": document.split, "begins": document.begins}
            yield datatrove.data.Document(
                "".join(document.chunks), f"{rank}/{number}", [], metadata
            )


class WritePiece(PipelineStep):
    """Tokenizes the task's documents into piece `rank`.

    A document's split is its metadata's `split`, by default decided by a hash of its id. Raises `ValueError` if another
    command has replaced the plan's work.
    """

    name, type = "token shards", "WRITER"

    def __init__(self, plan: Plan):
        super().__init__()
        self.work, self.plan_hash = plan.work, plan.hash

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        def documents() -> Iterator[Document]:
            for document in data:
                split = document.metadata.get("split") or split_of(held_out(document.id))
                begins = document.metadata.get("begins", True)
                yield Document(split, chunks([document.text]), begins, document.id)
            check_work(self.work, self.plan_hash)  # before the files get their names

        check_work(self.work, self.plan_hash)
        if not record_path(self.work, rank).exists():
            writer = PieceWriter(self.work, load_tokenizer(self.work / "tokenizer"))
            writer.write(rank, documents(), self.count)
        yield from ()

    def count(self, documents: int, tokens: int, size: int) -> None:
        """Updates datatrove's statistics."""
        self.stat_update("documents", value=documents)
        self.stat_update("tokens", value=tokens)
        self.stat_update("bytes", value=size)


class FinishShards(PipelineStep):
    """Writes the shards and the manifest, as the only task of a second pipeline. Does nothing if they are complete.

    Raises `OSError` if another process uses the work folder, `ValueError` if another command has replaced the plan's
    work, and the errors of `finished_before`.
    """

    name, type = "manifest", "WRITER"

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = replace(plan, pieces=[None] * len(plan.pieces))
        self.plan.hash = plan.hash

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        plan = self.plan
        if plan.data_dir.exists():
            finished_before(plan)
            return
        with lock_folder(plan.work, HINT):
            check_work(plan.work, plan.hash)
            plan.tokenizer = load_tokenizer(plan.work / "tokenizer")
            finish(plan)
        yield from ()


def check_work(work: Path, expected: str | None) -> None:
    """Raises `ValueError` if a work folder belongs to another plan than that of the hash `expected`, or to none."""
    if plan_hash(work) != expected:
        raise ValueError(
            f"{work} was removed or taken by another command: start the command of this job again"
        )


def run_on(kind: str, plan: Plan, workers: int, slurm: dict[str, Any]) -> dict | None:
    """Prepares the data with datatrove and returns the manifest, or None after submitting the jobs to Slurm.

    `kind` is the executor: `datatrove` (this machine), `slurm` or `ray`; the last two are not tested. `workers` tasks
    run at once. `slurm` holds the jobs' `partition` and `time`.

    Raises `ValueError` for Slurm without a partition, and the errors of `run_plan`.
    """
    if kind == "slurm":
        return submit(plan, workers, slurm)
    if kind == "ray":
        from datatrove.executor.ray import RayPipelineExecutor as Executor
    else:
        import multiprocess
        from datatrove.executor.local import LocalPipelineExecutor as Executor

        # A forked process would keep the lock of the work folder when this process is killed.
        multiprocess.set_start_method("forkserver", force=True)
        multiprocess.set_forkserver_preload([__name__])

    def tokenize_pieces(plan: Plan, workers: int) -> None:
        Executor([ReadPiece(plan), WritePiece(plan)], **options(plan, "pieces", workers)).run()

    return run_plan(plan, workers, tokenize_pieces)


def submit(plan: Plan, workers: int, slurm: dict[str, Any]) -> dict | None:
    """Submits the jobs to Slurm; returns None, or the manifest if there is no work left."""
    from datatrove.executor.slurm import SlurmPipelineExecutor as Executor

    if not slurm["partition"]:
        raise ValueError("--executor slurm needs --slurm_partition")
    if plan.data_dir.exists():
        return finished_before(plan)
    with lock_folder(plan.work, HINT):
        begin(plan)
        if (plan.work / MANIFEST).exists():
            return finish(plan)
        job = {**slurm, "cpus_per_task": 1, "mem_per_cpu_gb": 4}
        steps = [ReadPiece(plan), WritePiece(plan)]
        pieces = Executor(steps, **options(plan, "pieces", workers), **job)
        last = {**options(plan, "shards", 1), "tasks": 1}
        Executor([FinishShards(plan)], **last, **job, depends=pieces).run()
    return None


def options(plan: Plan, name: str, workers: int) -> dict[str, Any]:
    """Returns the options of the executor `name`, with one task per piece.

    Each plan has its own folder, since queued jobs of Slurm read their pipeline there. datatrove's records of finished
    tasks, also there, are ignored: the work folder has its own, and may have been removed.
    """
    logs = plan.work.with_name(f"{plan.work.name}.logs") / str(plan.hash)[:16] / name
    tasks = len(plan.pieces)
    return {
        "tasks": tasks,
        "workers": min(workers, tasks),
        "logging_dir": str(logs),
        "skip_completed": False,
    }

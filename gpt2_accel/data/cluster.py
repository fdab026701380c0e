"""Prepares data on several machines: a datatrove pipeline that writes token shards (package datatrove).

Each task tokenizes one piece. After all tasks a last step writes the shards and the manifest. The steps also work
after the readers and filters of another datatrove pipeline:

    LocalPipelineExecutor([JsonlReader("s3://…"), MyFilter(), WritePiece(plan)], tasks=…)

The plan then needs one piece per task; the pieces' content is not read.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpt2_accel.data.assembly import finish
from gpt2_accel.data.documents import Document, chunks, held_out, split_of
from gpt2_accel.data.plan import Plan
from gpt2_accel.data.prepare import begin, finished_before
from gpt2_accel.data.shards import MANIFEST
from gpt2_accel.data.tokenizing import PieceWriter, record_path
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

    A document's split is its metadata's `split`, by default decided by a hash of its id.
    """

    name, type = "token shards", "WRITER"

    def __init__(self, plan: Plan):
        super().__init__()
        self.work = plan.work

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        def documents() -> Iterator[Document]:
            for document in data:
                split = document.metadata.get("split") or split_of(held_out(document.id))
                begins = document.metadata.get("begins", True)
                yield Document(split, chunks([document.text]), begins, document.id)

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
    """Writes the shards and the manifest, as the only task of a second pipeline."""

    name, type = "manifest", "WRITER"

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = replace(plan, pieces=[None] * len(plan.pieces))
        self.plan.hash = plan.hash

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        self.plan.tokenizer = load_tokenizer(self.plan.work / "tokenizer")
        finish(self.plan)
        yield from ()


def run_on(kind: str, plan: Plan, workers: int, slurm: dict[str, Any]) -> dict | None:
    """Prepares the data with datatrove and returns the manifest, or None after submitting the jobs to Slurm.

    `kind` is the executor: `datatrove` (this machine), `slurm` or `ray`; the last two are not tested. `workers` tasks
    run at once. `slurm` holds the jobs' `partition` and `time`.

    Raises `ValueError` for Slurm without a partition, and the errors of `run_plan`.
    """
    if plan.data_dir.exists():
        return finished_before(plan)
    # datatrove records finished tasks here, so each plan has its own folder.
    logs = plan.work.with_name(f"{plan.work.name}.logs") / str(plan.hash)[:16]
    options = {}
    if kind == "slurm":
        from datatrove.executor.slurm import SlurmPipelineExecutor as Executor

        if not slurm["partition"]:
            raise ValueError("--executor slurm needs --slurm_partition")
        options = {**slurm, "cpus_per_task": 1, "mem_per_cpu_gb": 4}
    elif kind == "ray":
        from datatrove.executor.ray import RayPipelineExecutor as Executor
    else:
        from datatrove.executor.local import LocalPipelineExecutor as Executor
    begin(plan)
    if (plan.work / MANIFEST).exists():
        return finish(plan)
    tasks = len(plan.pieces)
    pieces = Executor(
        [ReadPiece(plan), WritePiece(plan)],
        tasks=tasks,
        workers=min(workers, tasks),
        logging_dir=str(logs / "pieces"),
        **options,
    )
    last = Executor(
        [FinishShards(plan)],
        tasks=1,
        workers=1,
        depends=pieces,
        logging_dir=str(logs / "shards"),
        **options,
    )
    last.run()
    manifest = plan.data_dir / MANIFEST
    return json.loads(manifest.read_text()) if manifest.exists() else None

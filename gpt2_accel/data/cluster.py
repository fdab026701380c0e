"""Preparation beyond one machine: a datatrove pipeline that writes this project's shards (extra `[scale]`).

One task tokenizes one piece; a last step, which waits for all tasks, cuts the pieces into shards and writes
the manifest. The steps also fit into a pipeline of your own, behind datatrove's readers and filters:

    LocalPipelineExecutor([JsonlReader("s3://…"), MyFilter(), WritePiece(plan)], tasks=…)

with a plan that has as many pieces as there are tasks, whatever they are.
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
        "preparation on a cluster needs datatrove: pip install 'gpt2_accel[scale]'"
    ) from error


class ReadPiece(PipelineStep):
    """Yields the documents of the piece that has the task's number."""

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
    """Tokenizes the task's documents into a piece. A document's split is its metadata's, or follows from a
    hash of its id."""

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
        """Tells datatrove's statistics."""
        self.stat_update("documents", value=documents)
        self.stat_update("tokens", value=tokens)
        self.stat_update("bytes", value=size)


class FinishShards(PipelineStep):
    """Makes the shards of all pieces, and the manifest: the one task of a second pipeline."""

    name, type = "manifest", "WRITER"

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = replace(plan, pieces=[None] * len(plan.pieces))
        self.plan.mark = plan.mark

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        self.plan.tokenizer = load_tokenizer(self.plan.work / "tokenizer")
        finish(self.plan)
        yield from ()


def run_on(kind: str, plan: Plan, workers: int, slurm: dict[str, Any]) -> dict | None:
    """Carries out a plan by datatrove: `kind` is `datatrove`, its executor on this machine, `slurm` or
    `ray`, which are not tested here. On Slurm it returns None when the jobs are submitted, else the manifest.

    `workers` tasks run at once; `slurm` are the `partition` and `time` of the jobs.
    """
    if plan.data_dir.exists():
        return finished_before(plan)
    # What datatrove notes there as done is done for this plan alone.
    logs = plan.work.with_name(f"{plan.work.name}.logs") / str(plan.mark)[:16]
    if kind == "slurm":
        from datatrove.executor.slurm import SlurmPipelineExecutor as Executor

        if not slurm["partition"]:
            raise ValueError("--executor slurm needs --slurm_partition")
        options = {**slurm, "cpus_per_task": 1, "mem_per_cpu_gb": 4}
    elif kind == "ray":
        from datatrove.executor.ray import RayPipelineExecutor as Executor

        options = {}
    else:
        from datatrove.executor.local import LocalPipelineExecutor as Executor

        options = {}
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

"""Tokenizes text into shards with several processes, and resumes after a kill.

Each piece of the corpus (`documents.py`) is tokenized into its own file with a record (`tokenizing.py`). The pieces are
then concatenated and cut into shards of equal size (`assembly.py`). Every byte of the shards depends only on the corpus
and the tokenizer, not on the number of workers or on a kill. The work is in `.NAME.partial` beside the output folder
until it is complete. The same command resumes it there, also after some of the text was corrected.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_accel.data.assembly import concatenate, finish
from gpt2_accel.data.plan import SHARD_TOKENS, Plan
from gpt2_accel.data.shards import MANIFEST, read_manifest
from gpt2_accel.data.sources import Texts, split_text, text_source, tiny_shakespeare
from gpt2_accel.data.tokenizing import record_path, tokenize
from gpt2_accel.files import lock_folder, remove, remove_leftovers, write_json
from gpt2_accel.tokenizer import save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare(
    splits: Mapping[str, Iterable[str]],
    tokenizer: "PreTrainedTokenizerBase",
    data_dir: str | Path,
    *,
    source: str,
    shard_tokens: int = SHARD_TOKENS,
) -> dict:
    """Tokenizes the given documents of each split into `data_dir`; returns the manifest.

    `source` is the manifest's description of the text. Raises the errors of `run_plan`. An error or an interrupt
    leaves no files.
    """
    pieces = [Texts(split, texts) for split, texts in splits.items()]
    return run_plan(
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


def prepare_text(
    path: str | Path | None,
    data_dir: str | Path,
    tokenizer_of: Callable[[str], "PreTrainedTokenizerBase"],
) -> None:
    """Prepares the text of `path`, by default tiny Shakespeare, unless `data_dir` holds it already.

    `tokenizer_of` maps the text to its tokenizer. Raises `ValueError` if `data_dir` was made from another text than
    that of `path`, and the errors of `tiny_shakespeare`.
    """
    prepared = (Path(data_dir) / MANIFEST).exists()
    if prepared and path is None:
        return
    text = tiny_shakespeare(path)
    source = text_source(text, path)
    if not prepared:
        prepare(split_text(text), tokenizer_of(text), data_dir, source=source)
    elif read_manifest(data_dir)["source"].split()[-1] != source.split()[-1]:  # SHA-256
        raise ValueError(
            f"{data_dir} was made from another text than {path}: choose another --data_dir"
        )


HINT = "choose another --data_dir"


def run_plan(
    plan: Plan,
    workers: int = 1,
    tokenize_pieces: Callable[[Plan, int], None] = tokenize,
    assemble: Callable[[Plan], dict] = concatenate,
) -> dict:
    """Writes `plan.data_dir` in the format of `shards.py` with `workers` processes; returns the manifest.

    Resumes the work of a call that was killed. Leaves a complete folder unchanged. `tokenize_pieces(plan, workers)`
    tokenizes the pieces that have no record yet, and `assemble` is passed to `finish`.

    Raises `FileExistsError` if the folder was made from another plan, `ValueError` if a split would be empty or the
    unfinished work belongs to another plan, `OSError` if the disk is too small or another process is preparing the same
    folder.
    """
    if os.path.lexists(plan.data_dir):
        return finished_before(plan)
    with lock_folder(plan.work, HINT):
        try:
            begin(plan)
            if not (plan.work / MANIFEST).exists():
                tokenize_pieces(plan, workers)
            return finish(plan, assemble)
        except BaseException:
            if not (plan.restartable and holds_finished_work(plan.work)):
                shutil.rmtree(plan.work, ignore_errors=True)
            raise


carry_out = run_plan  # the former name


def finished_before(plan: Plan) -> dict:
    """Returns the manifest of an existing folder of this plan. Raises `FileExistsError` for another plan's folder."""
    if plan.hash is not None and (plan.data_dir / MANIFEST).exists():
        manifest = read_manifest(plan.data_dir)
        if manifest.get("plan") == plan.hash:
            return manifest
    what = " with other data" if (plan.data_dir / MANIFEST).exists() else ""
    raise FileExistsError(f"{plan.data_dir} exists already{what}: choose another folder")


def begin(plan: Plan) -> None:
    """Prepares the work folder and keeps an earlier call's finished pieces.

    Pieces of another plan are kept if this plan has them too, so that only corrected text is tokenized again. Raises
    `ValueError` if there are finished pieces of another plan and none can be kept.
    """
    work, plan_file = plan.work, plan.work / "plan.json"
    work.mkdir(parents=True, exist_ok=True)
    if not plan.restartable or plan_hash(work) != plan.hash:
        keep = same_pieces(plan)
        if plan.restartable and holds_finished_work(work) and not keep:
            raise ValueError(
                f"{work} holds unfinished work on another text or with other settings: finish it with its own "
                "command, or remove the folder"
            )
        stay = {".lock", "pieces", *keep}
        if keep:  # with their plan they are valid at any time, also after a kill
            stay |= {"plan.json", "tokenizer"}
        else:
            remove(plan_file)
        for path in [*work.iterdir(), *(work / "pieces").glob("*")]:
            if not {path.name, path.name.split(".")[0]} & stay:
                remove(path)
        (work / "pieces").mkdir(exist_ok=True)
        save_tokenizer(plan.tokenizer, work / "tokenizer", plan.data_dir / "tokenizer")
        write_json(plan_file, {"plan": plan.hash, "pieces": plan.piece_hashes()})
    remove_leftovers(work / "pieces")


def plan_hash(work: Path) -> str | None:
    """Returns the hash of the plan of a work folder or finished folder, None if it has none."""
    if (work / MANIFEST).exists():
        return read_manifest(work).get("plan")
    plan_file = work / "plan.json"
    return json.loads(plan_file.read_text())["plan"] if plan_file.exists() else None


def same_pieces(plan: Plan) -> set[str]:
    """Returns the names of another plan's finished pieces that this plan has too; none after the first shard."""
    plan_file = plan.work / "plan.json"
    if not plan.restartable or not plan_file.exists() or any(plan.work.glob("*.bin*")):
        return set()
    marks = zip(
        json.loads(plan_file.read_text()).get("pieces", []), plan.piece_hashes(), strict=False
    )
    paths = (record_path(plan.work, i) for i, (before, now) in enumerate(marks) if before == now)
    return {path.stem for path in paths if path.exists()}


def holds_finished_work(work: Path) -> bool:
    """Whether the work folder holds a finished piece or all shards."""
    return (work / MANIFEST).exists() or any((work / "pieces").glob("*.json"))

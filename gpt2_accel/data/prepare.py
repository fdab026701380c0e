"""Text -> token shards, by many processes, restartable.

Each piece of the corpus (`documents.py`) is tokenized into a file of its own beside a record of it
(`tokenizing.py`). When all are there they are laid end to end and cut into shards of equal size
(`assembly.py`), so that shards, and every byte of them, depend on the corpus and the tokenizer alone: not on
the number of workers, nor on where a kill fell. Until that is done all is in `.NAME.partial` beside the
folder to be made; starting again goes on there, also when some of the text was corrected.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from gpt2_accel.data.assembly import finish
from gpt2_accel.data.plan import SHARD_TOKENS, Plan
from gpt2_accel.data.shards import MANIFEST, read_manifest
from gpt2_accel.data.sources import Texts, split_text, text_source, tiny_shakespeare
from gpt2_accel.data.tokenizing import record_path, tokenize
from gpt2_accel.files import lock_folder, remove, remove_leftovers, write_json


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


def prepare_text(
    path: str | Path | None,
    data_dir: str | Path,
    tokenizer_of: Callable[[str], PreTrainedTokenizerBase],
) -> None:
    """Prepares one text, that of `path` or tiny Shakespeare, unless that is done; `tokenizer_of` the text is
    its tokenizer.

    Raises `ValueError` if `data_dir` was made from another text than that of `path`, and what
    `tiny_shakespeare` raises.
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


def carry_out(plan: Plan, workers: int = 1) -> dict:
    """Makes `plan.data_dir`, in the format of `shards.py`, in `workers` processes; returns the manifest.

    Killed and called again, it goes on where it was; what is complete is left as it is.

    Raises `FileExistsError` if the folder was made of something else, `ValueError` if a split would
    be without text or the work begun is of something else, `OSError` if the disk is too small or
    another process is preparing the same folder.
    """
    if plan.data_dir.exists():
        return finished_before(plan)
    with lock_folder(plan.work, "choose another --data_dir"):
        try:
            begin(plan)
            if not (plan.work / MANIFEST).exists():
                tokenize(plan, workers)
            return finish(plan)
        except BaseException:
            if not (plan.restartable and holds_finished_work(plan.work)):
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
    """Makes the work folder ready, with what an earlier call left of the same work.

    Of work on another plan the pieces that both have stay, so that a correction costs what was wrong. Raises
    `ValueError` if there is finished work and nothing of it can stay.
    """
    work, begun = plan.work, plan.work / "plan.json"
    work.mkdir(parents=True, exist_ok=True)
    if not plan.restartable or mark_of(work) != plan.mark:
        keep = same_pieces(plan)
        if plan.restartable and holds_finished_work(work) and not keep:
            raise ValueError(
                f"{work} holds work begun on other text or with other settings: finish that with its own "
                "command, or remove the folder"
            )
        stay = {".lock", "pieces", *keep}
        if keep:  # they and the other plan are whole at any time, should this be killed
            stay |= {"plan.json", "tokenizer"}
        else:
            remove(begun)
        for path in [*work.iterdir(), *(work / "pieces").glob("*")]:
            if not {path.name, path.name.split(".")[0]} & stay:
                remove(path)
        (work / "pieces").mkdir(exist_ok=True)
        plan.tokenizer.save_pretrained(work / "tokenizer")
        write_json(begun, {"plan": plan.mark, "pieces": plan.piece_marks()})
    remove_leftovers(work / "pieces")


def mark_of(work: Path) -> str | None:
    """The mark of the plan that the work folder is of, None if it is not there yet."""
    found = [path for name in (MANIFEST, "plan.json") if (path := work / name).exists()]
    return json.loads(found[0].read_text())["plan"] if found else None


def same_pieces(plan: Plan) -> set[str]:
    """The names of the finished pieces of another plan that are this one's too; none once shards are begun."""
    begun = plan.work / "plan.json"
    if not plan.restartable or not begun.exists() or any(plan.work.glob("*.bin*")):
        return set()
    marks = zip(json.loads(begun.read_text()).get("pieces", []), plan.piece_marks(), strict=False)
    paths = (record_path(plan.work, i) for i, (before, now) in enumerate(marks) if before == now)
    return {path.stem for path in paths if path.exists()}


def holds_finished_work(work: Path) -> bool:
    """Whether a piece is done in the work folder, or all shards are."""
    return (work / MANIFEST).exists() or any((work / "pieces").glob("*.json"))

"""The Hugging Face Hub: download and upload of model directories.

A repository's root is a model directory. With the strategy `checkpoint` its folder `last-checkpoint/`
holds what `--resume_from USER/NAME` needs. Tokens are the Hub client's own: `hf auth login` or
`HF_TOKEN`; none passes through here.
"""

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from gpt2_accel.errors import first_line
from gpt2_accel.hf.model_card import named_card
from gpt2_accel.hf.safetensors_files import weight_files

LAST_CHECKPOINT = "last-checkpoint"
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "README.md")  # of a repository, to download
PICTURE = "loss.png"  # shown in the card where it lies beside it
# What is uploaded of a folder, beside the weights: what belongs to a model, and nothing else that lies there.
UPLOADED = (
    *("config.json", "generation_config.json", "*.safetensors.index.json", "*.bin.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "README.md", "LICENSE", "LICENSE.*", PICTURE),
)
# What a resume needs beside the model.
TRAINING_STATE = ("optimizer.safetensors", "state.json", "manifest.json")
# What earlier uploads may have left.
REPLACED = (
    "model*.safetensors*",
    f"{LAST_CHECKPOINT}/*",
    "run.json",
    "status.json",
    "trace-*.json",
)
ATTEMPTS = 4  # of an upload, beside the client's own
PAUSE = 1.0  # seconds before the second attempt; doubles each time


def download(name: str, patterns: tuple[str, ...], folder: str | None = None) -> Path:
    """The local copy of a Hub repository, `USER/NAME` or `USER/NAME@REVISION`, downloaded if need be.

    Only the files at its root that match `patterns`, or those in its `folder`, whose path is returned
    then. Raises `FileNotFoundError` if there is no such repository or it cannot be reached.
    """
    repo_id, _, revision = name.partition("@")
    wanted = [f"{folder}/{pattern}" for pattern in patterns] if folder else list(patterns)
    try:
        path = snapshot_download(
            repo_id,
            revision=revision or None,
            allow_patterns=wanted,
            ignore_patterns=None if folder else ["*/*"],
        )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name} is neither a folder nor a model on the Hub that can be reached: check its name "
            f"and the connection ({first_line(error)})"
        ) from error
    return Path(path) / folder if folder else Path(path)


def is_repo_id(name: str) -> bool:
    """Whether `name` looks like `USER/NAME` or `USER/NAME@REVISION`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@\S+)?", name) is not None


def push(
    folder: str | Path, repo_id: str, *, private: bool = True, message: str = "Upload the model"
) -> str:
    """Uploads a folder as one commit to `repo_id`, which is made if it is not there; returns its URL.

    What of `REPLACED` an earlier upload has left and this one has not is removed in the same commit; the client sends only files that changed. Raises what the Hub client raises.
    """
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=message,
        delete_patterns=list(REPLACED),
    )
    return str(commit.repo_url)


def stage(source: Path, target: Path, repo_id: str) -> None:
    """Lays out in `target` the model files of the directory `source` for an upload to `repo_id`.

    Hard links where the disk has them, so that it takes no time or space and that the upload does not
    mind if `source` is removed. The card then names `repo_id` and shows the picture of the loss.

    Raises `OSError` if the weights are not whole, or if one of the files is a symbolic link.
    """
    lay_out(model_files(source), target)
    card = target / "README.md"
    if card.exists():
        text = card.read_text(encoding="utf-8")
        card.unlink()  # the link, not the file
        named = named_card(text, repo_id)
        if (target / PICTURE).exists():
            named = named.replace("\n## Training\n", f"\n## Training\n\n![Loss]({PICTURE})\n", 1)
        card.write_text(named, encoding="utf-8")


def stage_checkpoint(source: Path, target: Path) -> None:
    """Lays out in `target` what of a checkpoint a resume needs, as `stage` does."""
    state = source / "training_state"
    refuse_links([state])
    lay_out(model_files(source), target)
    lay_out([state / name for name in TRAINING_STATE], target / state.name)


def model_files(directory: Path) -> list[Path]:
    """The files of a model directory that belong to the model. Raises `OSError` if its weights are not whole."""
    found = [path for pattern in UPLOADED for path in sorted(directory.glob(pattern))]
    return found + weight_files(directory)


def lay_out(files: list[Path], target: Path) -> None:
    """Hard links to `files` in the new folder `target`, or copies where the file system has none. Raises `OSError` if one
    is a symbolic link."""
    refuse_links(files)
    target.mkdir(parents=True)
    for path in files:
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copyfile(path, target / path.name)


def refuse_links(paths: list[Path]) -> None:
    """Raises `OSError` if one of the paths is a symbolic link: what it leads to may be of another folder."""
    for path in paths:
        if path.is_symlink():
            raise OSError(f"{path} is a link, which is not uploaded: put there what it leads to")


def push_model(directory: Path, repo_id: str, *, private: bool = True, card: str) -> str:
    """Uploads a model directory, with `card` if it has none of its own; returns the repository's URL.

    Raises `OSError`, in one sentence, if the upload fails.
    """
    check_repo_id(repo_id)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "upload"
        stage(directory, folder, repo_id)
        if not (folder / "README.md").exists():
            (folder / "README.md").write_text(card, encoding="utf-8")
        try:
            return push_patiently(folder, repo_id, private=private, message="Upload the model")
        except Exception as error:
            raise OSError(f"could not push to {repo_id}: {reason(error)}") from error


def push_patiently(folder: Path, repo_id: str, **options) -> str:
    """`push`, tried again where that can help."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return push(folder, repo_id, **options)
        except Exception as error:  # of the client, its HTTP library or the network
            if is_final(error) or attempt == ATTEMPTS:
                raise
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise AssertionError("not reached")


def is_final(error: Exception) -> bool:
    """Whether trying again is no use: the server understood, and refused."""
    response = getattr(error, "response", None)
    if isinstance(error, HfHubHTTPError) and response is not None:
        return 400 <= response.status_code < 500 and response.status_code not in (408, 409, 429)
    return isinstance(error, ValueError)


def reason(error: Exception) -> str:
    """Why an upload failed, and what to do, in one sentence."""
    response = getattr(error, "response", None)
    hint = "it can be pushed later with recipes/push_to_hub.py"
    if getattr(response, "status_code", None) in (401, 403):
        hint = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
    return f"{first_line(error)}: {hint}"


def check_repo_id(repo_id: str) -> None:
    """Raises `ValueError` if `repo_id` cannot be the name of a repository."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(
            f"{repo_id!r} is not a name for a Hub repository: give USER/NAME ({first_line(error)})"
        ) from error

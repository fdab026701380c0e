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

LAST_CHECKPOINT = "last-checkpoint"
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "README.md")
PICTURE = "loss.png"  # shown in the card where it lies beside it
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

    Weights and checkpoint files of an earlier upload that this one has not are removed in the same
    commit; the client sends only files that changed. Raises what the Hub client raises.
    """
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=message,
        delete_patterns=["model*.safetensors*", f"{LAST_CHECKPOINT}/*"],
    )
    return str(commit.repo_url)


def stage(source: Path, target: Path, repo_id: str) -> None:
    """Lays out in `target` the model files of the directory `source` for an upload to `repo_id`.

    Hard links where the disk has them, so that it takes no time or space and that the upload does not
    mind if `source` is removed. The card then names `repo_id` and shows the picture of the loss.
    """
    target.mkdir(parents=True)
    for pattern in (*MODEL_FILES, PICTURE):
        for path in source.glob(pattern):
            link(path, target / path.name)
    card = target / "README.md"
    if card.exists():
        text = card.read_text(encoding="utf-8")
        card.unlink()  # the link, not the file
        named = named_card(text, repo_id)
        if (target / PICTURE).exists():
            named = named.replace("\n## Training\n", f"\n## Training\n\n![Loss]({PICTURE})\n", 1)
        card.write_text(named, encoding="utf-8")


def link(source: str | Path, target: str | Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


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

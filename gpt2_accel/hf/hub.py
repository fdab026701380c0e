"""The Hugging Face Hub: downloads and uploads model directories.

`pushes.py` uploads during a run.

A repository's root is a model directory. With the strategy `checkpoint` its folder
`last-checkpoint/` is a checkpoint for `--resume_from USER/NAME`. The Hub client finds the access
token itself: `hf auth login` or `HF_TOKEN`.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpt2_accel.hf.model_card import named_card
from gpt2_accel.runtime.files import first_line, write_file
from gpt2_accel.tokenizer import refuse_gguf

# The functions that use the Hub import its client: that takes a fifth of a second, and most runs do
# not need it.

LAST_CHECKPOINT = "last-checkpoint"
# The files of a model directory that are downloaded and uploaded.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model*.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_base.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "README.md",
    "LICENSE*",
)
# Checksums of a run's final model. They belong to the folder and are not uploaded: a repository's
# files are changed by its owner.
MODEL_MANIFEST = "model.manifest.json"
# Files of earlier uploads that an upload removes unless it replaces them.
REPLACED = ["model*.safetensors*", "adapter_*", f"{LAST_CHECKPOINT}/*"]
# Seconds before the attempts of an upload; the client repeats some requests itself.
PAUSES = (0.0, 1.0, 2.0, 4.0)


def download(name: str, patterns: Sequence[str]) -> Path:
    """Downloads a Hub repository, `USER/NAME` or `USER/NAME@REVISION`, unless it is cached.

    Only files that match one of `patterns` are downloaded. Returns the local folder. Raises
    `FileNotFoundError` if the repository does not exist or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    refuse_gguf(name)
    repo_id, _, revision = name.partition("@")
    try:
        return Path(
            snapshot_download(repo_id, revision=revision or None, allow_patterns=list(patterns))
        )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name} is neither a folder nor a model on the Hub that can be reached: check its "
            f"name and the connection ({first_line(error)})"
        ) from error


def is_repo_id(name: str) -> bool:
    """Whether `name` looks like `USER/NAME` or `USER/NAME@REVISION`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@\S+)?", name) is not None


def check_push(repo_id: str) -> None:
    """Raises `ValueError` if `repo_id` is not `USER/NAME` or the Hub client finds no access token.

    It does not ask the Hub whether the token is valid.
    """
    from huggingface_hub import get_token

    if "@" in repo_id or not is_repo_id(repo_id):
        raise ValueError(f"{repo_id!r} is not a name for a Hub repository: give USER/NAME")
    if get_token() is None:
        raise ValueError(
            "a push to the Hub needs a login: run `hf auth login`, or set HF_TOKEN to a token "
            "that may write there"
        )


def push_model(directory: Path, repo_id: str, *, private: bool) -> str:
    """Uploads a model directory; returns the repository's URL. Raises `OSError` if that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        stage(directory, Path(scratch), repo_id)
        return push(Path(scratch), repo_id, private=private)


def stage(source: Path, target: Path, repo_id: str) -> None:
    """Prepares an upload to `repo_id`: puts the model files of `source` into the folder `target`.

    They are hard links where possible, so `source` may be removed during the upload. The model card
    gets the name `repo_id`.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in MODEL_FILES:
        for path in source.glob(pattern):
            link(path, target / path.name)
    card = target / "README.md"
    if card.exists():
        text = named_card(card.read_text(encoding="utf-8"), repo_id)
        write_file(card, text)  # replaces the link, so `source` keeps its own card


def link(source: str | Path, target: str | Path) -> None:
    """Hard-links a file, or copies it if the file system has no hard links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def push(folder: Path, repo_id: str, *, private: bool = True, tag: str = "") -> str:
    """Uploads a folder to `repo_id` as one commit and returns the repository's URL. Creates the
    repository if needed.

    The commit also deletes the files of `REPLACED` that the folder lacks, and gets the name `tag`,
    which an earlier commit may have had. The client sends only changed files. Tries again after an
    error. Raises `OSError` if the last attempt fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    api = HfApi()
    for pause in PAUSES:
        time.sleep(pause)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message="Upload the model",
                delete_patterns=REPLACED,
            )
            if tag:
                with suppress(RevisionNotFoundError):
                    api.delete_tag(repo_id, tag=tag)
                api.create_tag(repo_id, tag=tag, revision=commit.oid)
            return str(commit.repo_url)
        except Exception as error:  # the client or its HTTP library raises many types
            last = error
    raise OSError(
        f"could not upload to {repo_id} ({first_line(last)}): check the connection and the login, "
        "`hf auth login` or an HF_TOKEN that may write there, and push again"
    ) from last

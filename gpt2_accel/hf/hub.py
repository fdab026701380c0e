"""Downloads model directories from the Hugging Face Hub and uploads them.

A repository's root is a model directory. With the strategy `checkpoint` its folder `last-checkpoint/` is a checkpoint
for `--resume_from USER/NAME`. The Hub client finds the access token itself: `hf auth login` or `HF_TOKEN`.
"""

import difflib
import itertools
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from gpt2_accel.files import first_line
from gpt2_accel.hf.model_card import named_card
from gpt2_accel.hf.safetensors_files import weight_files
from gpt2_accel.recipe_command import recipe_command

# The functions that reach the Hub import its client: it takes a fifth of a second, and most runs do not need it.

LAST_CHECKPOINT = "last-checkpoint"
MODEL_FILES = (
    "*.json",
    "*.jinja",
    "*.safetensors",
    "*.txt",
    "README.md",
)  # downloaded from a repository
PICTURE = "loss.png"  # the model card shows it if it is in the same folder
# The files of a model directory that are uploaded beside the weights.
UPLOADED = (
    *("config.json", "generation_config.json", "*.safetensors.index.json", "*.bin.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "README.md", "LICENSE", "LICENSE.*", PICTURE),
)
# The files of `training_state/`, which a resume needs beside the model.
TRAINING_STATE = ("optimizer.safetensors", "state.json", "manifest.json")
# Files of earlier uploads that an upload removes unless it replaces them.
REPLACED = (
    "model*.safetensors*",
    f"{LAST_CHECKPOINT}/*",
    "run.json",
    "status.json",
    "trace-*.json",
)
ATTEMPTS = 4  # of an upload; the client retries some requests itself
PAUSE = 1.0  # seconds before the second attempt; doubles each time


def download(name: str, patterns: tuple[str, ...], folder: str | None = None) -> Path:
    """Downloads a Hub repository, `USER/NAME` or `USER/NAME@REVISION`, unless it is cached; returns the local folder.

    Only files at the root that match `patterns` are downloaded; with `folder`, those in that folder, whose path is
    returned. Raises `FileNotFoundError` if the repository does not exist or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    if Path(name).is_file():
        hint = f"give its folder, {Path(name).parent}"
        if name.endswith((".pt", ".bin")):
            convert = recipe_command("import_checkpoint")
            hint = f"convert it by {convert} --input {name} --output_dir FOLDER"
        raise FileNotFoundError(f"{name} is a file, not a model's folder: {hint}")
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
        if Path(name).parent.name and Path(name).parent.is_dir():
            raise FileNotFoundError(f"{name} does not exist{neighbour(Path(name))}") from error
        raise FileNotFoundError(
            f"{name} is neither a folder nor a model on the Hub that can be reached: check its name "
            f"and the connection ({first_line(error)})"
        ) from error
    return Path(path) / folder if folder else Path(path)


def neighbour(path: Path) -> str:
    """Returns the hint that ends the message about a folder that does not exist: one beside it with a similar name, or
    all."""
    names = sorted(found.name for found in path.parent.iterdir() if found.is_dir())
    if close := difflib.get_close_matches(path.name, names, n=1):
        return f": did you mean {path.parent / close[0]}?"
    return f": {path.parent} holds {', '.join(names) or 'no folder'}"


def is_repo_id(name: str) -> bool:
    """Whether `name` looks like `USER/NAME` or `USER/NAME@REVISION`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@\S+)?", name) is not None


def push(folder: Path, repo_id: str, *, private: bool) -> str:
    """Uploads a folder to `repo_id` as one commit and returns the repository's URL. Creates the repository if needed.

    The commit also deletes the files of `REPLACED` that the folder lacks. The client sends only changed files. Tries
    again after temporary errors. Raises the errors of the Hub client.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    for attempt in itertools.count(1):
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message="Upload the model",
                delete_patterns=list(REPLACED),
            )
            return str(commit.repo_url)
        except Exception as error:  # from the client, its HTTP library or the network
            if is_final(error) or attempt == ATTEMPTS:
                raise
            time.sleep(PAUSE * 2 ** (attempt - 1))


def stage(source: Path, target: Path, repo_id: str) -> None:
    """Prepares an upload to `repo_id`: puts the model files of `source` into the new folder `target`.

    They are hard links where possible, so `source` may be removed during the upload. The model card gets the name
    `repo_id` and the plot of the loss.

    Raises `OSError` if the weights are incomplete, or if one of the files is a symbolic link.
    """
    lay_out(model_files(source), target)
    card = target / "README.md"
    if card.exists():
        text = card.read_text(encoding="utf-8")
        card.unlink()  # removes the link, so that `source` keeps its own card
        named = named_card(text, repo_id)
        if (target / PICTURE).exists():
            named = named.replace("\n## Training\n", f"\n## Training\n\n![Loss]({PICTURE})\n", 1)
        card.write_text(named, encoding="utf-8")


def stage_checkpoint(source: Path, target: Path) -> None:
    """Puts the files of the checkpoint `source` that a resume needs into the new folder `target`, as `stage` does."""
    state = source / "training_state"
    refuse_links([state])
    lay_out(model_files(source), target)
    lay_out([state / name for name in TRAINING_STATE], target / state.name)


def model_files(directory: Path) -> list[Path]:
    """Returns the files of a directory that belong to its model. Raises `OSError` if the weights are incomplete."""
    found = [path for pattern in UPLOADED for path in sorted(directory.glob(pattern))]
    return found + weight_files(directory)


def lay_out(files: list[Path], target: Path) -> None:
    """Hard-links `files` into the new folder `target`, or copies them if the file system has no hard links.

    Raises `OSError` if one of them is a symbolic link.
    """
    refuse_links(files)
    target.mkdir(parents=True)
    for path in files:
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copyfile(path, target / path.name)


def refuse_links(paths: list[Path]) -> None:
    """Raises `OSError` if one of the paths is a symbolic link, whose target may be outside the model directory."""
    for path in paths:
        if path.is_symlink():
            raise OSError(f"{path} is a link, which is not uploaded: replace it by its target")


def push_model(directory: Path, repo_id: str, *, private: bool = True, card: str) -> str:
    """Uploads a model directory and returns the repository's URL. `card` is the model card if the directory has none.

    Raises `OSError` if the upload fails, and `ValueError` for a bad `repo_id`.
    """
    check_repo_id(repo_id)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "upload"
        stage(directory, folder, repo_id)
        if not (folder / "README.md").exists():
            (folder / "README.md").write_text(card, encoding="utf-8")
        try:
            return push(folder, repo_id, private=private)
        except Exception as error:
            raise OSError(f"could not push to {repo_id}: {reason(error)}") from error


def is_final(error: Exception) -> bool:
    """Whether a retry cannot help: the server refused the request, or the request is invalid."""
    from huggingface_hub.errors import HfHubHTTPError

    response = getattr(error, "response", None)
    if isinstance(error, HfHubHTTPError) and response is not None:
        return 400 <= response.status_code < 500 and response.status_code not in (408, 409, 429)
    return isinstance(error, ValueError)


def reason(error: Exception) -> str:
    """Formats the cause of a failed upload and what to do."""
    response = getattr(error, "response", None)
    hint = f"it can be pushed later with {recipe_command('push_to_hub')}"
    if getattr(response, "status_code", None) in (401, 403):
        hint = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
    return f"{first_line(error).removesuffix('.')}: {hint}"


def check_login() -> None:
    """Raises `ValueError` if the Hub client finds no access token. It does not ask the Hub whether the token is valid."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ValueError(
            "a push to the Hub needs a login: run `hf auth login`, or set HF_TOKEN to a token that may write there"
        )


def check_repo_id(repo_id: str) -> None:
    """Raises `ValueError` if `repo_id` is not a valid name of a repository, with its user."""
    from huggingface_hub.utils import validate_repo_id

    try:
        if "/" not in repo_id:
            raise ValueError("it names no user")
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(
            f"{repo_id!r} is not a name for a Hub repository: give USER/NAME ({first_line(error)})"
        ) from error

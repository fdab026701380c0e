"""The Hugging Face Hub: downloads model directories, uploads them, also in the background of a run.

A repository's root is a model directory. With the strategy `checkpoint` its folder `last-checkpoint/` is a checkpoint
for `--resume_from USER/NAME`. The Hub client finds the access token itself: `hf auth login` or `HF_TOKEN`.
"""

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import thread as executors
from contextlib import suppress
from pathlib import Path

from gpt2_accel.config import TrainConfig
from gpt2_accel.hf.model_card import named_card
from gpt2_accel.runtime.files import first_line, sentence, write_file
from gpt2_accel.runtime.recipe_command import recipe_command

# The functions that reach the Hub import its client: it takes a fifth of a second, and most runs do not need it.

LAST_CHECKPOINT = "last-checkpoint"
PICTURE = "loss.png"  # the model card shows it if it is in the same folder
# The files of a model directory that are downloaded and uploaded.
MODEL_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model*.index.json"),
    "adapter_config.json",
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "README.md", "LICENSE", "LICENSE.*", PICTURE),
)
# Checksums of a run's final model. They belong to the folder and are not uploaded: a repository's
# files are changed by its owner.
MODEL_MANIFEST = "model.manifest.json"
# Files of earlier uploads that an upload removes unless it replaces them.
REPLACED = {
    "model": ["model*.safetensors*", f"{LAST_CHECKPOINT}/*"],
    "dataset": ["*.bin", "*.bin.sums"],
}
# Seconds between the attempts of an upload; the client repeats some requests itself.
PAUSES = (1.0, 2.0, 4.0)
LONGEST_WAIT = 3600.0  # seconds that a run waits for its last upload


def download(name: str, patterns: Sequence[str] = MODEL_FILES) -> Path:
    """Downloads a Hub repository, `USER/NAME` or `USER/NAME@REVISION`, unless it is cached; returns the local folder.

    Only files whose paths match one of `patterns` are downloaded. Raises `FileNotFoundError` if the repository does not
    exist or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    repo_id, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repo_id, revision=revision or None, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name} is neither a folder nor a model on the Hub that can be reached: check its name "
            f"and the connection ({first_line(error)})"
        ) from error


def is_repo_id(name: str) -> bool:
    """Whether `name` looks like `USER/NAME` or `USER/NAME@REVISION`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@\S+)?", name) is not None


def check_push(repo_id: str) -> None:
    """Raises `ValueError` if `repo_id` is not the name of a repository, with its user, or the Hub client finds no access
    token. It does not ask the Hub whether the token is valid."""
    from huggingface_hub import get_token

    if "@" in repo_id or not is_repo_id(repo_id):
        raise ValueError(f"{repo_id!r} is not a name for a Hub repository: give USER/NAME")
    if get_token() is None:
        raise ValueError(
            "a push to the Hub needs a login: run `hf auth login`, or set HF_TOKEN to a token that may write there"
        )


def push_model(directory: Path, repo_id: str, *, private: bool = True) -> str:
    """Uploads a model directory and returns the repository's URL. Raises `OSError` if that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        stage(directory, Path(scratch), repo_id)
        return push(Path(scratch), repo_id, private=private)


def stage(source: Path, target: Path, repo_id: str) -> None:
    """Prepares an upload to `repo_id`: puts the model files of `source` into the folder `target`.

    They are hard links where possible, so `source` may be removed during the upload. The model card gets the name
    `repo_id` and the plot of the loss.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in MODEL_FILES:
        for path in source.glob(pattern):
            link(path, target / path.name)
    card = target / "README.md"
    if card.exists():
        text = named_card(card.read_text(encoding="utf-8"), repo_id)
        if (target / PICTURE).exists():
            text = text.replace("\n## Training\n", f"\n## Training\n\n![Loss]({PICTURE})\n", 1)
        write_file(card, text)  # replaces the link, so `source` keeps its own card


def link(source: str | Path, target: str | Path) -> None:
    """Hard-links a file, or copies it if the file system has no hard links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def push(folder: Path, repo_id: str, *, private: bool = True, repo_type: str = "model") -> str:
    """Uploads a folder to `repo_id` as one commit and returns the repository's URL. Creates the repository if needed.

    The commit also deletes the files of `REPLACED` that the folder lacks. The client sends only changed files. Tries
    again after an error. Raises `OSError` if the last attempt fails.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    for pause in (*PAUSES, None):
        try:
            api.create_repo(repo_id, repo_type=repo_type, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                repo_type=repo_type,
                folder_path=folder,
                commit_message=f"Upload the {repo_type}",
                delete_patterns=REPLACED[repo_type],
            )
            return str(commit.repo_url)
        except Exception as error:  # from the client, its HTTP library or the network
            if pause is None:
                raise OSError(
                    f"could not upload to {repo_id} ({first_line(error)}): check the connection and the login, `hf auth "
                    "login` or an HF_TOKEN that may write there, and push again"
                ) from error
            time.sleep(pause)


class Uploads:
    """Pushes the checkpoints of a run to the Hub in the background; a context manager around its loop.

    Values of `hub_strategy`, as in HF's Trainer: `end` pushes the final model only; `every_save` also the model of each
    checkpoint; `checkpoint` also the training state, in `last-checkpoint/`.

    Hard links keep a checkpoint's files until they are sent. During an upload only the newest checkpoint waits for the
    next one. A failed upload is reported through `print_line`; it never ends the run. Leaving the context waits for the
    last upload, at most `LONGEST_WAIT` and only while `seconds_left` is above 0. The threads are daemons: those of the
    client's `run_as_future` are joined when the interpreter exits, also if the Hub never answers.

    Does nothing without `push_to_hub`.
    """

    def __init__(
        self,
        config: TrainConfig,
        print_line: Callable[[str], None],
        seconds_left: Callable[[], float],
    ):
        self.repo_id, self.strategy = config.push_to_hub, config.hub_strategy
        self.print_line, self.seconds_left = print_line, seconds_left
        self.scratch = Path(config.output_dir) / ".uploads"
        self._newest: Path | None = None
        self._thread = threading.Thread()
        self._uploading = threading.Lock()

    def __enter__(self) -> "Uploads":
        shutil.rmtree(self.scratch, ignore_errors=True)  # of a process that was killed
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        thread, ends = self._thread, time.monotonic() + LONGEST_WAIT
        if thread.is_alive() and kind is None:
            self.print_line(
                f"waiting for the upload to {self.repo_id}; press Ctrl-C twice to end without it, "
                f"all files are in {self.scratch.parent}"
            )
            with suppress(KeyboardInterrupt):
                while thread.is_alive() and time.monotonic() < ends and self.seconds_left() > 0:
                    thread.join(0.1)
        if thread.is_alive():
            self.print_line(
                f"the upload to {self.repo_id} did not end in time: push again, {by_recipe()}"
            )
            self._newest = None
            # The interpreter would join the client's own threads, which may wait for an answer of the Hub forever.
            executors._threads_queues.clear()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def push(self, directory: Path, checkpoint: Path | None = None) -> None:
        """Starts to push the model in `directory`, that of a checkpoint or, with the run's last `checkpoint`, its final one.

        With the strategy `checkpoint` it also pushes that folder.
        """
        if self.repo_id is None or (self.strategy == "end" and checkpoint is None):
            return
        folder = self.scratch / f"{time.time_ns()}"
        try:
            stage(directory, folder, self.repo_id)
            if self.strategy == "checkpoint":
                target = folder / LAST_CHECKPOINT
                shutil.copytree(checkpoint or directory, target, copy_function=link)
        except (OSError, ValueError) as error:  # a full disk must not end the run
            self.print_line(f"no upload to {self.repo_id}: {sentence(error)}")
            return
        self._newest = folder
        self._thread = threading.Thread(target=self._upload, args=(folder,), daemon=True)
        self._thread.start()

    def _upload(self, folder: Path) -> None:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # they would break the run's progress bar
        with self._uploading:
            if folder == self._newest:
                try:
                    self.print_line(f"uploaded to {push(folder, self.repo_id)}")
                except OSError as error:
                    self.print_line(f"{error}, {by_recipe()}")
        shutil.rmtree(folder, ignore_errors=True)


def by_recipe() -> str:
    """Formats how to push a model after the run."""
    return f"by {recipe_command('push_to_hub')}"

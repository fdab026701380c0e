"""Uploads checkpoints and models to the Hub in the background of a run."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import thread as executors
from contextlib import suppress
from pathlib import Path

from gpt2_accel.files import first_line
from gpt2_accel.hf import hub
from gpt2_accel.recipe_command import recipe_command

LONGEST_WAIT = 3600.0  # seconds that a run waits for its last upload


class Uploads:
    """Pushes the checkpoints of a run to the Hub in the background; a context manager around its loop.

    Strategies, as in HF's Trainer: `end` pushes the final model only; `every_save` also the model of each checkpoint;
    `checkpoint` also the training state, in `last-checkpoint/`.

    Hard links keep a checkpoint's files until they are sent. During an upload only the newest checkpoint waits for the
    next one. A failed upload is retried, then reported through `print_line`; it never ends the run. Leaving the context waits
    for the last upload, at most `LONGEST_WAIT` and only while `seconds_left` is above 0.

    Does nothing if `repo_id` is None. Raises `ValueError` for an invalid `repo_id`.
    """

    def __init__(
        self,
        repo_id: str | None,
        run_dir: str | Path,
        print_line: Callable[[str], None],
        *,
        strategy: str = "every_save",
        seconds_left: Callable[[], float] = lambda: math.inf,
    ):
        if repo_id is not None:
            hub.check_repo_id(repo_id)
        self.repo_id, self.run_dir, self.print_line = repo_id, Path(run_dir), print_line
        self.strategy, self.seconds_left = strategy, seconds_left
        self.scratch = self.run_dir / ".uploads"
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._worker: threading.Thread | None = None

    def __enter__(self) -> "Uploads":
        if self.repo_id is not None:
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()  # they would break the run's progress bar
            shutil.rmtree(self.scratch, ignore_errors=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        worker = self._worker
        if kind is None and worker is not None:
            self._wait(worker)
        if worker is not None and worker.is_alive():
            self._waiting = None
            release_executors()
        if self.repo_id is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _wait(self, worker: threading.Thread) -> None:
        self.print_line(
            f"waiting for the upload to {self.repo_id}; press Ctrl-C twice to end without it, "
            f"all files are in {self.run_dir}"
        )
        ends = time.monotonic() + LONGEST_WAIT
        with suppress(KeyboardInterrupt):
            while worker.is_alive() and time.monotonic() < ends and self.seconds_left() > 0:
                worker.join(0.1)
        if worker.is_alive():
            self.print_line(
                f"the upload to {self.repo_id} did not end in time: it can be pushed later with "
                f"{recipe_command('push_to_hub')}"
            )

    def push(self, directory: Path, checkpoint: Path, *, final: bool = False) -> None:
        """Starts to push the model in `directory`; with the strategy `checkpoint` also the folder `checkpoint`.

        `final` marks the final model of the run.
        """
        if self.repo_id is None or (self.strategy == "end" and not final):
            return
        folder = self.scratch / f"{time.time_ns()}"
        try:
            hub.stage(directory, folder, self.repo_id)
            if self.strategy == "checkpoint":
                hub.stage_checkpoint(checkpoint, folder / hub.LAST_CHECKPOINT)
        except (OSError, ValueError) as error:  # a full disk must not end the run
            self.print_line(f"no upload to {self.repo_id}: {first_line(error)}")
            return
        with self._lock:
            replaced, self._waiting = self._waiting, folder
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, daemon=True)
                self._worker.start()
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def push_checkpoint(self, checkpoint: Path) -> None:
        """Starts to push a checkpoint of the run."""
        self.push(checkpoint, checkpoint)

    def _work(self) -> None:
        while True:
            with self._lock:
                folder, self._waiting = self._waiting, None
                if folder is None:
                    self._worker = None
                    return
            try:
                url = hub.push(folder, self.repo_id, private=True)
                self.print_line(f"uploaded to {url}")
            except Exception as error:
                self.print_line(f"could not upload to {self.repo_id}: {hub.reason(error)}")
            shutil.rmtree(folder, ignore_errors=True)


def release_executors() -> None:
    """Lets the interpreter exit while daemon threads of executors still run.

    It would join them at exit, and threads of an upload may wait forever for an answer of the Hub.
    """
    for thread in list(executors._threads_queues):
        if thread.daemon:
            executors._threads_queues.pop(thread, None)

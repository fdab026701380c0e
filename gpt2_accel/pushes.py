"""A callback that pushes checkpoints and the final model to the Hub during a run."""

import shutil
import threading
import time
from concurrent.futures import thread as executors
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2_accel.checkpoint.find import STATE, list_checkpoints
from gpt2_accel.hf.hub import LAST_CHECKPOINT, link, push, stage
from gpt2_accel.run import Run
from gpt2_accel.runtime.files import atomic_directory, remove, sentence

UPLOADS = ".uploads"  # in a run's folder; after the run it holds what was not sent


@dataclass
class Pushes(AbstractContextManager):
    """Pushes checkpoints and the final model to the Hub, in the background of the main process.

    Values of `hub_strategy`, as in HF's Trainer: `end` pushes the final model only; `every_save`
    also the model of each checkpoint; `checkpoint` also the training state, in `last-checkpoint/`.

    With `hub_revisions` each checkpoint is a revision of the repository, such as `step1000`, with
    its `state.json`. Those that were not sent, since the Hub refused them or the process ended,
    are sent before the next checkpoint, or at the next start.

    Hard links keep a checkpoint's files until they are sent. During an upload only the newest
    checkpoint waits, and those that become revisions. A failed upload is printed; it never ends the
    run. Leaving the context waits for the last upload while the run's `stop` has seconds left. The
    threads are daemons: the interpreter would wait at its exit for others, even if the Hub never
    answers.
    """

    run: Run | None = None  # set on the main process only
    newest: Path | None = None
    thread: threading.Thread = field(default_factory=threading.Thread)

    def on_train_begin(self, run: Run) -> None:
        if run.accelerator.is_main_process:
            self.run = run
            self.scratch = run.run_dir / UPLOADS
            self.repo_id = run.config.push_to_hub or ""
            self.print_line = run.log.print_line
            if run.checkpoint and run.resumes_here:
                self.on_save(run, run.checkpoint)  # a kill may have prevented it

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if self.run is None:
            return
        thread = self.thread
        if thread.is_alive() and kind is None:
            self.print_line(
                f"waiting for the upload to {self.repo_id}; press Ctrl-C twice to end without it: "
                f"all files are in {self.scratch.parent}"
            )
            with suppress(KeyboardInterrupt):
                while thread.is_alive() and self.run.stop.seconds_left > 0:
                    thread.join(0.1)
        if thread.is_alive():
            self.print_line(
                f"the upload to {self.repo_id} did not end in time: the same command, or "
                "push_to_hub.py, pushes again"
            )
            self.newest = None
            # The interpreter would join the client's own threads, which may wait forever.
            executors._threads_queues = {}
        with suppress(OSError):  # it is missing, or holds what was not sent
            self.scratch.rmdir()

    def on_save(self, run: Run, path: Path) -> None:
        config = run.config
        if self.run is not None and (config.hub_strategy != "end" or config.hub_revisions):
            tag = path.name.replace("checkpoint-", "step") if config.hub_revisions else ""
            self.push(run, path, path, tag)

    def on_train_end(self, run: Run, finished: bool) -> None:
        if self.run is not None and finished:
            self.push(run, run.run_dir, list_checkpoints(run.run_dir)[-1])

    def push(self, run: Run, directory: Path, checkpoint: Path, tag: str = "") -> None:
        """Starts to push the model in `directory`, as the revision `tag` if that is given.

        With the strategy `checkpoint` also pushes the folder `checkpoint`.
        """
        folder = self.scratch / f"{time.time_ns()}-{tag}"
        try:
            with atomic_directory(folder) as scratch:
                stage(directory, scratch, self.repo_id)
                if run.config.hub_strategy == "checkpoint":
                    shutil.copytree(checkpoint, scratch / LAST_CHECKPOINT, copy_function=link)
                if tag:
                    link(checkpoint / STATE / "state.json", scratch / "state.json")
        except (OSError, ValueError) as error:  # a full disk must not end the run
            self.print_line(f"no upload to {self.repo_id}: {sentence(error)}")
            return
        self.newest = folder
        self.thread = threading.Thread(target=self._upload, args=[self.thread], daemon=True)
        self.thread.start()

    def _upload(self, earlier: threading.Thread) -> None:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # they would break the run's progress bar
        if earlier.is_alive():
            earlier.join()
        for folder in sorted(self.scratch.glob("[0-9]*")):  # also of earlier processes
            tag = folder.name.partition("-")[2]
            try:
                if self.newest and (tag or folder == self.newest):
                    self.print_line(f"uploaded to {push(folder, self.repo_id, tag=tag)}")
                    tag = ""
            except OSError as error:
                self.print_line(str(error))
            if not tag:
                remove(folder)

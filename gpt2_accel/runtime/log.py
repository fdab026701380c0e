"""The log of a run: collects the metrics of an update and hands them to sinks, such as the terminal and `metrics.jsonl`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from gpt2_accel.files import JsonLines
from gpt2_accel.runtime.clock import TrainingClock


class Sink:
    """A place where the log goes. A subclass overrides the methods that it needs; `RunContext` opens it.

    Only the main process has sinks. An exception in a sink ends the run. A sink that keeps what it gets drops what is
    later than the step from which the run resumes.
    """

    def advance(self, step: int) -> None:
        """Notes that `step` updates are done."""

    def write(self, line: dict) -> None:
        """Takes the metrics of an update, with its `step` and `tokens`; `skipped` and `samples` are no numbers."""

    def sample(self, sample: dict) -> None:
        """Takes a sample: `step`, `prompt` and `text`."""

    def print_line(self, text: str) -> None:
        """Takes a line for the user, also from a thread that writes or uploads a checkpoint."""


class RunFiles(Sink):
    """`metrics.jsonl` and `samples.jsonl` in the run's folder; a context manager around the run's loop.

    Opening them drops the lines after `last_step`, which a resumed run rewrites. An evaluation of `last_step` itself that
    a resumed run repeats is added to its line.
    """

    def __init__(self, run_dir: str | Path, last_step: int):
        self._last_step = last_step
        self._metrics = JsonLines(Path(run_dir) / "metrics.jsonl", last_step)
        self._samples = JsonLines(Path(run_dir) / "samples.jsonl", last_step)

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, *_) -> None:
        self._metrics.close()
        self._samples.close()

    def write(self, line: dict) -> None:
        if line["step"] == self._last_step:
            self._metrics.amend(line)
        else:
            self._metrics.write(line)

    def sample(self, sample: dict) -> None:
        self._samples.write(sample)


class RunLog:
    """Logs a run to `sinks`, which only the main process has.

    `earlier` are the lines of `metrics.jsonl` before a resume. `results` has the newest evaluations and `evaluated` the
    update of each. `clock` measures the training; `step` is the number of updates done.
    """

    def __init__(self, sinks: Sequence[Sink], clock: TrainingClock, earlier: Iterable[dict] = ()):
        self._sinks, self.clock = sinks, clock
        self._line: dict[str, object] = {}
        self.results: dict[str, float] = {}
        self.evaluated: dict[str, int] = {}
        for line in earlier:
            found = {
                name: value
                for name, value in line.items()
                if "/" in name and not name.startswith("train/") and value is not None
            }
            self.results |= found
            self.evaluated |= dict.fromkeys(found, line["step"])

    @property
    def step(self) -> int:
        return self.clock.step

    def advance(self, step: int) -> None:
        """Notes that `step` updates are done."""
        self.clock.advance(step)
        for sink in self._sinks:
            sink.advance(step)

    def training(self, figures: dict[str, float]) -> None:
        """Logs figures of the last update as `train/NAME`, and the training speed since the last call."""
        found = figures | self.clock.measure()
        self._line |= {f"train/{name}": value for name, value in found.items()}

    def skipped(self, problem: str, samples: list) -> None:
        """Logs that the last update was skipped because of `problem`, and the samples that it read."""
        self._line |= {"skipped": problem, "samples": samples}
        shown = f"{samples[:8]}" + (" and more, see metrics.jsonl" if len(samples) > 8 else "")
        self.print_line(f"skipped because {problem}; samples {shown}")

    def evaluation(self, results: dict[str, float]) -> None:
        """Logs and prints the results of an evaluation."""
        if not results:  # interrupted
            return
        self._line |= results
        self.results |= results
        self.evaluated |= dict.fromkeys(results, self.step)
        self.print_line(in_words(results))

    def at_this_step(self, name: str) -> float | None:
        """Returns a result of an evaluation after the last update; None if there was none."""
        return self.results[name] if self.evaluated.get(name) == self.step else None

    def sample(self, prompt: str, text: str) -> None:
        """Logs and prints a sample."""
        for sink in self._sinks:
            sink.sample({"step": self.step, "prompt": prompt, "text": text})

    def print_line(self, text: str) -> None:
        """Prints a line."""
        for sink in self._sinks:
            sink.print_line(f"step {self.step}: {text}")

    def write(self) -> None:
        """Hands the metrics of this update to the sinks, if any were logged."""
        if self._line:
            line = {"step": self.step, "tokens": self.clock.tokens_at(self.step), **self._line}
            for sink in self._sinks:
                sink.write(line)
        self._line = {}


def in_words(results: dict[str, float]) -> str:
    """Formats the results of an evaluation as one line, each with its standard error if there is one."""
    errors = {name: f" ± {results[name]:.4f}" for name in results if name.endswith("_stderr")}
    return ", ".join(
        f"{name} {value:.4f}{errors.get(f'{name}_stderr', '')}"
        for name, value in results.items()
        if name not in errors
    )

"""Shared by all tests: no network, a small text, its token shards, and a run of a few updates."""

import atexit
import functools
import gc
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported
os.environ["HF_HUB_DISABLE_XET"] = "1"  # the tests' Hub has plain LFS only
os.environ["TOKENIZERS_PARALLELISM"] = "true"
# Small models gain nothing from a second thread, and several tests run in parallel.
os.environ["OMP_NUM_THREADS"] = "1"
# Inductor compiles in this process, without test programs for each instruction set.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# trackio reads its folder at import, and TRL's trainers import it.
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from launching import ROOT

import gpt2_accel.train as train_module
from gpt2_accel import GPT, GPTConfig, from_pretrained, kernels, save_pretrained
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.prepare import prepare
from gpt2_accel.hf.chat_template import chat_tokenizer, with_rows
from gpt2_accel.runtime import signals
from gpt2_accel.runtime.files import digest, read_json_lines
from gpt2_accel.tokenizer import byte_tokenizer, gpt2_tokenizer, load_tokenizer

# A comparison that uses most of its tolerance here fails on another CPU: HEADROOM=2 halves them.
HEADROOM = int(os.environ.get("HEADROOM", 1))
Approx = type(pytest.approx(0))
tolerance, isclose = Approx.tolerance.fget, torch.isclose
Approx.tolerance = property(lambda self: tolerance(self) / HEADROOM)
torch.isclose = lambda a, b, rtol=1e-5, atol=1e-8, **options: isclose(
    a, b, rtol=rtol / HEADROOM, atol=atol / HEADROOM, **options
)

atexit.register(shutil.rmtree, os.environ["TRACKIO_DIR"], ignore_errors=True)
# `make test-reliability` tries each fault many times, `make test` a few times.
LONG = os.environ.get("RELIABILITY") == "long"
long = pytest.mark.skipif(not LONG, reason="in make test-reliability")
SENTENCE = "the cat sat on a mat and saw that rat run from dog to house with old red hat"
WORDS = SENTENCE.split()


def make_text(words: int, seed: int) -> str:
    """Returns a sentence of random words, whose statistics a small model learns quickly."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words)) + ".\n"


def hellaswag_items(number: int, seed: int = 0) -> list[dict]:
    """Returns random questions, some longer than 64 bytes, with characters of several bytes."""
    rng = random.Random(seed)
    items = []
    for i in range(number):
        endings = []
        for j in range(4):
            text = make_text(rng.randint(1, 3), 10 * i + j).strip()
            endings.append(f"{text} {'é' * rng.randint(0, 16)}{j}")
        context = make_text(rng.randint(1, 14), i)[:-2]
        label = rng.choice((rng.randrange(4), str(rng.randrange(4))))
        item = {"ind": i, "activity_label": "Pets", "ctx": context, "endings": endings}
        items.append(item | {"label": label})
    return items


QUESTIONS = ["What", "Who", "Where", "When", "Why", "How"]


def write_lines(path: Path, rows: list[dict]) -> Path:
    """Writes JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_rows(number: int, seed: int = 0) -> list[dict]:
    """Returns short conversations of a question and an answer, as rows with `messages`."""
    rng = random.Random(seed)
    rows = []
    for i in range(number):
        question = f"{rng.choice(QUESTIONS)} {i}?"
        answer = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4))) + "."
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages})
    return rows


def pair_rows(number: int) -> list[dict]:
    """Returns pairs with different prompts, whose answers have different lengths."""
    rows = []
    for i, row in enumerate(chat_rows(number)):
        question, answer = row["messages"]
        worse = make_text(1 + i % 5, i).strip()
        rows.append({"prompt": question["content"], "chosen": answer["content"], "rejected": worse})
    return rows


@pytest.fixture(scope="session")
def chat_base(tmp_path_factory):
    """The directory of an untrained model of bytes, 128 positions. Tests must not change it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("chat") / "base"
    save_pretrained(GPT(GPTConfig(257, 128, 2, 2, 64)), folder, byte_tokenizer())
    return folder


@pytest.fixture(scope="session")
def chat_model(chat_base, tmp_path_factory):
    """The directory of an untrained chat model. Tests must not change it."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = chat_tokenizer(chat_base)
    save_pretrained(with_rows(from_pretrained(chat_base), 257, 259), folder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def tuned(chat_model, tmp_path_factory):
    """The chat model with other weights. Tests must not change it."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("chat") / "tuned"
    save_pretrained(randomized(from_pretrained(chat_model)), folder, load_tokenizer(chat_model))
    return folder


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Byte-level shards: 12 documents for training, 3 for validation."""
    path = tmp_path_factory.mktemp("data") / "words"
    splits = {
        "train": [make_text(150, seed) for seed in range(12)],
        "val": [make_text(50, seed) for seed in range(100, 103)],
    }
    prepare(splits, byte_tokenizer(), path, source="made up")
    return path


@pytest.fixture(scope="session")
def trained(data_dir, tmp_path_factory):
    """The folder of a run of 250 updates of a model with 64 positions. Tests must not change it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    changes = {"n_positions": 64, "total_batch_size": 4 * 64, "max_steps": 250, "eval_every": 250}
    run(tiny_config(data_dir, folder, **changes))
    return folder


def tiny_config(data_dir, output_dir, **changes) -> TrainConfig:
    """Returns the settings of eight updates of a two-layer model, each logged."""
    settings = {
        "data_dir": str(data_dir),
        "output_dir": str(output_dir),
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "n_positions": 32,
        "micro_batch_size": 4,
        "total_batch_size": 4 * 32,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "log_every": 1,
        "eval_every": 0,
        "sample_every": 0,
        "save_every": 0,
    }
    # A loaded model, or config.json, has its own sizes.
    if changes.get("init_from") or "/" in (changes.get("architecture") or ""):
        del settings["n_layer"], settings["n_head"], settings["n_embd"]
    return TrainConfig(**settings | changes)


@pytest.fixture
def tiny(data_dir, tmp_path):
    """A function that returns the settings of `tiny_config` for a run in a temporary folder."""
    return lambda folder="", **changes: tiny_config(data_dir, tmp_path / folder, **changes)


def reset_accelerate() -> None:
    """Forgets Accelerate's settings, as a new process does."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def run(config: TrainConfig) -> list[dict]:
    """Trains in this process, with Accelerate's state reset; returns the lines of metrics.jsonl."""
    reset_accelerate()
    train_module.train(config)
    return metrics(config.output_dir)


def metrics(run_dir) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl."""
    return read_json_lines(Path(run_dir) / "metrics.jsonl")


def read_json(path: Path):
    """Returns the content of a JSON file."""
    return json.loads(path.read_text())


def status(run_dir) -> dict:
    """Returns the content of a run's status.json."""
    return read_json(Path(run_dir) / "status.json")


def assert_status(run_dir, **expected) -> None:
    """Asserts that a run's status.json has these values."""
    values = status(run_dir)
    assert {name: values[name] for name in expected} == expected


@contextmanager
def refused(words: str) -> Iterator[None]:
    """The block has to raise a `ValueError` or `OSError` of one sentence that matches `words`."""
    with pytest.raises((ValueError, OSError), match=words) as error:
        yield
    assert "\n" not in str(error.value)


def weights_digest(folder) -> str:
    """Returns the SHA-256 of a model directory's weights."""
    return digest(Path(folder) / "model.safetensors")


def contents(folder: Path) -> dict[Path, bytes]:
    """Returns all files below a folder, without the lock."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in paths}


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """Makes all parameters random, so that swapped biases or norms change the logits too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
        if hasattr(model, "head_weight"):  # the rows of padding stay zero
            for weight in (model.head_weight, next(model.parameters())):
                weight[model.config.vocab_size :] = 0
    return model.eval()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, share: float = 1e-5) -> None:
    """Elements differ by rounding, up to a share of the largest, since they are sums: 84 units."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=share * expected.abs().max().item())


def losses(metrics: list[dict]) -> list[float]:
    return [entry["train/loss"] for entry in metrics if "train/loss" in entry]


@pytest.fixture
def accelerator():
    """A new accelerator of one process on the CPU."""
    reset_accelerate()
    return Accelerator(cpu=True)


@pytest.fixture
def before_update(monkeypatch):
    """A function that makes each update begin with `action(number of updates before)`."""

    def install(action):
        honest = train_module.accumulate_gradients

        @functools.wraps(honest)
        def accumulate(run, batches):
            action(run.step)
            return honest(run, batches)

        monkeypatch.setattr(train_module, "accumulate_gradients", accumulate)

    return install


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    torch.manual_seed(0)
    signals.exit_code = 0


def load_fixture(name: str, folder: Path) -> Path:
    """Unpacks `fixtures/NAME.tar.xz` into a folder; returns the folder in it."""
    shutil.unpack_archive(ROOT / f"tests/fixtures/{name}.tar.xz", folder, filter="data")
    return folder / name


def load_recipe(name):
    """Imports a recipe anew, without running it, as `recipe_NAME`: `evaluate` is also a library."""
    path = ROOT / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def kernel_choices(**changes) -> Iterator[None]:
    """Changes `kernels.choices` in the block."""
    before = kernels.choices
    kernels.choose(**changes)
    try:
        yield
    finally:
        kernels.choices = before


def run_recipe(name: str, *flags) -> None:
    """Runs a recipe's `main` in this process."""
    reset_accelerate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        patch.syspath_prepend(ROOT / "recipes")
        load_recipe(name).main()


def small_notebook() -> dict:
    """Returns the notebook with a small model, which reads `text.txt` of the working directory."""
    text = (ROOT / "recipes/notebook.ipynb").read_text()
    changes = {
        "tiny_shakespeare()": "open('text.txt').read()",
        "n_layer=6": "n_layer=1",
        "n_embd=384": "n_embd=24",
        "n_positions=256": "n_positions=32",
        "16 * 256 * 2": "1024",
        "else 50": "else 3",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return json.loads(text)


def as_flags(config: TrainConfig) -> list[str]:
    """Returns the settings as command-line flags."""
    flags = []
    for name, value in asdict(config).items():
        values = value if isinstance(value, list) else [value]
        if values and value is not None:
            flags += [f"--{name}", *map(str, values)]
    return flags


@pytest.fixture
def times():
    """A function `times(few, many)` that returns how often to try."""
    return lambda few, many: many if LONG else few


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a disk of some MiB. Skips the test if mounting is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", disk]
        if subprocess.run(command, check=False).returncode:
            pytest.skip("mounting a small file system takes root")
        return disk

    yield mount
    gc.collect()  # frees tensors that may still map a file of the disk
    if disk.is_mount():
        subprocess.run(["umount", disk], check=True)


def pytest_collection_finish():
    gc.freeze()  # excludes imported objects from garbage collection, which would be slow


@pytest.fixture(scope="session")
def gpt2():
    """GPT-2's BPE. Skips the test if it cannot be downloaded."""
    try:
        return gpt2_tokenizer()
    except OSError as error:
        pytest.skip(str(error))

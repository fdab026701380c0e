"""Uploads and downloads with the real Hub client, against the local server of `hub_server.py`."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from conftest import (
    as_flags,
    hellaswag_items,
    losses,
    metrics,
    refused,
    run,
    status,
)
from datasets import Dataset
from hub_server import TOKEN, Hub
from huggingface_hub import ModelCard
from launching import ROOT, python
from test_commands import BASELINES, ON_HUB, prepare_folder, run_command

from gpt2_accel import save_pretrained
from gpt2_accel.callbacks import Pushes
from gpt2_accel.checkpoint.find import named_checkpoint
from gpt2_accel.config import ARCHITECTURES
from gpt2_accel.evals.items import FILE, HELLASWAG
from gpt2_accel.hf import hub as hub_module
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.runtime import signals
from gpt2_accel.tokenizer import byte_tokenizer

SCRIPT = "tests/train_script.py"
REPO = "user/name"


@pytest.fixture
def server():
    with Hub() as hub:
        yield hub


@pytest.fixture
def here(server, monkeypatch):
    """Makes this process use the server, with short pauses between attempts."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(hub_module, "PAUSES", (0.01,) * 3)
    return server


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A server, and a function that runs Python as a logged-in user of it. All tests share them, since libraries read
    the server's address at import."""
    at_import = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path_factory.mktemp("home"))}

    def command(*arguments, start=python, **options):
        options |= {"at_import": at_import, "HF_TOKEN": TOKEN, "ACCELERATE_USE_CPU": "true"}
        done = start(*arguments, **options)
        assert TOKEN not in done.stdout + done.stderr
        return done

    with Hub() as hub:
        at_import["HF_ENDPOINT"] = hub.url
        yield hub, command


def test_push_load_resume_and_finetune_over_the_hub(tiny, user, tmp_path):
    server, command = user

    def succeed(*arguments):
        done = command(*arguments)
        return done.stdout + done.stderr

    settings = {"push_to_hub": REPO, "hub_strategy": "checkpoint", "save_every": 4}
    # The learning rate of a run ends with max_steps, so a run to be continued keeps it constant.
    settings |= {"lr_schedule": "constant", "eval_every": 4}
    config = tiny("run", **settings)
    said = succeed(SCRIPT, *as_flags(config))
    assert f"uploaded to {server.url}/{REPO}" in said
    assert server.repos[REPO]["private"]
    files = server.files(REPO)
    assert files["model.safetensors"] == (tmp_path / "run/model.safetensors").read_bytes()
    assert "last-checkpoint/training_state/optimizer.safetensors" in files
    assert b'name = "user/name"' in files["README.md"]
    for name, content in files.items():
        assert TOKEN.encode() not in content, name
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path
    assert not (tmp_path / "run/.uploads").exists()

    # It opens in transformers.
    script = tmp_path / "use.py"
    script.write_text(
        "from transformers import AutoModelForCausalLM, pipeline\n"
        f"print(type(AutoModelForCausalLM.from_pretrained('{REPO}')).__name__)\n"
        f"print(pipeline('text-generation', model='{REPO}')('the ')[0]['generated_text'])\n"
    )
    said = succeed(script)
    assert "GPT2LMHeadModel" in said and "the " in said

    # A resume from the Hub gives the losses of an uninterrupted run.
    more = {**settings, "max_steps": 12, "push_to_hub": None}
    config = tiny("elsewhere", resume_from=REPO, **more)
    succeed(SCRIPT, *as_flags(config))
    continued = metrics(tmp_path / "elsewhere")
    whole = run(tiny("whole", **more))
    assert losses(continued) == pytest.approx(losses(whole)[8:], abs=1e-6)

    # A fine-tuning run starts from a revision, and its model is pushed by the recipe.
    revision = f"{REPO}@{server.repos[REPO]['commits'][-1][0]}"
    config = tiny("tuned", init_from=revision)
    succeed(SCRIPT, *as_flags(config))
    tuned = metrics(tmp_path / "tuned")
    assert tuned[0]["train/loss"] < 4  # not a new model's 5.5
    push = ["recipes/push_to_hub.py", "--model", str(tmp_path / "tuned"), "--repo_id", "user/tuned"]
    assert f"{server.url}/user/tuned" in succeed(*push)
    pushed = server.files("user/tuned")
    assert pushed["model.safetensors"] == (tmp_path / "tuned/model.safetensors").read_bytes()
    assert "config.yaml" not in pushed and "metrics.jsonl" not in pushed
    assert b"base_model: user/name\n" in pushed["README.md"]
    if importlib.util.find_spec("matplotlib"):
        for content in (files, pushed):
            assert content["loss.png"].startswith(b"\x89PNG")
            assert b"\n![Loss](loss.png)\n" in content["README.md"]


def test_the_hub_commands_of_the_documentation_work(user, tmp_path, monkeypatch, capsys):
    server, command = user
    prepare_folder(tmp_path)
    prepare = "python recipes/prepare_data.py text my_texts/ --tokenizer bytes --workers 1"
    for folder in ("data/mine", "data/more"):  # of the quickstart, and what stands for OpenWebText
        command(prepare, f"--data_dir {folder}", start=run_command, cwd=tmp_path)
    questions = Dataset.from_list([{**item, "label": "1"} for item in hellaswag_items(2)])
    questions.to_parquet(tmp_path / "table.parquet")
    files = {FILE: (tmp_path / "table.parquet").read_bytes()}
    server.repos[HELLASWAG] = {"commits": [("a" * 40, files)]}
    shape = LlamaConfig(257, 128, 1, 2, n_kv_head=1, head_dim=8, n_embd=16, n_inner=32)
    save_pretrained(shape.build(), tmp_path / "base", byte_tokenizer())
    files = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    server.repos["HuggingFaceTB/SmolLM2-135M"] = {"commits": [("b" * 40, files)]}
    page = (ROOT / "docs/chat.md").read_text()
    write_data, use_model = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(write_data)
    for line, flags in ON_HUB.items():
        command(line, flags, start=run_command, cwd=tmp_path)
        if "push_to_hub" in line:
            pushed = server.repos["USER/NAME"]
            server.repos |= dict.fromkeys(BASELINES, pushed)
    exec(use_model)
    assert "'role': 'assistant'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([("POST", "/create", 401)] * 4, "could not upload to user/name .*hf auth login"),
        ([("POST", "/commit/", 500)] * 2, "uploaded to"),
        ([("POST", "/commit/", 500)] * 4, "could not upload to user/name .* and push again"),
        ([("PUT", "/lfs/", "cut")], "uploaded to"),
        ([("POST", "/commit/", "cut")], "uploaded to"),
    ],
)
def test_a_failing_upload_never_ends_the_run(tiny, here, capsys, faults, expected):
    here.faults += faults
    lines = run(tiny("run", push_to_hub=REPO, hub_strategy="end"))
    assert len(lines) == 8
    said = "".join(capsys.readouterr())
    assert re.search(expected, said), said
    assert not here.faults  # each happened
    uploaded = REPO in here.repos and "model.safetensors" in here.files(REPO)
    assert uploaded == (expected == "uploaded to")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_push_replaces_the_old_weights_and_checkpoint_only(tiny, here, tmp_path, architecture):
    old = {"model-00001-of-00002.safetensors", "last-checkpoint/notes.txt"}
    here.repos[REPO] = {"commits": [("0" * 40, dict.fromkeys([*old, "notes.md"], b""))]}
    config = tiny("run", push_to_hub=REPO, hub_strategy="checkpoint", architecture=architecture)
    run(config)
    files = here.files(REPO)
    assert json.loads(files["config.json"])["model_type"] == architecture
    assert f"- {architecture}\n".encode() in files["README.md"]
    assert "notes.md" in files and not {*old, "run.json", "status.json"} & files.keys()
    checkpoint = tmp_path / "run/checkpoint-8"
    sent = {path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file()}
    assert {f"last-checkpoint/{path}" for path in sent} < files.keys()


def test_uploads_run_in_the_background_and_skip_outdated_checkpoints(tiny, here, tmp_path):
    config = tiny("run", save_every=2, keep_last=9)
    run(config)
    checkpoints = [tmp_path / f"run/checkpoint-{step}" for step in (2, 4, 6, 8)]
    here.gate.clear()  # commits wait
    said = []
    pretended = SimpleNamespace(
        config=replace(config, push_to_hub=REPO),
        run_dir=tmp_path / "run",
        stop=SimpleNamespace(seconds_left=1.0),
        log=SimpleNamespace(print_line=said.append),
        accelerator=SimpleNamespace(is_main_process=True),
    )
    with Pushes() as pushes:
        pushes.on_train_begin(pretended)
        start = time.monotonic()
        for path in checkpoints:
            pushes.on_save(pretended, path)
            while not here.requests:  # until the first upload has started
                time.sleep(0.01)
        assert time.monotonic() - start < 2
        assert not any("uploaded" in line for line in said)
        for path in checkpoints:  # removed during the upload
            shutil.rmtree(path)
        here.gate.set()
    assert len(here.repos[REPO]["commits"]) == 3  # creation, first and last checkpoint
    assert sum("uploaded" in line for line in said) == 2


def ended(folder):
    return (folder / "status.json").exists() and status(folder)["state"] != "running"


@contextmanager
def signalled(when, *pauses):
    """Sends SIGTERM to this process once `when()` is true, and again after each pause. Yields the list of the times."""
    times, left = [], threading.Event()

    def send():
        while not when():
            if left.wait(0.01):
                return
        for pause in (0, *pauses):
            time.sleep(pause)
            times.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a late signal must not end pytest
    sender.start()
    try:
        yield times
    finally:
        left.set()
        sender.join()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("pauses, grace", [([], 1.0), ([1.0], 60.0)])
def test_a_complete_run_ends_soon_after_a_signal_if_the_hub_never_answers(
    tiny, here, tmp_path, capsys, monkeypatch, pauses, grace
):
    monkeypatch.setattr(signals, "GRACE", grace)
    here.hangs = "/api/"
    config = tiny("run", push_to_hub=REPO, hub_strategy="end")
    with signalled(lambda: ended(tmp_path / "run"), *pauses) as sent:
        assert len(run(config)) == 8
        assert time.monotonic() - sent[-1] < min(grace, 1) + 3
    found = status(tmp_path / "run")
    assert (found["state"], found["step"], found["requeue"]) == ("finished", 8, False)
    assert (tmp_path / "run/model.safetensors").is_file()
    assert not (tmp_path / "run/.uploads").exists()
    assert "user/name did not end in time" in capsys.readouterr().out


HELD = """
import sys
from pathlib import Path
from types import SimpleNamespace
from gpt2_accel.callbacks import Pushes
from gpt2_accel.config import TrainConfig

class Stop:
    seconds_left = property(lambda self: 0.0 if enough.exists() else 1.0)

folder, enough = Path(sys.argv[1]), Path(sys.argv[2])
config = TrainConfig(push_to_hub="user/name", hub_strategy="checkpoint")
run = SimpleNamespace(
    config=config, run_dir=folder, stop=Stop(),
    log=SimpleNamespace(print_line=print), accelerator=SimpleNamespace(is_main_process=True),
)
with Pushes() as pushes:
    pushes.on_train_begin(run)
    pushes.push(folder / "checkpoint-1", folder / "checkpoint-2")
"""


def test_a_process_exits_during_an_upload_that_hangs(tiny, server, tmp_path):
    run(tiny("run", save_every=1, max_steps=2))
    server.hangs = "PUT /lfs/"  # sent by the client's own threads, which the interpreter joins
    env = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, tmp_path / "run", tmp_path / "enough"], env=os.environ | env
    )
    try:
        ends = time.monotonic() + 60
        while len([r for r in server.requests if r.startswith("PUT /lfs/")]) < 2:
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        (tmp_path / "enough").touch()
        assert process.wait(10) == 0
    finally:
        process.kill()


def test_the_model_card_has_data_settings_and_results(tiny, tmp_path):
    run(tiny(eval_every=4))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    for part in (
        f"| val/loss | {metrics(tmp_path)[-1]['val/loss']:.4f} |",
        "34,720 parameters",
        "made up (7,333 tokens)",
        "Tokens seen: 1,024",
        "FLOPs in",
        "hours on 1 x cpu",
        "torch 2.",
        "learning_rate: 0.01",
        'pipeline("text-generation", model=name)',
    ):
        assert part in card.text, part
    script = tmp_path / "use.py"
    script.write_text(card.text.split("```python\n")[1].split("```")[0])
    done = python(script)
    assert done.stdout.startswith("Hi")


def test_a_repository_without_a_checkpoint_is_refused(here, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    here.repos[REPO] = {"commits": [("0" * 40, {"config.json": b"{}"})]}
    with refused("--resume_from user/name is not a checkpoint"):
        named_checkpoint(REPO)

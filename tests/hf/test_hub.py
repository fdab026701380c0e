"""Uploads and downloads with the real Hub client, against the local server of `hub_server.py`."""

import json
import random
import re
import threading

import huggingface_hub
import huggingface_hub.constants
import pytest
from conftest import as_flags, hellaswag_items, long, losses, metrics, reset_accelerate, run
from datasets import Dataset
from hub_server import TOKEN, Hub
from launching import ROOT, python, wait_for
from test_commands import BASELINES, ON_HUB, prepare_folder, run_command

from gpt2_accel import save_pretrained
from gpt2_accel.data.source import open_data, verify_data
from gpt2_accel.evals.items import FILE, HELLASWAG
from gpt2_accel.hf import hub as hub_module
from gpt2_accel.hf.chat_template import chat_tokenizer, with_rows
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.tokenizer import byte_tokenizer
from gpt2_accel.train import train

SCRIPT = "tests/train_script.py"
KILLING_SCRIPT = "tests/reliability/kill_at_operation.py"
REPO = "user/name"


@pytest.fixture
def server():
    with Hub() as hub:
        yield hub


@pytest.fixture
def here(server, monkeypatch):
    """Makes this process use the server, with short pauses between attempts."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(hub_module, "PAUSES", (0.01,) * 4)
    return server


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A server, and a function that runs Python as a logged-in user of it.

    All tests share them, since libraries read the server's address at import.
    """
    at_import = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path_factory.mktemp("home"))}

    def command(*arguments, start=python, **options):
        options |= {"at_import": at_import, "HF_TOKEN": TOKEN, "ACCELERATE_USE_CPU": "true"}
        done = start(*arguments, **options)
        assert TOKEN not in done.stdout + done.stderr
        return done

    with Hub() as hub:
        at_import["HF_ENDPOINT"] = hub.url
        yield hub, command


def test_a_pushed_run_is_loaded_resumed_and_finetuned(tiny, user, tmp_path):
    server, command = user

    def succeed(*arguments):
        done = command(*arguments)
        return done.stdout + done.stderr

    server.repos[REPO] = {"private": True, "commits": [("c" * 40, {})], "tags": {"step4": "c" * 40}}
    settings = {"push_to_hub": REPO, "hub_strategy": "checkpoint", "save_every": 4}
    settings |= {"hub_revisions": True}
    # The learning rate of a run ends with max_steps, so a run to be continued keeps it constant.
    settings |= {"lr_schedule": "constant", "eval_every": 4}
    config = tiny("run", **settings)
    succeed(SCRIPT, *as_flags(config))
    assert server.repos[REPO]["private"]
    files = server.files(REPO)
    assert files["model.safetensors"] == (tmp_path / "run/model.safetensors").read_bytes()
    assert "last-checkpoint/training_state/optimizer.safetensors" in files
    for name, content in files.items():
        assert TOKEN.encode() not in content, name
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path
    assert not (tmp_path / "run/.uploads").exists()

    # The card has the run's facts, no path of this machine, and code that opens the model.
    card = files["README.md"].decode()
    last = metrics(tmp_path / "run")[-1]
    for part in (
        "# run\n",
        f"| val/loss | {last['val/loss']:.4f} ± ",
        "34,720 parameters",
        "made up (7,333 tokens)",
        "Tokens seen: 1,024",
        "learning_rate: 0.01",
        "output_dir: run\n",
    ):
        assert part in card, part
    assert str(tmp_path) not in card
    script = tmp_path / "use.py"
    script.write_text(card.split("```python\n")[1].split("```")[0])
    assert succeed(script).startswith("Hi")

    # Each checkpoint is a revision with the position in the data; an earlier run had step4 too.
    for step in (4, 8):
        _, files = server.revision(REPO, f"step{step}")
        state = json.loads(files["state.json"])
        assert (state["step"], state["position"]["sequences"]) == (step, 4 * step)

    # A resume from the Hub gives the losses of an uninterrupted run.
    changes = settings | {"max_steps": 12, "push_to_hub": None, "hub_revisions": False}
    config = tiny("elsewhere", resume_from=f"{REPO}@step4", **changes)
    succeed(SCRIPT, *as_flags(config))
    continued = metrics(tmp_path / "elsewhere")
    uninterrupted = run(tiny("whole", **changes))
    assert losses(continued)[:3] == pytest.approx(losses(uninterrupted)[4:7], abs=1e-5)

    # A fine-tuning run starts from a revision, and its model is pushed by the recipe.
    config = tiny("tuned", init_from=f"{REPO}@step8")
    succeed(SCRIPT, *as_flags(config))
    tuned = metrics(tmp_path / "tuned")
    assert tuned[0]["train/loss"] < 4  # not a new model's 5.5
    push = ["recipes/push_to_hub.py", "--model", str(tmp_path / "tuned"), "--repo_id", "user/tuned"]
    assert f"{server.url}/user/tuned" in succeed(*push)
    pushed = server.files("user/tuned")
    assert pushed["model.safetensors"] == (tmp_path / "tuned/model.safetensors").read_bytes()
    assert "config.yaml" not in pushed
    assert "metrics.jsonl" not in pushed
    assert b"base_model: user/name\n" in pushed["README.md"]


@long
def test_the_hub_commands_of_the_documentation_work(user, tmp_path, monkeypatch, capsys):
    server, command = user
    prepare_folder(tmp_path)
    prepare = "python recipes/prepare_data.py text my_texts/ --tokenizer bytes --workers 1"
    for folder in ("data/mine", "data/more"):  # data/more stands for OpenWebText
        command(prepare, f"--data_dir {folder}", start=run_command, cwd=tmp_path)
    questions = Dataset.from_list([item | {"label": "1"} for item in hellaswag_items(2)])
    questions.to_parquet(tmp_path / "table.parquet")
    files = {FILE: (tmp_path / "table.parquet").read_bytes()}
    server.repos[HELLASWAG] = {"commits": [("a" * 40, files)]}
    shape = LlamaConfig(257, 128, 1, 2, n_kv_head=1, head_dim=8, n_embd=16, n_inner=32)
    save_pretrained(shape.build(), tmp_path / "text", byte_tokenizer())
    tokenizer = chat_tokenizer(tmp_path / "text")
    save_pretrained(with_rows(shape.build(), 257, len(tokenizer)), tmp_path / "base", tokenizer)
    files = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    server.repos["HuggingFaceTB/SmolLM2-135M-Instruct"] = {"commits": [("b" * 40, files)]}
    page = (ROOT / "docs/chat.md").read_text()
    write_data, use_model, *_ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(write_data, {})
    for line, flags in ON_HUB.items():
        command(line, flags, start=run_command, cwd=tmp_path)
        if "push_to_hub" in line:
            pushed = server.repos["USER/NAME"]
            server.repos |= dict.fromkeys(BASELINES, pushed)
    exec(use_model)
    assert "'role': 'assistant'" in capsys.readouterr().out


def test_prepared_data_is_sent_and_fetched_as_it_is(here, data_dir, tmp_path):
    data = {"repo_id": REPO, "repo_type": "dataset"}
    api = huggingface_hub.HfApi()
    api.create_repo(**data)
    api.upload_folder(**data, folder_path=data_dir)
    huggingface_hub.snapshot_download(**data, local_dir=tmp_path / "theirs")
    assert verify_data(tmp_path / "theirs") == verify_data(data_dir)
    assert open_data(tmp_path / "theirs").fingerprint == open_data(data_dir).fingerprint


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([("POST", "/create", 401)] * 4, "could not upload to user/name .*hf auth login"),
        ([("POST", "/commit/", 500)] * 2, "uploaded to"),
        ([("PUT", "/lfs/", "cut")], "uploaded to"),
    ],
)
def test_a_failing_upload_never_ends_the_run(tiny, here, capsys, faults, expected):
    here.faults += faults
    run(tiny("run", push_to_hub=REPO, hub_strategy="end"))
    output = "".join(capsys.readouterr())
    assert re.search(expected, output), output
    assert not here.faults  # each happened
    uploaded = REPO in here.repos and "model.safetensors" in here.files(REPO)
    assert uploaded == (expected == "uploaded to")


def test_revisions_that_the_hub_or_a_kill_prevented_are_pushed_later(tiny, user, tmp_path, times):
    """By the next save or the next start."""
    server, command = user
    settings = {"hub_strategy": "end", "hub_revisions": True, "save_every": 2, "keep_last": 1}
    server.faults += [("POST", "/commit/", 403)] * 4  # all attempts of the first push
    for moment in (0, *random.Random(0).sample(range(1, 60), times(2, 12))):
        repo = f"user/killed-{moment}"
        folder = tmp_path / str(moment)
        flags = as_flags(tiny(folder, push_to_hub=repo, resume_from="latest", **settings))
        command(KILLING_SCRIPT, moment, ".checkpoint-4.", SCRIPT, *flags, fails=None)
        command(SCRIPT, *flags)
        for step in (2, 4, 6, 8):
            _, files = server.revision(repo, f"step{step}")
            assert json.loads(files["state.json"])["step"] == step
        assert files["model.safetensors"] == server.files(repo)["model.safetensors"]
        assert not (folder / ".uploads").exists()


def test_a_push_replaces_the_old_weights_and_checkpoint_only(tiny, here, tmp_path):
    old = {"model-00001-of-00002.safetensors": b"", "last-checkpoint/notes.txt": b""}
    here.repos[REPO] = {"commits": [("0" * 40, old | {"notes.md": b""})]}
    config = tiny("run", push_to_hub=REPO, hub_strategy="checkpoint", architecture="qwen3")
    run(config)
    files = here.files(REPO)
    assert json.loads(files["config.json"])["model_type"] == "qwen3"
    assert b"- qwen3\n" in files["README.md"]
    assert b"checkpoint-8" not in files["README.md"]
    assert "notes.md" in files
    assert not (old.keys() | {"run.json", "status.json"}) & files.keys()
    checkpoint = tmp_path / "run/checkpoint-8"
    sent = {path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file()}
    assert {f"last-checkpoint/{path}" for path in sent} < files.keys()


def test_uploads_run_in_the_background_and_skip_outdated_checkpoints(tiny, here, capsys):
    """Of five saves the first is sent, although its checkpoint is removed meanwhile, and the last.

    The Hub answers after the last save.
    """

    class Gate:
        def on_step_end(self, run, skipped):
            if run.step == 5:
                wait_for(lambda: here.requests)

        def on_train_end(self, run, finished):
            assert "uploaded" not in capsys.readouterr().out
            threading.Timer(1, here.gate.set).start()

    here.gate.clear()  # commits wait
    reset_accelerate()
    settings = {"save_every": 2, "keep_last": 1, "hub_strategy": "every_save"}
    train(tiny("run", push_to_hub=REPO, **settings), callbacks=[Gate()])
    assert len(here.repos[REPO]["commits"]) == 3  # one is the creation
    assert capsys.readouterr().out.count("uploaded to") == 2

"""Resuming: the position in the data, changed settings, copied and complete runs."""

import math
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
from conftest import (
    assert_status,
    contents,
    losses,
    make_text,
    read_json,
    refused,
    run,
    weights_digest,
)

from gpt2_accel.checkpoint.find import (
    CHECKPOINT_MANIFEST,
    STATE,
    find_corruption,
    list_checkpoints,
    read_state,
)
from gpt2_accel.checkpoint.writer import CheckpointWriter, write_manifest
from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.prepare import prepare
from gpt2_accel.optim import learning_rate
from gpt2_accel.runtime import signals
from gpt2_accel.runtime.files import write_json
from gpt2_accel.tokenizer import byte_tokenizer


def test_resume_with_another_batch_size_keeps_the_data_position_and_the_token_schedule(
    tiny, monkeypatch
):
    run(tiny("run", max_steps=3, total_batch_size=128))
    read = []
    update = TrainLoader.update

    def watched(self, *args):
        read.append(args)
        return update(self, *args)

    monkeypatch.setattr(TrainLoader, "update", watched)
    changes = {"total_batch_size": 256, "max_steps": 4, "resume_from": "latest"}
    config = tiny("run", **changes)
    lines = run(config)
    # 3 updates read 12 sequences. 4 updates of the new size are 32: 3 more updates of 8.
    assert read == [(12, 8), (20, 8), (28, 8)]
    assert [line["tokens"] for line in lines[3:]] == [20 * 32, 28 * 32, 36 * 32]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    rates = [learning_rate(config, update) for update in (12 / 8, 20 / 8, 28 / 8)]
    assert [line["train/learning_rate"] for line in lines[3:]] == rates


def test_a_resume_refuses_other_data_another_shape_and_another_optimizer(tiny, tmp_path):
    run(tiny("run", max_steps=2))
    other = str(tmp_path / "other")
    config = tiny("run", resume_from="latest")
    texts = {"train": [make_text(500, 0)], "val": [make_text(500, 1)]}
    prepare(texts, byte_tokenizer(), other, source="other")
    changed = {"seed": 7, "sequence_length": 16, "data_dir": other}
    refusals = [({name: value}, name.removesuffix("_dir")) for name, value in changed.items()]
    refusals += [
        ({"n_layer": 3}, "n_layer 2 -> 3 .*original value"),
        ({"n_embd": 64}, "n_embd 32 -> 64"),
        ({"architecture": "llama"}, "architecture None -> llama"),
    ]
    for changes, words in refusals:
        with refused(words):
            run(replace(config, **changes))
    changed["ignore_changes"] = True
    assert len(run(replace(config, **changed))) == 8
    with refused("trained with AdamW, not Muon"):
        run(replace(config, **changed, optimizer="muon", max_steps=20))


def test_a_checkpoint_of_release_0_5_is_refused_with_the_release_that_finishes_it(tiny, tmp_path):
    run(tiny("run", max_steps=1))
    checkpoint = tmp_path / "run/checkpoint-1"
    path = checkpoint / STATE / "state.json"
    state = read_json(path)
    del state["version"]
    write_json(path, state)
    write_manifest(checkpoint, CHECKPOINT_MANIFEST, [f"{STATE}/state.json"])
    for name in ("latest", str(checkpoint)):
        with refused("older than release 0.6: resume it with release 0.6, or open it as a model"):
            run(tiny("run", max_steps=2, resume_from=name))
    assert read_state(checkpoint)["step"] == 1  # evaluate.py opens it as a model


def test_a_running_write_completes_after_an_error_in_the_next_update(
    tiny, tmp_path, monkeypatch, before_update
):
    def failing(step):
        if step == 2:
            raise RuntimeError("CUDA error")

    before_update(failing)
    write = CheckpointWriter._write
    monkeypatch.setattr(CheckpointWriter, "_write", lambda *args: time.sleep(0.5) or write(*args))
    with pytest.raises(RuntimeError, match="CUDA error"):
        run(tiny(save_every=2))
    [checkpoint] = list_checkpoints(tmp_path)
    assert checkpoint.name == "checkpoint-2"
    assert find_corruption(checkpoint) is None
    monkeypatch.undo()
    assert len(losses(run(tiny(resume_from="latest")))) == 8


def test_starting_a_complete_run_again_changes_no_file_and_refuses_other_settings(tiny, tmp_path):
    run(tiny(save_every=4))
    files = contents(tmp_path)
    for given, wrong in (("", False), ("log_every", False), ("max_steps learning_rate", True)):
        config = tiny(max_steps=4, learning_rate=0.1, log_every=2, resume_from="latest")
        config.given = frozenset(given.split())
        with refused("max_steps 8 -> 4 .*learning_rate 0.01 -> 0.1") if wrong else nullcontext():
            run(config)
        assert contents(tmp_path) == files


def test_a_resume_prints_what_it_changes_and_keeps_it_also_after_a_kill(
    tiny, tmp_path, before_update, monkeypatch, capsys
):
    run(tiny(save_every=8))

    def changes(folder="."):
        return read_json(tmp_path / folder / "run.json")["changes"]

    assert changes() == []
    longer = {"max_steps": 12, "dropout": 0.1, "document_mask": True, "resume_from": "latest"}
    before_update(lambda step: 1 / (step - 9))
    config = tiny(**longer, learning_rate=1e-3, log_every=2)
    with pytest.raises(ZeroDivisionError):  # the second update after the resume fails
        run(config)
    monkeypatch.undo()
    # Cosine from 0.01 was at its end, a tenth; 10 of 12 updates follow the warmup, 6 of them done.
    rate = 1e-3 * (0.1 + 0.9 * (1 + math.cos(0.6 * math.pi)) / 2)
    first = [
        "max_steps 8 -> 12 from update 8",
        "learning_rate 0.01 -> 0.001 from update 8",
        "document_mask False -> True from update 8",
        "dropout 0.0 -> 0.1 from update 8",
        f"the schedule's learning rate 0.001 -> {rate:.3g} from update 8",
    ]
    assert changes() == first
    capsys.readouterr()
    run(config)
    assert [line for line in capsys.readouterr().out.splitlines() if "->" in line] == first
    # A branch has the history of the run that it comes from.
    checkpoint = str(tmp_path / "checkpoint-12")
    run(tiny("branch", **longer | {"max_steps": 14, "resume_from": checkpoint}, learning_rate=1e-3))
    assert changes("branch")[:6] == first + ["max_steps 12 -> 14 from update 12"]


def test_a_complete_run_names_a_model_that_was_damaged_since_and_writes_it_again(tiny, tmp_path):
    config = tiny("run", resume_from="latest")
    run(config)
    model = tmp_path / "run/model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:5000])
    with refused("is complete, but .*: delete model.safetensors"):
        run(config)
    model.unlink()
    run(config)
    assert model.read_bytes() == whole


@pytest.mark.parametrize(("place", "replaced"), [("export_model", 0), ("write_manifest", 1)])
def test_a_run_killed_before_its_final_model_is_complete_goes_on(
    place, replaced, tiny, tmp_path, monkeypatch
):
    run(tiny(max_steps=4, save_every=4))
    old = weights_digest(tmp_path)
    manifest = tmp_path / "model.manifest.json"

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"gpt2_accel.lifecycle.{place}", killed)
    longer = tiny(max_steps=8, save_every=4, resume_from="latest")
    with pytest.raises(KeyboardInterrupt):
        run(longer)
    assert (weights_digest(tmp_path) != old) == (not manifest.exists()) == replaced
    monkeypatch.undo()
    run(longer)
    newest = weights_digest(tmp_path / "checkpoint-8")
    assert weights_digest(tmp_path) == newest != old
    assert newest in manifest.read_text()


def test_a_model_without_checkpoints_is_not_overwritten(tiny, tmp_path):
    config = tiny("run", max_steps=2, resume_from="latest")
    run(config)
    for path in list_checkpoints(tmp_path / "run"):
        shutil.rmtree(path)
    before = contents(tmp_path)
    for resume_from in (None, "latest"):
        with refused("holds a model but no checkpoint"):
            run(replace(config, resume_from=resume_from))
    assert contents(tmp_path) == before


def test_resume_with_fewer_max_steps_finishes_a_stopped_run(tiny, tmp_path):
    settings = {"lr_schedule": "constant", "resume_from": "latest"}
    config = tiny(max_steps=10**6, max_hours=1 / 3600, **settings)
    step = run(config)[-1]["step"]
    assert_status(tmp_path, state="stopped", reason="max_hours", requeue=True)
    assert not (tmp_path / "model.safetensors").exists()
    assert signals.exit_code == 0
    run(tiny(max_steps=1, **settings))
    assert_status(tmp_path, state="finished", step=step, requeue=False)
    newest = weights_digest(tmp_path / f"checkpoint-{step}")
    assert weights_digest(tmp_path) == newest

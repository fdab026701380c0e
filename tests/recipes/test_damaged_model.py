"""Recipes that take a model refuse a checkpoint whose files differ from its manifest."""

import hashlib
import shutil

import pytest
from conftest import read_json, refused, run, run_recipe

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.checkpoint.find import model_directory, verified_directory
from gpt2_accel.hf.hub import stage

# The command line of each recipe, for the model MODEL and the folder OUTPUT.
COMMANDS = {
    "sample": "--model MODEL --max_new_tokens 1 --num_samples 1",
    "evaluate": f"--model MODEL --tasks text --data {__file__} --output OUTPUT/evaluation.json",
    "push_to_hub": "--model MODEL --repo_id a/b",
    "demo": "--model MODEL",
}


def flip(path, position=-1) -> None:
    """Flips the lowest bit of a byte: by default of the last, in a weight's exponent."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.fixture
def checkpoint(trained, tmp_path):
    return shutil.copytree(trained / "checkpoint-250", tmp_path / "checkpoint-250")


def run_on(recipe, model, *flags) -> None:
    output = model.parent / "output"
    output.mkdir()
    words = COMMANDS[recipe].replace("OUTPUT", str(output)).replace("MODEL", str(model)).split()
    try:
        run_recipe(recipe, *words, *flags)
    finally:
        left = sorted(path.name for path in output.iterdir())
        shutil.rmtree(output)
    assert left or "OUTPUT" not in COMMANDS[recipe]


@pytest.mark.parametrize("recipe", COMMANDS)
def test_a_recipe_refuses_a_damaged_checkpoint_unless_told_not_to(recipe, checkpoint, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "unused")
    if recipe == "demo":
        pytest.importorskip("gradio")
    flip(checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match="is damaged: model.safetensors does not match") as error:
        run_on(recipe, checkpoint)
    assert str(checkpoint) in str(error.value) and "--verify false" in str(error.value)
    if recipe not in ("push_to_hub", "demo"):  # one needs a Hub, the other would not end
        run_on(recipe, checkpoint, "--verify", "false")


def test_only_the_files_of_the_model_are_read_and_only_a_checkpoint_is_checked(checkpoint):
    flip(checkpoint / "training_state/optimizer.safetensors")
    run_on("sample", checkpoint)
    flip(checkpoint / "model.safetensors")
    shutil.rmtree(checkpoint / "training_state")
    run_on("sample", checkpoint)


def test_a_final_model_with_other_weights_is_refused_and_other_files_may_change(
    trained, tmp_path, capsys
):
    left = shutil.ignore_patterns("checkpoint-*", "latest")
    model = shutil.copytree(trained, tmp_path / "model", ignore=left)
    names = ("model.safetensors", "config.json", "tokenizer.json")
    files = {name: (model / name).read_bytes() for name in names}
    assert read_json(model / "model.manifest.json")["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    stage(model, tmp_path / "staged", "a/b")
    assert not (tmp_path / "staged/model.manifest.json").exists()
    (model / "README.md").write_text("mine")
    assert (verified_directory(model), capsys.readouterr().err) == (model, "")
    for name in names[1:]:
        (model / name).write_bytes(files[name] + b" ")
        run_on("sample", model)
        assert capsys.readouterr().err.count(f"changed: {name} does not match") == 1
        (model / name).write_bytes(files[name])
    flip(model / names[0])
    with refused("damaged: model.safetensors .* in model.manifest.json"):
        run_on("sample", model)
    run_on("sample", model, "--verify", "false")
    save_pretrained(from_pretrained(model), model)
    assert verified_directory(model) == model


def test_training_refuses_a_damaged_checkpoint_to_start_from(tiny, checkpoint):
    flip(checkpoint / "model.safetensors")
    config = tiny("run", init_from=str(checkpoint), max_steps=1)
    with refused("is damaged: .*; use another checkpoint$"):
        run(config)
    assert model_directory(checkpoint) == checkpoint

"""Recipes that take a model refuse a checkpoint whose files differ from its manifest."""

import shutil

import pytest
from conftest import refused, run, run_recipe

from gpt2_accel import from_pretrained, save_pretrained
from gpt2_accel.checkpoint.find import verified_directory
from gpt2_accel.hf.hub import stage

# The command line of each recipe, for the model MODEL and the folder OUTPUT.
COMMANDS = {
    "sample": "--model MODEL --max_new_tokens 1 --num_samples 1",
    "evaluate": f"--model MODEL --tasks text --data {__file__} --output OUTPUT/evaluation.json",
    "push_to_hub": "--model MODEL --repo_id a/b",
    "demo": "--model MODEL",
}


def flip(path) -> None:
    """Flips the lowest bit of the last byte, in a weight's exponent."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture
def checkpoint(trained, tmp_path):
    return shutil.copytree(trained / "checkpoint-250", tmp_path / "checkpoint-250")


@pytest.mark.parametrize("recipe", COMMANDS)
def test_a_recipe_refuses_a_damaged_checkpoint_unless_told_not_to(
    recipe, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "unused")
    if recipe == "demo":
        pytest.importorskip("gradio")
    flip(checkpoint / "model.safetensors")
    words = COMMANDS[recipe].replace("OUTPUT", str(tmp_path)).replace("MODEL", str(checkpoint))
    with refused("is damaged: model.safetensors .*--verify false"):
        run_recipe(recipe, *words.split())
    if recipe not in ("push_to_hub", "demo"):  # one needs a Hub, the other would not end
        run_recipe(recipe, *words.split(), "--verify", "false")


def test_only_the_files_of_the_model_are_read_and_only_a_checkpoint_is_checked(checkpoint):
    flip(checkpoint / "training_state/optimizer.safetensors")
    assert verified_directory(checkpoint) == checkpoint
    flip(checkpoint / "model.safetensors")
    shutil.rmtree(checkpoint / "training_state")
    assert verified_directory(checkpoint) == checkpoint


def test_a_final_model_with_other_weights_is_refused_and_other_files_may_change(
    trained, tmp_path, capsys
):
    left = shutil.ignore_patterns("checkpoint-*", "latest")
    model = shutil.copytree(trained, tmp_path / "model", ignore=left)
    stage(model, tmp_path / "staged", "a/b")
    assert not (tmp_path / "staged/model.manifest.json").exists()
    (model / "README.md").write_text("mine")
    assert verified_directory(model) == model
    assert capsys.readouterr().err == ""
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    assert verified_directory(model) == model
    assert "config.json does not match" in capsys.readouterr().err
    flip(model / "model.safetensors")
    with refused("damaged: model.safetensors .* in model.manifest.json"):
        verified_directory(model)
    save_pretrained(from_pretrained(model), model)
    assert verified_directory(model) == model


def test_training_refuses_a_damaged_checkpoint_to_start_from(tiny, checkpoint):
    flip(checkpoint / "model.safetensors")
    with refused("is damaged"):
        run(tiny("run", init_from=str(checkpoint), max_steps=1))

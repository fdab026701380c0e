"""The names and paths in a model card."""

from dataclasses import replace

from conftest import run

from gpt2_accel.hf.hub import stage
from gpt2_accel.hf.model_card import Training, model_card

TRAINING = Training(
    settings={"data_dir": "/home/someone/secret/words", "output_dir": "runs/a", "max_steps": 8},
    data="play.txt, /home/someone/secret/play.txt (8 tokens)",
    tokens=8,
    hours=0.1,
    flops=1e6,
    hardware="1 x cpu",
    results={"val/loss": 2.5},
)


def test_the_card_has_the_checkpoints_name_and_on_the_hub_the_repositorys(tiny, tmp_path):
    run(tiny("run", save_every=4))
    card = (tmp_path / "run/checkpoint-4/README.md").read_text()
    assert "partial" not in card
    assert "# checkpoint-4\n" in card
    stage(tmp_path / "run/checkpoint-4", tmp_path / "upload", "me/my-gpt2")
    staged = (tmp_path / "upload/README.md").read_text()
    assert "# my-gpt2\n" in staged and '"me/my-gpt2"' in staged
    assert "checkpoint-4" not in staged
    assert (tmp_path / "run/checkpoint-4/README.md").read_text() == card


def test_the_card_names_the_servers_and_no_absolute_path():
    card = model_card("runs/a", "A GPT-2.", TRAINING)
    assert "/home" not in card
    assert "data_dir: words" in card and "output_dir: runs/a" in card
    assert "- Data: play.txt, play.txt (8 tokens)" in card
    assert "`transformers serve`" in card and "GGUF" in card
    local = replace(TRAINING, settings={"init_from": "/home/someone/model"})
    assert "/home" not in model_card("runs/a", "A GPT-2.", local)

"""The program of docs/checkpoints.md that averages checkpoints."""

import re

import torch
from conftest import run
from launching import ROOT
from transformers import AutoModelForCausalLM


def test_the_documented_average_is_the_mean_of_the_checkpoints(tiny, tmp_path):
    run(tiny("run", max_steps=2, save_every=1))
    page = (ROOT / "docs/checkpoints.md").read_text()
    [program] = re.findall(r"^```python\n(import torch\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    folders = [tmp_path / "run/checkpoint-1", tmp_path / "run/checkpoint-2", tmp_path / "average"]
    names = "runs/quickstart/checkpoint-750", "runs/quickstart/checkpoint-1000", "runs/average"
    for given, own in zip(names, folders, strict=True):
        assert program.count(given) == 1
        program = program.replace(given, str(own))
    exec(program, {})
    first, second, mean = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in folders)
    for name, tensor in mean.items():
        expected = (first[name].double() + second[name].double()) / 2
        assert torch.equal(tensor, expected.float()), name

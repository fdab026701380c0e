"""`export.py`: the mean of checkpoints, as transformers reads it."""

import math

import torch
from conftest import randomized, refused, run_recipe
from transformers import AutoModelForCausalLM

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.tokenizer import byte_tokenizer


def tensors_of(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return model.state_dict()


def test_the_average_is_the_mean_in_fp64_in_the_dtype_of_the_files(tmp_path):
    dtype = torch.bfloat16
    for step in (1, 2, 5, 10):
        model = randomized(GPT(GPTConfig(257, 32, 2, 2, 32, bias=step > 2))).to(dtype)
        save_pretrained(model, tmp_path / f"run/checkpoint-{step}", byte_tokenizer())
    flags = "--model", tmp_path / "run", "--average", 2, "--output", f"{tmp_path}/average/"
    run_recipe("export", *flags)
    used = [tensors_of(tmp_path / f"run/checkpoint-{step}") for step in (5, 10)]
    for name, tensor in tensors_of(tmp_path / "average").items():
        mean = sum(tensors[name].double() for tensors in used) / 2
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor, mean.to(dtype)), name
    with refused("exists already"):
        run_recipe("export", *flags)
    with refused("--keep_last 9$"):
        run_recipe("export", *flags[:3], 9, "--output", tmp_path / "other")
    next(model.parameters()).data.fill_(math.nan)
    save_pretrained(model, tmp_path / "run/checkpoint-11", byte_tokenizer())
    with refused("mean of .*checkpoint-10 to checkpoint-11 holds NaN"):
        run_recipe("export", *flags[:-1], tmp_path / "other")
    assert not (tmp_path / "other").exists()

"""`export.py`: the mean of checkpoints, as transformers reads it."""

import math

import torch
from conftest import randomized, refused, run, run_recipe
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
    next(model.parameters()).data.fill_(math.nan)
    save_pretrained(model, tmp_path / "run/checkpoint-11", byte_tokenizer())
    with refused("mean of .*checkpoint-10 to checkpoint-11 holds NaN"):
        run_recipe("export", *flags[:-1], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_checkpoints_of_a_run_are_averaged_if_there_are_enough(tiny, tmp_path):
    run(tiny("run", max_steps=2, save_every=1))
    flags = "--model", tmp_path / "run", "--output", tmp_path / "average", "--average"
    with refused("--keep_last 3$"):
        run_recipe("export", *flags, 3)
    assert not (tmp_path / "average").exists()
    run_recipe("export", *flags, 2)
    assert tensors_of(tmp_path / "average")

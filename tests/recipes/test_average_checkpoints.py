"""`recipes/average_checkpoints.py`: equal to a plain average of transformers' models, and a directory like any other."""

import json

import pytest
import torch
from conftest import peak_of, run, tiny_config
from launching import python
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.hf.average import average
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import byte_tokenizer, fingerprint, load_tokenizer

CONFIGS = {
    "gpt2": GPTConfig(257, 32, 2, 2, 32),
    "gpt2 without biases": GPTConfig(257, 32, 2, 2, 32, bias=False),
    "qwen3": Qwen3Config(257, 32, 2, 4, 2, 8, 32, 48, tied=False),
}
INPUT_IDS = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))
WEIGHTS = "model.safetensors"


def write(folder, config=CONFIGS["gpt2"], dtype=torch.float32):
    """Writes a model directory with random weights, some of them -0.0."""
    model = config.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) / 10
            parameter[0] = -0.0
    save_pretrained(model.to(dtype), folder, byte_tokenizer())
    return folder


def read(folder, dtype="auto"):
    """Returns what transformers loads from a directory, which must have exactly the tensors of its config."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not any(loading.values())
    return model.eval()


def average_of(*models, output):
    return python("recipes/average_checkpoints.py", *models, "--output_dir", output)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_average_equals_that_of_transformers_models(config, tmp_path):
    folders = [write(tmp_path / name, config) for name in "abc"]
    done = average_of(*folders, output=tmp_path / "average")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.endswith(f"is in {tmp_path / 'average'}.\n")
    found, *models = (read(folder) for folder in (tmp_path / "average", *folders))
    expected = models[0]
    states = [model.state_dict() for model in models]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    expected.load_state_dict(mean)
    torch.testing.assert_close(found.state_dict(), mean, atol=1e-7, rtol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(found(INPUT_IDS).logits, expected(INPUT_IDS).logits)
    files, expected_files = (
        {path.name for path in folder.iterdir()} for folder in (tmp_path / "average", folders[0])
    )
    assert files == expected_files
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        ours, first = (
            json.loads((folder / name).read_text()) for folder in (tmp_path / "average", folders[0])
        )
        assert ours == first
    assert fingerprint(load_tokenizer(tmp_path / "average")) == fingerprint(byte_tokenizer())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_averaged_with_itself_keeps_its_bytes(config, dtype, tmp_path):
    folder = write(tmp_path / "a", config, dtype)
    save_pretrained(average([folder] * 3), tmp_path / "average", byte_tokenizer())
    assert (tmp_path / "average" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_the_average_has_the_dtype_of_the_first_and_is_rounded_once(tmp_path):
    folders = [
        write(tmp_path / str(dtype), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    ]
    states = [load_file(folder / WEIGHTS) for folder in folders]
    for first in (0, 1):
        output = tmp_path / f"average {first}"
        save_pretrained(average([folders[first], folders[1 - first]]), output)
        found = load_file(output / WEIGHTS)
        for name, tensor in states[first].items():
            mean = (states[0][name].double() + states[1][name].double()) / 2
            assert torch.equal(found[name], mean.to(tensor.dtype))
        assert read(output).dtype == states[first]["transformer.wte.weight"].dtype


def test_other_layouts_of_the_same_tensors_average(tmp_path):
    """The files of OpenAI's models lack the prefix and have the tied head; large models are sharded."""
    plain, other = write(tmp_path / "plain"), write(tmp_path / "other")
    expected = average([plain, other]).state_dict()
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(other / WEIGHTS).items()
    }
    save_file({**tensors, "lm_head.weight": tensors["wte.weight"].clone()}, other / WEIGHTS)
    read(plain).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert not (tmp_path / "shards" / WEIGHTS).exists()
    found = average([tmp_path / "shards", other]).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value, tmp_path):
    folders = [write(tmp_path / name) for name in "abc"]
    tensors = load_file(folders[1] / WEIGHTS)
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 4] = value
    save_file(tensors, folders[1] / WEIGHTS, {"format": "pt"})
    done = average_of(*folders, output=tmp_path / "average")
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and not (tmp_path / "average").exists()
    assert f"h.1.mlp.c_fc.weight in {folders[1]} holds NaN or infinite weights" in line


def test_another_architecture_is_refused(tmp_path):
    folders = [write(tmp_path / name, CONFIGS[name]) for name in ("gpt2", "qwen3")]
    done = average_of(*folders, output=tmp_path / "average")
    assert done.returncode == 1 and not (tmp_path / "average").exists()
    assert done.stderr == (
        f"average_checkpoints.py: {folders[1]} is a model of another shape than {folders[0]} (Qwen3, not GPT-2): "
        "average models of one shape\n"
    )


def test_checkpoints_of_a_run_average_and_every_recipe_takes_the_result(data_dir, tmp_path):
    flags = {"save_every": 2, "keep_last": 9, "lr_schedule": "constant", "max_steps": 6}
    trained, output = tmp_path / "run", tmp_path / "average"
    run(tiny_config(data_dir, trained, **flags))
    done = average_of(trained / "checkpoint-2", trained / "latest", trained, output=output)
    assert done.returncode == 0, done.stderr
    found = load_file(output / WEIGHTS)
    first, last = (load_file(trained / name / WEIGHTS) for name in ("checkpoint-2", "checkpoint-6"))
    for name, tensor in found.items():
        mean = (first[name].double() + 2 * last[name].double()) / 3
        assert torch.equal(tensor, mean.float())

    done = python("recipes/sample.py", "--model", output, "--prompt", "the ", "--num_samples", 1)
    assert done.returncode == 0 and "the " in done.stdout, done.stderr
    done = python("recipes/evaluate.py", "--model", output, "--data_dir", data_dir)
    assert done.returncode == 0 and "evaluation.json" in done.stdout, done.stderr
    metrics = run(tiny_config(data_dir, tmp_path / "next", init_from=str(output), max_steps=1))
    assert metrics[0]["train/loss"] < 5.4  # log(257) is 5.55

    again = average_of(trained, trained, output=output)
    assert again.returncode == 1 and f"{output} exists already" in again.stderr
    assert load_file(output / WEIGHTS).keys() == found.keys()


def test_the_average_takes_the_memory_of_one_model_and_one_tensor(tmp_path):
    config = GPTConfig(1000, n_layer=8, n_head=8, n_embd=512)  # 105 MB
    model = GPT(config)
    size = sum(parameter.nbytes for parameter in model.parameters())
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        save_pretrained(model, folder)
    del model
    assert peak_of(average, folders) < 1.3 * size

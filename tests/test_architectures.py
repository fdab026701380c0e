"""Training, resuming and reading runs of the other architectures."""

import pytest
from conftest import as_flags, long, losses, metrics, read_json, run, tiny_config, weights_digest
from launching import sharded
from transformers import pipeline

from gpt2_accel.generation.sampling import Sampling, complete, load
from gpt2_accel.tools.report import RunFolder, write_report

SIZES = {"n_embd": 48, "n_head": 6}


@pytest.fixture(params=["llama", "qwen3", "nanochat"], scope="module")
def architecture(request):
    return request.param


MASKED = {"optimizer": "muon", "document_mask": True, "checkpoint_activations": True}


@pytest.fixture(scope="module")
def trained(architecture, data_dir, tmp_path_factory):
    """The folder of a run with Muon and a document mask, that saves in its middle."""
    folder = tmp_path_factory.mktemp(architecture) / "run"
    changes = SIZES | MASKED | {"architecture": architecture, "save_every": 4}
    run(tiny_config(data_dir, folder, **changes))
    return folder


def test_training_lowers_the_loss_and_resumes_to_the_bit(tiny, architecture, trained, tmp_path):
    uninterrupted = losses(metrics(trained))
    assert uninterrupted[-1] < uninterrupted[0] - 0.3
    changes = SIZES | MASKED | {"architecture": architecture, "save_every": 4}
    resumed = run(tiny("again", resume_from=str(trained / "checkpoint-4"), **changes))
    assert losses(resumed) == uninterrupted[4:]
    assert weights_digest(tmp_path / "again") == weights_digest(trained)


def test_final_model_opens_everywhere(architecture, trained):
    assert read_json(trained / "config.json")["model_type"] == architecture
    generator = pipeline("text-generation", model=str(trained))
    text = generator("the ", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    model, tokenizer = load(str(trained))
    [sample] = complete(model, tokenizer, ["the "], Sampling(8, temperature=0.0, num_samples=1))
    assert sample.prompt + sample.text == text
    assert write_report([RunFolder(trained)], trained / "report").exists()


@long
def test_sharded_training_equals_training_on_one_process(tiny, architecture, tmp_path):
    changes = {"max_steps": 4, "total_batch_size": 8 * 32, "architecture": architecture} | SIZES
    sharded("tests/fsdp_script.py", *as_flags(tiny("sharded", **changes)))
    alone = losses(run(tiny("one", **changes)))
    assert losses(metrics(tmp_path / "sharded")) == pytest.approx(alone, abs=1e-5)

"""Complete runs in the test process."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import assert_status, losses, refused, reset_accelerate, run
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_accel import from_pretrained
from gpt2_accel.data.loader import Windows
from gpt2_accel.data.shards import TokenStream
from gpt2_accel.models.gpt2 import Block
from gpt2_accel.train import train


def test_the_first_losses_equal_the_recorded_ones(tiny):
    expected = [5.57317, 5.29115, 4.99966]  # with AdamW, fp32 on a CPU
    assert losses(run(tiny()))[:3] == pytest.approx(expected, abs=2e-5)


def test_validation_covers_every_window_and_bits_per_byte_counts_text_bytes(
    tiny, data_dir, tmp_path
):
    last = run(tiny(eval_every=4))[-1]
    stream = TokenStream(data_dir, "val")
    source = Windows(stream, 32)
    windows = [source[number] for number in range(len(source))]
    input_ids, targets, _ = torch.from_numpy(np.stack(windows, axis=1))
    with torch.no_grad():
        loss = from_pretrained(tmp_path)(input_ids, targets).item()
    assert last["val/loss"] == pytest.approx(loss, abs=1e-5)
    assert last["val/perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    bits = loss / math.log(2) * stream.tokens / stream.bytes
    assert last["val/bits_per_byte"] == pytest.approx(bits, abs=1e-5)


def test_evaluation_turns_dropout_off_and_training_turns_it_on(tiny):
    settings = {"learning_rate": 0.0, "max_steps": 2, "eval_every": 1, "eval_tokens": 512}
    plain = run(tiny("plain", **settings))
    dropped = run(tiny("dropped", dropout=0.5, **settings))
    for line, expected in zip(dropped, plain, strict=True):
        assert line["val/loss"] == pytest.approx(expected["val/loss"], abs=1e-6)
        assert abs(line["train/loss"] - expected["train/loss"]) > 1e-4


def test_the_residual_stream_has_its_dtype(tiny, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    seen = set()
    forward = Block.forward

    def noted(self, x, *inputs):
        if self.training:
            seen.add(x.dtype)
        return forward(self, x, *inputs)

    monkeypatch.setattr(Block, "forward", noted)
    wide = losses(run(tiny("wide", max_steps=2)))
    assert seen == {torch.float32}
    seen.clear()
    config = tiny("run", max_steps=2, save_every=1, residual_dtype="bfloat16")
    narrow = losses(run(config))
    assert seen == {torch.bfloat16}
    assert narrow == pytest.approx(wide, abs=0.02)


def test_compiled_equals_eager_and_sampling_does_not_recompile(tiny, tmp_path, monkeypatch):
    settings = {"eval_every": 2, "sample_every": 2, "sample_tokens": 40, "save_every": 2}
    settings["max_steps"] = 4
    eager = run(tiny("eager", **settings))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    compiled = run(tiny("compiled", **settings))
    assert losses(compiled) == pytest.approx(losses(eager), abs=1e-5)
    assert compiled[-1]["val/loss"] == pytest.approx(eager[-1]["val/loss"], abs=1e-5)
    # One graph for training, one for evaluation, none for the 2 x 40 lengths of sampling.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    keys = load_file(tmp_path / "compiled/checkpoint-4/model.safetensors").keys()
    assert keys == load_file(tmp_path / "eager/checkpoint-4/model.safetensors").keys()
    # A compiled run resumes eagerly.
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND")
    from_compiled = tmp_path / "compiled/checkpoint-2"
    resumed = run(tiny("r", resume_from=str(from_compiled), **settings))
    assert losses(resumed) == pytest.approx(losses(eager)[2:], abs=1e-5)


def test_bf16_comes_from_accelerate_and_weights_stay_fp32(tiny, tmp_path, monkeypatch):
    fp32 = losses(run(tiny("fp32")))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    bf16 = losses(run(tiny("bf16")))
    # Saving, evaluating and sampling do not change the precision of training.
    often = {"save_every": 2, "eval_every": 2, "sample_every": 2, "sample_tokens": 5}
    assert losses(run(tiny("often", **often))) == bf16
    assert bf16[:3] == pytest.approx(fp32[:3], abs=8 * 2**-8)
    assert bf16 != fp32
    tensors = load_file(tmp_path / "bf16/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_training_starts_from_an_hf_gpt2(tiny, tmp_path):
    shape = {"vocab_size": 257, "n_positions": 64, "n_layer": 1, "n_head": 2, "n_embd": 32}
    hf = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=256, eos_token_id=256))
    hf.save_pretrained(tmp_path / "hf")
    config = tiny("run", init_from=str(tmp_path / "hf"))
    assert losses(run(config))[0] == pytest.approx(math.log(257), abs=0.1)
    assert from_pretrained(tmp_path / "run").config.n_positions == 64
    for change in ({"sequence_length": 128}, {"architecture": "qwen3"}):
        with refused("|".join(change) + "|n_layer"):
            run(replace(config, output_dir=str(tmp_path / "new"), **change))


def test_without_a_cpp_compiler_it_runs_uncompiled_with_a_warning(tiny, monkeypatch, capsys):
    eager = run(tiny("eager"))
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert losses(run(tiny("run"))) == losses(eager)
    assert "no C++ compiler found" in capsys.readouterr().out


def test_a_stop_ends_samples_between_tokens(tiny, tmp_path):
    class Stop:
        def on_step_end(self, run, skipped):
            run.request_stop("test")

    reset_accelerate()
    config = tiny("run", sample_every=1, sample_tokens=10**9)
    assert not train(config, callbacks=[Stop()])
    assert_status(tmp_path / "run", state="stopped", reason="test")
    assert (tmp_path / "run/samples.jsonl").read_text() == ""

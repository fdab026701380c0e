"""The memory estimate of a micro-batch."""

import json
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from conftest import refused, reset_accelerate, run
from families import save_family
from torch._dynamo.testing import CompileCounter

from gpt2_accel.config import TrainConfig
from gpt2_accel.estimate import memory
from gpt2_accel.estimate.dry_run import estimate_run
from gpt2_accel.estimate.memory import fitting_batch_size, model_shape, planned_model
from gpt2_accel.models.gpt2 import GPTConfig
from gpt2_accel.runtime.device import OVERRIDES
from gpt2_accel.train import next_token_loss, train


@torch._dynamo.config.patch(recompile_limit=8)
def test_trials_of_a_compiled_model_stay_below_the_recompile_limit(monkeypatch):
    """A batch of 60 sequences has 12 divisors, and Dynamo compiles a static model 8 times only."""
    monkeypatch.setenv(OVERRIDES, json.dumps({"reports_out_of_memory": True}))
    torch._dynamo.reset()
    plain = GPTConfig(vocab_size=128, n_positions=8, n_layer=1, n_head=1, n_embd=16).build()
    forward = plain.wte.forward
    there = []

    def limited(input_ids):
        there.append(all(parameter.grad is not None for parameter in plain.parameters()))
        if len(input_ids) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids)

    monkeypatch.setattr(plain.wte, "forward", torch.compiler.disable(limited))
    counter = CompileCounter()
    model = torch.compile(plain, backend=counter, dynamic=False)
    config = TrainConfig(sequence_length=8, n_positions=8, total_batch_size=60 * 8)
    assert fitting_batch_size(config, Accelerator(cpu=True), model, next_token_loss) == 20
    assert all(there), "a trial had no gradients, which the second micro-batch of an update has"
    compiled = counter.frame_count
    tokens = torch.zeros(20, 8, dtype=torch.int64)
    model(tokens, tokens)
    assert counter.frame_count == compiled, "the size that fits was compiled twice"
    assert all(parameter.grad is None for parameter in plain.parameters())


@pytest.mark.parametrize(("lora", "dtype"), [(4, "bfloat16"), (0, "float32")])
def test_the_planned_state_is_that_of_a_run(lora, dtype, tiny, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    start = str(save_family("smollm3", tmp_path / "start"))
    measured = {}
    trained = "adapter" if lora else "weights"

    class Measure:
        def on_step_end(self, run, skipped):
            frozen = f"frozen {dtype} weights"
            measured.update({frozen: 0, trained: 0, "optimizer": 0})
            for parameter in run.model.parameters():
                measured[trained if parameter.requires_grad else frozen] += parameter.nbytes
            for state in run.optimizer.state.values():
                for value in state.values():
                    if value.ndim:  # a moment, not the number of updates
                        measured["optimizer"] += value.nbytes

    config = tiny("run", init_from=start, lora=lora, dtype=dtype, max_steps=1)
    reset_accelerate()
    train(config, callbacks=[Measure()])
    launch = memory.Launch(1, "no", False, False)
    state = memory.state_bytes(config, planned_model(config, model_shape(config, 257)), launch)
    assert state.pop("gradients") == state[trained]
    assert state.pop("checkpoint") == 0
    assert state == measured
    assert ("adapter " in estimate_run(replace(config, dry_run=["cpu"]))) is bool(lora)
    monkeypatch.setenv(OVERRIDES, json.dumps({"free_memory": 0}))
    with refused("not even a micro-batch of one sequence .*; .*optimizer [^;]*$"):
        run(replace(config, micro_batch_size=0, output_dir=str(tmp_path / "auto")))

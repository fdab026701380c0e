"""FSDP2 in bf16 is as exact as DDP in bf16."""

import pytest
import torch
from conftest import as_flags, long, losses, metrics, tiny_config
from launching import launch
from safetensors.torch import load_file

DDP = ("8xa100", "tests/train_script.py")
FSDP = ("8xa100_fsdp2", "tests/fsdp_script.py")
CHUNKS = {"LOGITS_AT_ONCE": str(10 * 384)}  # 10 of the 32 rows of a micro-batch
EAGER = ("--dynamo_backend", "no")
BY_BLOCK = ("--dynamo_backend", "aot_eager", "--dynamo_use_regional_compilation")


@pytest.fixture(scope="module")
def trained(data_dir, tmp_path_factory):
    """A function that trains two updates of 16 micro-batches each on two processes. It returns the lines of
    metrics.jsonl and AdamW's first moment after the first update, a tenth of its gradient."""
    folder = tmp_path_factory.mktemp("fsdp")

    def train(name, config, script, *flags, **changes):
        settings = {"micro_batch_size": 1, "total_batch_size": 32 * 32, "max_steps": 2}
        settings |= {"warmup_steps": 0, "learning_rate": 1e-3, "save_every": 1, "eval_every": 2}
        run_config = tiny_config(data_dir, folder / name, **settings, **changes)
        launch(*flags, script, *as_flags(run_config), processes=2, config=config, **CHUNKS)
        state = load_file(folder / name / "checkpoint-1/training_state/optimizer.safetensors")
        gradient = {key: value for key, value in state.items() if key.endswith("/exp_avg")}
        return metrics(folder / name), gradient

    return train


def error(gradient, exact):
    """Returns the distance of two gradients relative to the norm of `exact`."""
    distance = sum((gradient[key] - exact[key]).square().sum() for key in exact)
    return float((distance / sum(value.square().sum() for value in exact.values())).sqrt())


def test_loss_and_gradients_in_bf16_are_as_exact_as_with_ddp(trained):
    _, exact = trained("exact", *DDP, "--mixed_precision", "no", *EAGER)
    lines, gradient = trained("ddp", *DDP, *EAGER)
    sharded, sharded_gradient = trained("fsdp", *FSDP, *EAGER)
    assert losses(sharded) == pytest.approx(losses(lines), abs=2e-3)
    assert sharded[-1]["val/loss"] == pytest.approx(lines[-1]["val/loss"], abs=2e-3)
    assert 0 < error(gradient, exact) < 0.02
    assert error(sharded_gradient, exact) < 1.3 * error(gradient, exact)


def test_muon_trains_and_resumes_as_with_ddp(data_dir, tmp_path):
    """In fp32: equal losses, a resume to the last bit, and resumes from and to DDP."""
    settings = {"optimizer": "muon", "lr_schedule": "constant", "max_steps": 30, "save_every": 15}

    def train(name, how, **changes):
        config, script = how
        run = tiny_config(data_dir, tmp_path / name, **settings, **changes)
        flags = ("--mixed_precision", "no", *EAGER, script, *as_flags(run))
        launch(*flags, processes=2, config=config)
        return losses(metrics(tmp_path / name)), load_file(tmp_path / name / "model.safetensors")

    ddp, _ = train("ddp", DDP)
    fsdp, whole = train("fsdp", FSDP)
    assert fsdp == pytest.approx(ddp, abs=1e-4)
    _, resumed = train("resumed", FSDP, resume_from=str(tmp_path / "fsdp/checkpoint-15"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for name, how, other in (("from_ddp", FSDP, "ddp"), ("to_ddp", DDP, "fsdp")):
        found, _ = train(name, how, resume_from=str(tmp_path / other / "checkpoint-15"))
        assert found == pytest.approx(ddp[-len(found) :], abs=1e-4)


@long
def test_compiled_blocks_give_the_losses_of_eager_ones(trained):
    for name, how in (("fsdp", FSDP), ("ddp", DDP)):
        eager, _ = trained(f"{name}_eager", *how, *EAGER)
        by_block, _ = trained(f"{name}_by_block", *how, *BY_BLOCK)
        assert losses(by_block) == pytest.approx(losses(eager), abs=2e-3)

"""FSDP2 in bf16 is as exact as DDP in bf16, and communicates as little as it can."""

import functools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import as_flags, long, losses, metrics, reset_accelerate, tiny_config
from launching import allow_fsdp_on_cpus, launch, launch_flags, launched
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2_accel import GPTConfig
from gpt2_accel.config import TrainConfig
from gpt2_accel.data.loader import Batch
from gpt2_accel.optim import build_optimizer
from gpt2_accel.run import Run
from gpt2_accel.runtime.accelerator import build_accelerator, prepare_model
from gpt2_accel.train import accumulate_gradients, next_token_loss

DDP = ("8xa100", "tests/train_script.py")
FSDP = ("8xa100_fsdp2", "tests/fsdp_script.py")
CHUNKS = {"LOGITS_AT_ONCE": str(10 * 384)}  # 10 of the 32 rows of a micro-batch
EAGER = ("--dynamo_backend", "no")
BY_BLOCK = ("--dynamo_backend", "aot_eager", "--dynamo_use_regional_compilation")


@pytest.fixture(scope="module")
def trained(data_dir, tmp_path_factory):
    """A function that trains two updates of 16 micro-batches on two processes.

    It returns the lines of metrics.jsonl and AdamW's first moment after the first update, which is
    a tenth of the gradient.
    """
    folder = tmp_path_factory.mktemp("fsdp")

    def train(name, config, script, *flags):
        settings = {"micro_batch_size": 1, "total_batch_size": 32 * 32, "max_steps": 2}
        settings |= {"warmup_steps": 0, "learning_rate": 1e-3, "save_every": 1, "eval_every": 2}
        run_config = tiny_config(data_dir, folder / name, **settings)
        launch(*flags, script, *as_flags(run_config), processes=2, config=config, **CHUNKS)
        state = load_file(folder / name / "checkpoint-1/training_state/optimizer.safetensors")
        gradient = {key: value for key, value in state.items() if key.endswith("/exp_avg")}
        return metrics(folder / name), gradient

    return train


def error(gradient, exact):
    """Returns the distance of two gradients relative to the norm of `exact`."""
    distance = sum((gradient[key] - exact[key]).square().sum() for key in exact)
    return float((distance / sum(value.square().sum() for value in exact.values())).sqrt())


@long
def test_loss_and_gradients_in_bf16_are_as_exact_as_with_ddp(trained):
    _, exact = trained("exact", *DDP, "--mixed_precision", "no", *EAGER)
    lines, gradient = trained("ddp", *DDP, *EAGER)
    sharded, sharded_gradient = trained("fsdp", *FSDP, *EAGER)
    assert losses(sharded) == pytest.approx(losses(lines), abs=2e-3)
    assert sharded[-1]["val/loss"] == pytest.approx(lines[-1]["val/loss"], abs=2e-3)
    assert 0 < error(gradient, exact) < 0.02
    assert error(sharded_gradient, exact) < 1.3 * error(gradient, exact)


@long
def test_compiled_blocks_give_the_losses_of_eager_ones(trained):
    for name, how in (("fsdp", FSDP), ("ddp", DDP)):
        eager, _ = trained(f"{name}_eager", *how, *EAGER)
        by_block, _ = trained(f"{name}_by_block", *how, *BY_BLOCK)
        assert losses(by_block) == pytest.approx(losses(eager), abs=2e-3)


SHAPE = {"vocab_size": 257, "n_positions": 20, "n_layer": 3, "n_head": 2, "n_embd": 24}
GPT2 = GPTConfig(**SHAPE)


@pytest.fixture
def sharded(monkeypatch):
    """A function that prepares a model with FSDP2 for rank 0 of eight, on the CPU.

    The other ranks do not exist: collectives of torch's fake process group return at once.
    """

    def build(config):
        reset_accelerate()
        flags = launch_flags(*EAGER, "", processes=8, config="8xa100_fsdp2")
        _, environments = launched(*flags)
        for name, value in environments[0].items():
            monkeypatch.setenv(name, value)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        allow_fsdp_on_cpus()
        accelerator = build_accelerator()
        model = config.build()
        return accelerator, *prepare_model(
            accelerator, model, build_optimizer(model, TrainConfig(learning_rate=1e-3))
        )

    yield build
    dist.destroy_process_group()
    reset_accelerate()


class Collectives(TorchDispatchMode):
    """Counts the collectives of each kind."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def collectives(accelerator, model, micro_batches):
    """Makes the micro-batches of one update; returns the number of its collectives by kind."""
    ids = torch.zeros(2, SHAPE["n_positions"], dtype=torch.int64)
    batches = [Batch(ids, ids, divisor=micro_batches)] * micro_batches
    run = SimpleNamespace(model=model, accelerator=accelerator, objective=next_token_loss)
    run.backward = functools.partial(Run.backward, run)
    with Collectives() as mode:
        accumulate_gradients(run, batches)
    return mode.counts


def test_only_the_last_micro_batch_reduces_gradients(sharded):
    """Each block is gathered and reduced as one, and so are the root and the final norm.

    Only blocks are gathered again for the backward pass.
    """
    accelerator, model, optimizer = sharded(GPT2)
    units = GPT2.n_layer + 2
    gathers = units + GPT2.n_layer
    for micro_batches in (4, 2):
        expected = {"allgather_base": micro_batches * gathers, "reduce_scatter_base": units}
        assert collectives(accelerator, model, micro_batches) == expected
        optimizer.step()
        optimizer.zero_grad()

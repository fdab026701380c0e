"""Compares Muon's updates of replicated and of FSDP2's weights with those of one process, in fp32.

Rank 0 prints for each model, as JSON, how many matrices each rank orthogonalizes (with FSDP2 the
parameters, each a stack of matrices) and the size of its optimizer state.
"""

import copy
import json
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpt2_accel import GPTConfig, cli, optim
from gpt2_accel.config import TrainConfig
from gpt2_accel.models.llama import LlamaConfig
from gpt2_accel.optim import muon
from gpt2_accel.runtime.device import full_tensor

# 5 ranks divide no number of rows.
SHAPE = {"vocab_size": 64, "n_positions": 16, "n_layer": 3, "n_head": 3, "n_embd": 33}
SHAPES = {
    "GPT": GPTConfig(**SHAPE),
    "Llama": LlamaConfig(**SHAPE, n_kv_head=1, head_dim=12, n_inner=52),
}
SETTINGS = TrainConfig(optimizer="muon", learning_rate=0.01)


def train_three_updates(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[int, int]:
    """Makes three updates; returns how many matrices were orthogonalized, and the state's size."""
    counts = []
    orthogonalize = muon.orthogonalize

    def counted(matrices, count=1):
        counts.append(len(matrices))
        return orthogonalize(matrices, count)

    with patch.object(muon, "orthogonalize", counted):
        optimizer = optim.build_optimizer(model, SETTINGS)
        for _ in range(3):
            inputs, targets = tokens
            model(inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    held = [tensor for state in optimizer.state.values() for tensor in state.values()]
    size = sum(muon.own_part(tensor, 1).numel() for tensor in held if tensor.ndim)
    return sum(counts), size


def main() -> None:
    PartialState(cpu=True)
    muon.iteration_dtype = lambda device: torch.float32
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = {}
    for name, config in SHAPES.items():
        torch.manual_seed(0)
        model = config.build()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        tokens = torch.randint(0, 64, (2, 4, 16))
        alone, sharded = copy.deepcopy(model), copy.deepcopy(model)
        with patch.object(muon, "orthogonalize_shared", muon.orthogonalize):
            train_three_updates(alone, tokens)
        for block in next(m for m in sharded.children() if isinstance(m, torch.nn.ModuleList)):
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for how, each in (("ddp", model), ("fsdp", sharded)):
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, train_three_updates(each, tokens))
            results[f"{name} {how}"] = ranks
            for parameter, expected in zip(each.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(full_tensor(parameter), expected, atol=1e-6, rtol=0)
    if dist.get_rank() == 0:
        print(json.dumps(results))


cli.run(main)

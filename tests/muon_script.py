"""Updates of Muon on all ranks, with the matrices as DDP has them and sharded by FSDP2, in fp32. Prints for each the largest
difference of the weights to updates of one process, the number of matrices that this rank orthogonalizes, and the size of its
optimizer state."""

import copy

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpt2_accel import GPT, GPTConfig, cli, optim
from gpt2_accel.models.llama import Llama, LlamaConfig
from gpt2_accel.optim import muon

UPDATES = 3


def models():
    """Yields a model of each architecture with odd numbers of rows, and its tokens."""
    shape = {"vocab_size": 64, "n_positions": 16, "n_layer": 3, "n_head": 3, "n_embd": 30}
    yield GPT(GPTConfig(**shape))
    yield Llama(LlamaConfig(**shape, n_kv_head=1, head_dim=10, n_inner=50))


def updated(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[int, int]:
    """Makes updates from gradients of one batch; returns the number of matrices that were orthogonalized, and the numbers in
    this rank's optimizer state."""
    counts, orthogonalize = [], muon.orthogonalize

    def counted(matrices, count=1):
        counts.append(len(matrices))
        return orthogonalize(matrices, count)

    muon.orthogonalize = counted
    try:
        optimizer = optim.build_optimizer(model, "muon", lr=0.01)
        for _ in range(UPDATES):
            model(*tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        muon.orthogonalize = orthogonalize
    held = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return sum(counts), sum(muon.own_part(tensor, 1).numel() for tensor in held if tensor.ndim)


def main() -> None:
    PartialState(cpu=True)
    muon.iteration_dtype = lambda device: torch.float32
    for model in models():
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        tokens = torch.randint(0, 64, (2, 4, 16))
        alone, sharded = copy.deepcopy(model), copy.deepcopy(model)
        kept, muon.orthogonalize_shared = (
            muon.orthogonalize_shared,
            muon.orthogonalize,
        )
        updated(alone, tokens)
        muon.orthogonalize_shared = kept
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in next(m for m in sharded.children() if isinstance(m, torch.nn.ModuleList)):
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for how, each in (("ddp", model), ("fsdp", sharded)):
            count, held = updated(each, tokens)
            pairs = zip(each.parameters(), alone.parameters(), strict=True)
            whole = ((p.full_tensor() if how == "fsdp" else p, q) for p, q in pairs)
            difference = max((p - q).abs().max().item() for p, q in whole)
            name = f"{type(model).__name__} {how}"
            print(f"{name}, rank {dist.get_rank()}: {difference:.1e}, {count}, {held}")


cli.run(main)

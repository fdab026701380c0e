"""One update of Muon on all ranks. Prints the difference of the weights to an update of one process, and the number
of matrices that this rank orthogonalizes."""

import copy

import torch
from accelerate import PartialState

from gpt2_accel import GPT, GPTConfig, cli, muon, optim


def main() -> None:
    PartialState()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, n_positions=16, n_layer=3, n_head=2, n_embd=32))
    alone = copy.deepcopy(model)
    tokens = torch.randint(0, 64, (2, 4, 16))
    counts = []
    orthogonalize = muon.orthogonalize

    def counted(matrices):
        counts.append(len(matrices))
        return orthogonalize(matrices)

    for each, shared in ((alone, False), (model, True)):
        optimizer = optim.build_optimizer(each, "muon", lr=0.01)
        each(*tokens).backward()
        muon.orthogonalize = counted if shared else orthogonalize
        if not shared:
            muon.orthogonalize_shared, kept = orthogonalize, muon.orthogonalize_shared
        optimizer.step()
        muon.orthogonalize_shared = kept
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    print(f"rank {torch.distributed.get_rank()}: {difference:.1e}, {sum(counts)} matrices")


cli.run(main)

"""Memory of a training run per device: weights, gradients, optimizer state, activations."""

from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt2_accel.config import TrainConfig
from gpt2_accel.device import DTYPES
from gpt2_accel.kernels.cross_entropy import LOGITS_AT_ONCE
from gpt2_accel.models import ModelConfig
from gpt2_accel.optim import hidden_matrices


@dataclass
class Launch:
    """What an estimate needs to know of a launch, by Accelerate's names; an `Accelerator` knows it too."""

    num_processes: int = 1
    mixed_precision: str = "no"
    is_fsdp2: bool = False


def memory_by_part(
    config: TrainConfig, shape: ModelConfig, accelerator: Accelerator | Launch
) -> dict[str, int]:
    """Bytes per device, at the peak: weights and gradients in fp32, two moments of the optimizer (one where
    Muon keeps one), activations. FSDP2 spreads all but the activations over the devices."""
    shards = accelerator.num_processes if accelerator.is_fsdp2 else 1
    with torch.device("meta"):
        model = shape.build()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    matrices = 4 * sum(parameter.numel() for _, parameter in hidden_matrices(model))
    saved = matrices if config.optimizer == "muon" else 0
    size = config.micro_batch_size
    return {
        "weights": weights // shards,
        "gradients": weights // shards,
        "optimizer": (2 * weights - saved) // shards,
        "activations": activation_bytes(
            shape,
            size,
            config.sequence_length,
            accelerator.mixed_precision,
            config.checkpoint_activations,
        ),
    }


def activation_bytes(
    config: ModelConfig, batch: int, length: int, precision: str, checkpointed: bool = False
) -> int:
    """Bytes that the forward of (batch, length) tokens keeps for the backward, and those of the logits and their
    gradients, which come on top of it at the peak.

    Counted on tensors without memory, as autograd saves them uncompiled. With `checkpointed` activations each block
    keeps its input in fp32, and one block keeps everything.
    """
    if checkpointed:
        one = activation_bytes(replace(config, n_layer=1), batch, length, precision)
        return one + (config.n_layer - 1) * batch * length * config.n_embd * 4
    seen: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
        return tensor

    dtype = DTYPES.get(precision)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = config.build()
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(tokens, tokens)  # kept, so that no storage is counted under another's name
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        saved = sum(size for key, size in seen.items() if key not in own)
        del loss
    width = 4 if dtype is None else 2
    logits = batch * length * config.padded_vocab_size
    if logits <= LOGITS_AT_ONCE:
        return saved + logits * (4 if dtype is None else 4 + 2)
    weight = config.padded_vocab_size * config.n_embd  # a copy, and one chunk's gradient
    return saved + (LOGITS_AT_ONCE + 2 * weight) * width

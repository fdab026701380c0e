"""Memory per device of a training run: weights, gradients, optimizer state, activations."""

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
    """The attributes of an `Accelerator` that an estimate needs, by the same names."""

    num_processes: int = 1
    mixed_precision: str = "no"
    is_fsdp2: bool = False


def memory_by_part(
    config: TrainConfig,
    shape: ModelConfig,
    accelerator: Accelerator | Launch,
    micro_batch_size: int,
    logits: int | None,
) -> dict[str, int]:
    """Returns the bytes per device at the peak, by part: weights and gradients in fp32, optimizer state, activations.

    AdamW keeps two moments of each parameter; Muon keeps one of its matrices. FSDP2 shards all but the activations.
    `logits` is the device's `kernels.choices.logits_at_once`.
    """
    shards = accelerator.num_processes if accelerator.is_fsdp2 else 1
    with torch.device("meta"):
        model = shape.build()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    matrices = 4 * sum(parameter.numel() for _, parameter in hidden_matrices(model))
    saved = matrices if config.optimizer == "muon" else 0
    return {
        "weights": weights // shards,
        "gradients": weights // shards,
        "optimizer": (2 * weights - saved) // shards,
        "activations": activation_bytes(
            shape,
            micro_batch_size,
            config.tokens_per_sequence,
            accelerator.mixed_precision,
            config.checkpoint_activations,
            logits,
        ),
    }


def activation_bytes(
    config: ModelConfig,
    batch: int,
    length: int,
    precision: str,
    checkpointed: bool = False,
    at_once: int | None = None,
) -> int:
    """Returns the bytes of the activations of (batch, length) tokens at the peak, without compilation.

    The count includes the tensors that autograd saves for the backward, measured on fake tensors, and the logits and
    their gradients; `at_once` is the device's `kernels.choices.logits_at_once`. With `checkpointed` activations each block saves its input in fp32, and one block saves everything.
    """
    if checkpointed:
        one = activation_bytes(
            replace(config, n_layer=1), batch, length, precision, at_once=at_once
        )
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
            loss = model(tokens, tokens)  # kept alive, so that no storage's id is reused
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        saved = sum(size for key, size in seen.items() if key not in own)
        del loss
    width = 4 if dtype is None else 2
    logits = batch * length * config.padded_vocab_size
    if logits <= LOGITS_AT_ONCE:
        return saved + logits * (4 if dtype is None else 4 + 2)
    weight = config.padded_vocab_size * config.n_embd  # a copy, and the gradient of one chunk
    return saved + (min(logits, at_once or LOGITS_AT_ONCE) + 2 * weight) * width

"""Optional kernels that are faster than plain PyTorch on some devices.

Functions such as `cross_entropy.applies` say whether to use one in place of plain PyTorch. The environment variable
`GPT2_ACCEL_KERNELS=off` turns all kernels off.
"""

import os
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class KernelChoices:
    """What `runtime.accelerator.configure_backends` chooses; the defaults are those of a CPU.

    `enabled`, from the environment, turns all kernels on. `logits_at_once` is the most logits that the loss computes at
    once; None is `cross_entropy.LOGITS_AT_ONCE`. `sdpa_order` names torch's attention kernels, the preferred first;
    empty is torch's own order. `block_masks` takes block masks for documents in place of dense ones. `fuse` compiles the
    kernels' elementwise parts also outside compiled modules: with compilation by block the loss is outside.
    """

    enabled: bool = os.environ.get("GPT2_ACCEL_KERNELS", "on").lower() not in ("off", "0", "false")
    logits_at_once: int | None = None
    sdpa_order: tuple[str, ...] = ()
    block_masks: bool = False
    fuse: bool = False


choices = KernelChoices()


def choose(**changes: Any) -> None:
    """Replaces `choices` by a copy with these fields."""
    global choices
    choices = replace(choices, **changes)

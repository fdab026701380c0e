"""Optional kernels that are faster than plain PyTorch on some devices.

`choices` and functions such as `attention.takes_groups` say whether to use one in place of plain
PyTorch. The environment variable `GPT2_ACCEL_KERNELS=off` turns all kernels off.
"""

import os
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class KernelChoices:
    """The kernels that `runtime.accelerator.configure_backends` chooses; the defaults fit a CPU."""

    enabled: bool = os.environ.get("GPT2_ACCEL_KERNELS") != "off"
    # The most logits that the loss computes at once; None is `cross_entropy.LOGITS_AT_ONCE`.
    logits_at_once: int | None = None
    # Torch's attention kernels, the preferred first; empty is torch's own order.
    sdpa_order: tuple[str, ...] = ()
    # Block masks for documents in place of dense ones.
    block_masks: bool = False
    # Compile elementwise parts also outside compiled modules: with compilation by block the loss is
    # outside.
    fuse: bool = False


choices = KernelChoices()


def choose(**changes: Any) -> None:
    """Replaces `choices` by a copy with these fields."""
    global choices
    choices = replace(choices, **changes)

"""Optional kernels that are faster than plain PyTorch on some devices.

The model calls a kernel if its module's `applies` returns True, and plain PyTorch otherwise. The environment variable
`GPT2_ACCEL_KERNELS=off`, or `kernels.enabled = False`, turns all kernels off.
"""

import os

# What `build_accelerator` chooses for the device, with the values of a CPU here.
logits_at_once: int | None = None  # of the loss; None: `cross_entropy.LOGITS_AT_ONCE`
# Torch's attention kernels, the preferred first; empty: torch's own order.
sdpa_order: tuple[str, ...] = ()
block_masks = False  # for documents, in place of dense masks
# Whether kernels compile their elementwise parts also outside compiled modules: with compilation by block the loss is
# outside.
fuse = False
enabled: bool = os.environ.get("GPT2_ACCEL_KERNELS", "on").lower() not in ("off", "0", "false")

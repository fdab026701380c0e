"""Faster ways to compute what plain PyTorch computes, each for some device.

`models/` calls a kernel by the name of what it computes, where that module's `applies` says so, and plain PyTorch
everywhere else. `GPT2_ACCEL_KERNELS=off` in the environment, or `kernels.enabled = False`, turns all of them off.
"""

import os

# Whether kernels compile their elementwise parts also outside compiled modules: with compilation by block the loss is
# outside.
fuse = False
enabled: bool = os.environ.get("GPT2_ACCEL_KERNELS", "on").lower() not in ("off", "0", "false")

"""gpt2_accel: train GPT-2-class language models on the Hugging Face stack."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if os.name == "nt":
    raise ImportError(
        "gpt2_accel does not run on Windows: use the Windows Subsystem for Linux (WSL)"
    )

# The threads of libgomp, torch's OpenMP on Linux, wait for each other by spinning. Next to a busy
# process a spinning thread keeps the core from the thread that it waits for. After SPINS rounds it
# sleeps. libgomp reads this when torch is imported.
SPINS = "5000"
if sys.platform == "linux" and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = SPINS

if TYPE_CHECKING:
    from gpt2_accel.hf.convert import from_pretrained, save_pretrained
    from gpt2_accel.models.gpt2 import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig", "from_pretrained", "save_pretrained"]
__version__ = "0.6.0"


def __getattr__(name: str) -> Any:
    """Imports a name of `__all__` at its first use: `gpt2-accel --help` need not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "hf.convert" if name.endswith("_pretrained") else "models.gpt2"
    globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return globals()[name]

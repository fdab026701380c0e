"""gpt2_accel: train GPT-2-class language models on the Hugging Face stack."""

import os

if os.name == "nt":
    raise ImportError(
        "gpt2_accel does not run on Windows: use the Windows Subsystem for Linux (WSL)"
    )

from gpt2_accel.hf.convert import from_pretrained, save_pretrained
from gpt2_accel.models.gpt2 import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig", "from_pretrained", "save_pretrained"]
__version__ = "0.2.0"

"""The former name of `gpt2_accel.models.gpt2`."""

from gpt2_accel.models.gpt2 import *  # noqa: F403

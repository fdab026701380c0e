"""The former name of `gpt2_accel.generation.sampling`."""

from gpt2_accel.generation.sampling import *  # noqa: F403

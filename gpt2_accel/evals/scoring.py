"""The former name of `gpt2_accel.evals.likelihood`."""

from gpt2_accel.evals.likelihood import *  # noqa: F403

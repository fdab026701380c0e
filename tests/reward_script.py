"""Rewards for tests/test_rewards.py, in a file of their own as a user has it."""

import os


def letters(row, text):
    """The number of lower-case letters in a text, in eighths."""
    return sum(c.islower() for c in text) / 8


def first_only(row, text):
    """Fails on rank 1."""
    return 1 / (1 - int(os.environ["RANK"]))

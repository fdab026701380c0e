"""A reward for tests/test_rewards.py, in a file of its own as a user has it."""


def letters(row, text):
    """The number of lower-case letters in a text, in eighths."""
    return sum(c.islower() for c in text) / 8

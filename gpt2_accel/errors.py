"""How an error is quoted in a message of one sentence."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""Formats errors for one-sentence messages."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if the message is empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def sentence(error: BaseException) -> str:
    """Returns the message of an error on one line; an `OSError` of the system as `FILE: reason`."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename2 or error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__

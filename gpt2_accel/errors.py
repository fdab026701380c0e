"""Formats errors for one-sentence messages."""

import errno


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if the message is empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def sentence(error: BaseException) -> str:
    """Returns the message of an error on one line; an `OSError` of the system as `FILE: reason`, without `FILE` if it
    names none."""
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename2 or error.filename}: " if error.filename is not None else ""
        full = ": free disk space and start again" if error.errno == errno.ENOSPC else ""
        return f"{place}{error.strerror}{full}"
    return " ".join(str(error).split()) or type(error).__name__

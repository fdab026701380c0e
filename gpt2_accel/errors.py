"""How an error is quoted in a message of one sentence."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def sentence(error: BaseException) -> str:
    """The whole message of an error on one line; the system's errors as `FILE: what is wrong`."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__

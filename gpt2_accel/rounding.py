"""Integer division that rounds up."""


def ceil_div(total: int, size: int) -> int:
    """Returns total / size, rounded up."""
    return -(-total // size)


def round_up(number: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is not below `number`."""
    return ceil_div(number, step) * step

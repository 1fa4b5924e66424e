"""The one rounding up."""


def ceil_div(value: int, step: int) -> int:
    """Return how many steps hold ``value``."""
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    """Return ``value`` rounded up to a multiple of ``step``."""
    return ceil_div(value, step) * step

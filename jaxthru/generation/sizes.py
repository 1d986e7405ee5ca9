"""Shape buckets: the few sizes that programs are compiled for, so that most calls find theirs compiled."""

SMALLEST = 64  # tokens of a prompt or slots of a cache: a kernel's tile


def size(count: int) -> int:
    """Returns the smallest size that holds so many tokens: a power of two or one and a half of one, at least
    SMALLEST. No more than a third of it is empty."""
    whole = power_of_two(max(count, SMALLEST))
    return whole * 3 // 4 if count <= whole * 3 // 4 and whole > SMALLEST else whole


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least so many."""
    return 1 << (count - 1).bit_length()

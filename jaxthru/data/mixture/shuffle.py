"""Global shuffles that a key decides: the same on every machine, with random access to any place."""

import functools
import hashlib

import numpy as np

ROUNDS = 8
"""With so many, places and distances of neighbours are as even as chance has them, from two numbers on. Which
number follows which is not, where there are few: over many orders the likeliest follower comes 14 % too often
of 6 numbers, 11 of 5, 10 of 12, 6 of 16, and is lost in chance from some 30 on. It stays so, since a run that
goes on has to find its orders as they were, and no batch is the worse for it."""

ODD = np.uint64(0x9E3779B97F4A7C15)
FACTOR = np.uint64(0xD6E8FEB86659FD93)
HALF = np.uint64(32)


@functools.lru_cache(maxsize=4096)
def key_of(*parts: int | str) -> int:
    """Returns a 64-bit key made of all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def permutation(key: int, size: int) -> np.ndarray:
    """Returns int64 [size], the numbers below `size` in an order that `key` decides.

    NumPy's own may be another with another NumPy.
    """
    return np.argsort(_mixed(np.uint64(key) + np.arange(size, dtype=np.uint64)))  # no two are equal


def places(index: np.ndarray, size: np.ndarray, key: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns int64 [n], where each index comes to stand among `size` numbers, without making an order whole.

    index: int64 [n], below size. size: int64 [n]. key: uint64 [n]; order: int64 [n], which of the key's
    orders, as of an epoch. A Feistel network over two digits that together count to `size` or a little more;
    what falls outside goes through it again (Black, Rogaway 2002: Ciphers with arbitrary finite domains).
    """
    columns = np.ceil(np.sqrt(size)).astype(np.int64)
    bases = np.array([-(-size // columns), columns]).astype(np.uint64)
    size = size.astype(np.uint64)
    found = index.astype(np.uint64)
    key = _mixed(key + order.astype(np.uint64))
    outside = np.arange(len(index))
    while len(outside):
        base, digit = bases[:, outside], list(np.divmod(found[outside], bases[1, outside]))
        round_key = key[outside]
        for turn in range(ROUNDS):
            mine, other = turn % 2, 1 - turn % 2
            round_key = round_key + ODD
            digit[mine] = (digit[mine] + _mixed(digit[other] + round_key) % base[mine]) % base[mine]
        found[outside] = digit[0] * base[1] + digit[1]
        outside = outside[found[outside] >= size[outside]]
    return found.astype(np.int64)


def _mixed(value: np.ndarray) -> np.ndarray:
    """Returns uint64 [n] of which every bit depends on every bit of `value`, modulo 2⁶⁴."""
    for _ in range(2):
        value = (value ^ (value >> HALF)) * FACTOR
    return value ^ (value >> HALF)

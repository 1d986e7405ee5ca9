"""Orders that a key decides: the same on every machine, and any place of them found at once."""

import functools
import hashlib

import numpy as np


@functools.lru_cache(maxsize=4096)
def key_of(*parts: int | str) -> int:
    """Returns a 64-bit key made of all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


@functools.lru_cache(maxsize=1024)
def permutation(key: int, size: int) -> np.ndarray:
    """Returns int64 [size], the numbers below `size` in an order that `key` decides."""
    return np.random.Generator(np.random.Philox(key)).permutation(size)


def place_of(index: int, key: int, size: int) -> int:
    """Returns where `index` comes to stand among `size` numbers, without making the whole order."""
    if size <= 1024:  # index_shuffle walks a cycle of 2¹⁶: slow where few of them count
        return int(permutation(key, size)[index])
    from grain.experimental import index_shuffle  # here, for it loads JAX

    return index_shuffle(index, max_index=size - 1, seed=key % 2**32, rounds=4)

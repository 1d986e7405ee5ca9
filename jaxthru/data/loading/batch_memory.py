"""Memory for batches, which is reused.

The system's allocator gives large arrays back when they are freed, at some times and not at others; to get
their pages anew takes as long as to fill them, and batches were built a third slower.
"""

import collections
import mmap
import weakref
from collections.abc import Callable

import numpy as np

from jaxthru.data.loading.batch import BATCH_FIELDS

MOST = 16
"""Batches of a size whose memory is kept; more than the queues hold are some that were kept for long."""


def private(size: int) -> mmap.mmap:
    """Returns a block of so many bytes that is this process's own."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class BatchMemory:
    """Hands out batches whose memory comes back once no array, view or transfer refers to it any more."""

    def __init__(
        self,
        allocate: Callable[[int], mmap.mmap] = private,
        most: int = MOST,
        usable: Callable[[mmap.mmap], bool] = lambda block: True,
    ):
        """allocate: returns a new block of so many bytes. most: blocks of a size that are kept. usable: says
        whether a block that comes back may be written again."""
        self._allocate, self._usable = allocate, usable
        self._free = collections.defaultdict(lambda: collections.deque[mmap.mmap](maxlen=most))

    def take(self, rows: int, sequence: int) -> dict[str, np.ndarray]:
        """Returns the fields of a batch (see `batch.py`), [rows, sequence], whatever is in their memory."""
        size = len(BATCH_FIELDS) * rows * sequence * 4
        free = self._free[size]
        try:
            block = free.pop()
        except IndexError:
            block = self._allocate(size)
        # Whatever is made of this array refers to it, because what lies beneath it is no array but a buffer:
        # so it lives as long as the block is in use.
        whole = np.frombuffer(block, np.int32)
        weakref.finalize(whole, self._take_back, free, block).atexit = False
        parts = whole.reshape(len(BATCH_FIELDS), rows, sequence)
        fields = zip(BATCH_FIELDS.items(), parts, strict=True)
        return {name: part.view(dtype) for (name, dtype), part in fields}

    def _take_back(self, free: collections.deque[mmap.mmap], block: mmap.mmap) -> None:
        if self._usable(block):
            free.append(block)

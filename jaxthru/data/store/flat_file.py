"""Flat files: arrays on disk, memory-mapped when they are first read, with a checksum for each block."""

import array
import bisect
import collections
import errno
import mmap
import os
import resource
import threading
import weakref
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxthru.runtime.errors import InputError, require
from jaxthru.runtime.mapped_files import remember

BLOCK = 1 << 20
"""Bytes under one checksum."""
REMEDY = "remove its folder and prepare again"
MOST_MAPS = 16_384
"""Memory maps of a process, at most: each keeps a file open, and Linux as it comes allows 65,530. A store of
terabytes has more files."""


VERIFIED = threading.Lock()
"""Held while a block is noted as verified: what is left to verify must not be counted as less than it is."""


class Maps(dict):
    """Memory maps by key, of one owner. Those that were made first in the process, whoever owns them, are
    let go of once there are many; who still reads one has it until then."""

    __slots__ = ("__weakref__",)
    _made: ClassVar = collections.deque()

    def keep(self, key: Hashable, mapped: Any) -> Any:
        """Returns what is mapped, which is kept for now."""
        self[key] = mapped
        self._made.append((weakref.ref(self), key))
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MOST_MAPS if files == resource.RLIM_INFINITY else min(MOST_MAPS, files // 2)
        while len(self._made) > most:
            owner, oldest = self._made.popleft()
            if (maps := owner()) is not None:
                maps.pop(oldest, None)
        return mapped


def map_file(path: str, size: int | None = None, remedy: str = REMEDY) -> mmap.mmap | bytes:
    """Maps a file, to read. size: that it must have. remedy: against what is wrong with it. Raises InputError
    when it is missing or of another size."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(file).st_size
            require(
                size is None or found == size, lambda: f"{path}: {found} bytes, expected {size}; {remedy}"
            )
            # A memory map cannot be empty.
            return remember(mmap.mmap(file, 0, access=mmap.ACCESS_READ), path, remedy) if found else b""
        finally:
            os.close(file)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; {remedy}") from error
    except OSError as error:
        hints = {errno.EMFILE: "open files, `ulimit -n`", errno.ENOMEM: "memory maps, vm.max_map_count"}
        hint = f"; raise the limit of {hints[error.errno]}" if error.errno in hints else ""
        raise InputError(f"{path}: cannot be opened ({error.strerror}){hint}") from error


def map_array(path: str, dtype: str, count: int, crc32: int | None = None) -> np.ndarray:
    """Maps a flat array of known length. Raises InputError when the file is missing or of another size, or
    has another checksum than `crc32`."""
    mapped = np.frombuffer(map_file(path, count * np.dtype(dtype).itemsize), dtype)
    damaged = crc32 is not None and crc32 != zlib.crc32(mapped)
    require(not damaged, lambda: f"{path}: block 0 (bytes 0 to {mapped.nbytes - 1}) is damaged; {REMEDY}")
    return mapped


def checksums(content: bytes) -> list[int]:
    view = memoryview(content)
    return [zlib.crc32(view[start : start + BLOCK]) for start in range(0, len(content), BLOCK)]


class Column:
    """A column of all shards of a split, a value for each token, numbered through them. No file is opened
    before it is read."""

    def __init__(
        self,
        path: str,
        ending: str,
        dtype: str,
        counts: np.ndarray,
        checksums: Sequence[Sequence[int] | None],
    ):
        """path, ending: around the number of the shard, as its file is called. counts: int64 [shards], the
        values of each. checksums: of its blocks; None where the shard has no such file, and each value is 1.
        """
        self._path, self._ending, self._dtype = path, ending, np.dtype(dtype)
        self._starts = array.array("q", [0, *np.cumsum(counts).tolist()])
        self._there = bytearray(each is not None for each in checksums)
        blocks = [0 if each is None else len(each) for each in checksums]
        self._blocks = array.array("q", [0, *np.cumsum(blocks, dtype=np.int64).tolist()])
        known = [np.asarray(each, np.uint32) for each in checksums if each is not None]
        self._checksums = np.concatenate([np.zeros(0, np.uint32), *known])
        self._unverified = bytearray(b"\1" * len(self._checksums))
        self._left = len(self._unverified)
        self._maps = Maps()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the values from `start` to before `stop`, which is above it: a view of the memory map where
        one shard holds them all. Each block is verified when it is first read. Raises InputError for damage,
        and for a file that is not there or of another size."""
        number = bisect.bisect_right(self._starts, start) - 1
        origin, end = self._starts[number], self._starts[number + 1]
        if stop > end:
            return np.concatenate([self.read(start, end), self.read(end, stop)])
        shard = self._maps.get(number)
        if shard is None:
            shard = self._open(number)
        if self._left:
            size, base = BLOCK // shard.itemsize, self._blocks[number]
            last = min(base + (stop - origin - 1) // size, self._blocks[number + 1] - 1)
            while (block := self._unverified.find(1, base + (start - origin) // size, last + 1)) >= 0:
                self._verify_block(number, block - base)
        return shard[start - origin : stop - origin]

    def verify(self) -> None:
        """Compares every block with its checksum; raises InputError that names the first that differs."""
        for number in range(len(self._there)):
            self._open(number)
            for block in range(self._blocks[number + 1] - self._blocks[number]):
                self._verify_block(number, block)

    def _open(self, number: int) -> np.ndarray:
        count = self._starts[number + 1] - self._starts[number]
        if not self._there[number]:
            return self._maps.setdefault(number, np.broadcast_to(np.ones(1, self._dtype), count))
        return self._maps.keep(number, map_array(self._name(number), self._dtype, count))

    def _name(self, number: int) -> str:
        return f"{self._path}-{number:05d}.{self._ending}"

    def _verify_block(self, number: int, block: int) -> None:
        shard, at = self._maps.get(number), self._blocks[number] + block
        shard = self._open(number) if shard is None else shard
        size = BLOCK // shard.itemsize
        crc32 = zlib.crc32(shard[block * size : (block + 1) * size])
        end = min((block + 1) * BLOCK, shard.nbytes)
        require(
            crc32 == self._checksums[at],
            lambda: (
                f"{self._name(number)}: block {block} (bytes {block * BLOCK} to {end - 1}) is damaged; "
                f"{REMEDY}"
            ),
        )
        with VERIFIED:
            self._left -= self._unverified[at]
            self._unverified[at] = 0

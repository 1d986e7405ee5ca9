"""Flat files: arrays on disk, memory-mapped, and columns of them with a checksum for each MiB."""

import bisect
import errno
import mmap
import os
import zlib

import numpy as np

from jaxthru.runtime.errors import InputError, require

BLOCK = 1 << 20
"""Bytes under one checksum."""
REMEDY = "remove its folder and prepare again"


def map_array(path: str, dtype: str, count: int, crc32: int | None = None) -> np.ndarray:
    """Maps a flat array of known length. Raises InputError when the file is missing or of another size, or
    has another checksum than `crc32`."""
    expected = count * np.dtype(dtype).itemsize
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            require(size == expected, lambda: f"{path}: {size} bytes, expected {expected}; {REMEDY}")
            if count == 0:  # a memory map cannot be empty
                return np.zeros(0, dtype)
            mapped = np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), dtype)
        finally:
            os.close(file)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; {REMEDY}") from error
    except OSError as error:
        hints = {errno.EMFILE: "open files, `ulimit -n`", errno.ENOMEM: "memory maps, vm.max_map_count"}
        hint = f"; raise the limit of {hints[error.errno]}" if error.errno in hints else ""
        raise InputError(f"{path}: cannot be opened ({error.strerror}){hint}") from error
    damaged = crc32 is not None and crc32 != zlib.crc32(mapped)
    require(not damaged, lambda: f"{path}: block 0 (bytes 0 to {mapped.nbytes - 1}) is damaged; {REMEDY}")
    return mapped


def checksums(content: bytes) -> list[int]:
    view = memoryview(content)
    return [zlib.crc32(view[start : start + BLOCK]) for start in range(0, len(content), BLOCK)]


class Column:
    """A column of all shards of a split, a value for each token, numbered through them."""

    def __init__(self):
        self._shards: list[np.ndarray] = []
        self._paths: list[str] = []
        self._checksums: list[list[int]] = []
        self._unverified: list[bytearray] = []
        self._starts = [0]

    def add(self, path: str, dtype: str, count: int, checksums: list[int] | None) -> None:
        """Adds the file of the next shard. checksums: of its blocks; None where the shard has no such file,
        and each value is 1. Raises InputError for a file that is not there, or of another size."""
        there = checksums is not None
        self._shards.append(
            map_array(path, dtype, count) if there else np.broadcast_to(np.ones(1, dtype), count)
        )
        self._paths.append(path)
        self._checksums.append(checksums or [])
        self._unverified.append(bytearray(b"\1" * len(checksums or ())))
        self._starts.append(self._starts[-1] + count)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the values from `start` to before `stop`, which is above it: a view of the memory map where
        one shard holds them all. Each block is verified when it is first read; raises InputError."""
        parts = []
        while start < stop:
            number = bisect.bisect_right(self._starts, start) - 1
            shard, origin = self._shards[number], self._starts[number]
            first, last = start - origin, min(stop, self._starts[number + 1]) - origin - 1
            size = BLOCK // shard.itemsize
            while (block := self._unverified[number].find(1, first // size, last // size + 1)) >= 0:
                self._verify_block(number, block)
            parts.append(shard[first : last + 1])
            start = origin + last + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def verify(self) -> None:
        """Compares every block with its checksum; raises InputError that names the first that differs."""
        for number, checksums in enumerate(self._checksums):
            for block in range(len(checksums)):
                self._verify_block(number, block)

    def _verify_block(self, number: int, block: int) -> None:
        shard = self._shards[number]
        size = BLOCK // shard.itemsize
        crc32 = zlib.crc32(shard[block * size : (block + 1) * size])
        end = min((block + 1) * BLOCK, shard.nbytes)
        require(
            crc32 == self._checksums[number][block],
            f"{self._paths[number]}: block {block} (bytes {block * BLOCK} to {end - 1}) is damaged; {REMEDY}",
        )
        self._unverified[number][block] = 0

"""The token store: the tokens of one source on disk, flat and memory-mapped.

A folder `<source>-<key>/` holds, for each shard k and split (train, held_out):

    <split>-<k>.tokens    little-endian uint16 or uint32 ids, document after document
    <split>-<k>.offsets   int64 [documents + 1], where each document starts, and the end
    shard-<k>.json        counts, checksums of each MiB, damaged records, where reading goes on
    manifest.json         written last: only a folder that has one can be opened

Every file is written under a name of its own and then renamed, and every file's content is decided by the
store's key. So a kill leaves whole shards, which the next preparation keeps, and two preparations at once
write the same bytes: whichever is last changes nothing.
"""

import bisect
import contextlib
import errno
import json
import mmap
import os
import resource
import zlib
from pathlib import Path

import numpy as np

from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, require

VERSION = 1
SPLITS = ("train", "held_out")
BLOCK = 1 << 20
"""Bytes under one checksum."""
MAPS = 65_530
"""Memory maps that a process may have, if Linux's own limit of them is as it comes."""


def write_shard(folder: Path, number: int, splits: dict[str, list[np.ndarray]], record: dict) -> dict:
    """Writes one shard and returns its record, which stands for the shard once it is on disk.

    splits: the documents' ids of each split. record: what else to remember, as JSON values.
    """
    record = {**record, "splits": {}}
    for split, documents in splits.items():
        lengths = [len(document) for document in documents]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8").tobytes()
        tokens = b"".join(document.tobytes() for document in documents)
        for name, content in (("tokens", tokens), ("offsets", offsets)):
            write_atomically(folder / f"{split}-{number:05d}.{name}", content)
        record["splits"][split] = {
            "documents": len(documents),
            "tokens": sum(lengths),
            "tokens_crc32": _checksums(tokens),
            "offsets_crc32": zlib.crc32(offsets),
        }
    write_atomically(folder / f"shard-{number:05d}.json", json.dumps(record).encode())
    return record


def finished_shards(folder: Path) -> list[dict]:
    """Returns the records of the shards that are whole, up to the first that is not."""
    records = []
    while (path := folder / f"shard-{len(records):05d}.json").is_file():
        records.append(json.loads(path.read_bytes()))
    return records


def write_manifest(folder: Path, manifest: dict) -> None:
    """Makes the store one that opens. manifest: `dtype`, `shards`, and what describes the source."""
    write_atomically(folder / "manifest.json", json.dumps({"version": VERSION, **manifest}).encode())


def read_manifest(folder: Path) -> dict:
    """Returns the manifest of a store. Raises InputError if there is none that this version reads."""
    try:
        with open(f"{folder}/manifest.json", "rb") as file:  # noqa: PTH123 (see `Split`)
            manifest = json.loads(file.read())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: not a token store ({error})") from error
    version = manifest.get("version")
    require(version == VERSION, f"{folder}: token store of version {version}, this is version {VERSION}")
    return manifest


class Split:
    """One split of a store: a stream of tokens, numbered through all its shards.

    ends: int64 [documents], where each document ends in the stream; it starts where the last one ended.
    """

    def __init__(self, folder: Path, split: str, manifest: dict):
        self._shards: list[np.ndarray] = []
        self._paths: list[str] = []
        self._checksums: list[list[int]] = []
        starts, ends = [0], [np.zeros(0, np.int64)]
        for number, shard in enumerate(manifest["shards"]):
            # Paths as text: of thousands of sources most of the time would go into pathlib.
            record, path = shard["splits"][split], f"{folder}/{split}-{number:05d}"
            count, crc32 = record["documents"] + 1, record["offsets_crc32"]
            offsets = map_array(f"{path}.offsets", "<i8", count, crc32)
            self._shards.append(map_array(f"{path}.tokens", manifest["dtype"], record["tokens"]))
            self._paths.append(f"{path}.tokens")
            self._checksums.append(record["tokens_crc32"])
            ends.append(offsets[1:] + starts[-1])
            starts.append(starts[-1] + record["tokens"])
        self.ends = np.concatenate(ends)
        self.tokens: int = starts[-1]
        self._starts = starts
        self._unverified = [bytearray(b"\1" * len(checksums)) for checksums in self._checksums]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the tokens from `start` to before `stop`, which is above it: a view of the memory map where
        one shard holds them all.

        Each block's checksum is compared when it is first read; raises InputError when it differs.
        """
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


class TokenStore:
    """An opened store. manifest: what was written. train, held_out: its splits."""

    KIND, SPLIT = None, Split

    def __init__(self, folder: Path):
        self.manifest = read_manifest(folder)
        require(self.manifest.get("kind") == self.KIND, f"{folder}: not a {self.KIND or 'token'} store")
        self.folder = folder
        self.train, self.held_out = (self.SPLIT(folder, split, self.manifest) for split in SPLITS)

    def verify(self) -> None:
        """Reads everything. Raises InputError that names the first damaged block."""
        for split in (self.train, self.held_out):
            split.verify()


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


def let_files_open() -> None:
    """Raises the limit of open files: a memory map keeps its file open, and the usual 1,024 would be some
    hundreds of shards. Processes that are started from here on have the same."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAPS if most == resource.RLIM_INFINITY else min(MAPS, most)
    if resource.RLIM_INFINITY != now < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system may have less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _checksums(content: bytes) -> list[int]:
    view = memoryview(content)
    return [zlib.crc32(view[start : start + BLOCK]) for start in range(0, len(content), BLOCK)]

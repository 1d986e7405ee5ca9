"""Column files: what is computed once from a store and kept beside it, memory-mapped.

    16 bytes                 MAGIC
    4 + 4 bytes              length and CRC-32 of the header
    header                   JSON: version, what it was made from, facts, where columns and checksums are
    columns                  flat, little-endian
    checksums                uint32, of each BLOCK of each column

A file is decided by what it was made from. So it is made by whoever first needs it, several at once write the
same bytes, and one that is older, damaged in its header or cut short is made anew. A damaged block is found
when it is first read.
"""

import io
import json
import logging
import mmap
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxthru.data.store.flat_file import VERIFIED, Maps, map_file
from jaxthru.runtime.atomic import written_atomically
from jaxthru.runtime.errors import InputError, require

log = logging.getLogger("jaxthru")

ENDING = ".columns"
MAGIC = b"jaxthru columns\n"
VERSION = 1
BLOCK = 1 << 16
"""Bytes under one checksum: what is read to have one value for the first time."""
HEADER = 2048
"""Bytes before the first column."""
SMALL = 1 << 20
"""Bytes of a file that need not reach the disk at once, nor a file where none can be kept."""

REMEDY = "delete it: it is made anew"
VIEWS, CHECKSUMS = "views", "checksums"

Make = Callable[["Writer"], Mapping[str, Any]]
"""Writes the columns and returns the facts, as JSON values."""


class Writer:
    """Writes the columns of a file, each from its start to its end, in any turns."""

    def __init__(self, stream: BinaryIO, of: str):
        self._stream, self._of = stream, of
        self._columns: dict[str, list] = {}  # name -> [dtype, most values, place, bytes, checksums]
        self._end = HEADER

    def add(self, name: str, dtype: str, most: int) -> None:
        """Adds a column of at most so many values, which but for the last column must all be written."""
        self._columns[name] = [np.dtype(dtype), most, self._end, 0, []]
        self._end += -(-most * np.dtype(dtype).itemsize // 64) * 64

    def write(self, name: str, values: np.ndarray) -> None:
        """Writes the next values of a column."""
        column = self._columns[name]
        dtype, _, place, size, checksums = column
        content = memoryview(np.ascontiguousarray(values, dtype)).cast("B") if len(values) else b""
        self._stream.seek(place + size)
        self._stream.write(content)
        begin = 0
        while begin < len(content):
            filled = (size + begin) % BLOCK
            part = content[begin : begin + BLOCK - filled]
            if filled:
                checksums[-1] = zlib.crc32(part, checksums[-1])
            else:
                checksums.append(zlib.crc32(part))
            begin += len(part)
        column[3] += len(content)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Writes what opens the file."""
        columns, checksums = {}, []
        for name, (dtype, _, place, size, known) in self._columns.items():
            columns[name] = [dtype.str, size // dtype.itemsize, place, len(checksums)]
            checksums += known
            end = -(-(place + size) // 4) * 4
        table = np.array(checksums, "<u4").tobytes()
        self._stream.seek(end)
        self._stream.write(table)
        self._stream.truncate()
        header = {"version": VERSION, "of": self._of, "facts": dict(facts), "columns": columns}
        header |= {"checksums": [end, len(checksums), zlib.crc32(table)]}
        content = json.dumps(header).encode()
        assert len(content) <= HEADER - len(MAGIC) - 8
        lengths = np.array([len(content), zlib.crc32(content)], "<u4").tobytes()
        self._stream.seek(0)
        self._stream.write(MAGIC + lengths + content)


class ColumnFile:
    """A file that is opened; its columns are mapped when they are first read. facts: what was kept with them.
    path: None of one that could not be kept."""

    def __init__(self, path: str | None, header: dict, content: mmap.mmap | bytes | None = None):
        """header: of `_header`. content: of the file, if it has no name."""
        self.path, self.facts = path, header["facts"]
        self._columns, self._table = header["columns"], header["checksums"]
        self._content, self._maps = content, Maps()
        sizes = (count * np.dtype(dtype).itemsize for dtype, count, *_ in self._columns.values())
        self._unverified = {
            name: bytearray(b"\1" * -(-size // BLOCK))
            for name, size in zip(self._columns, sizes, strict=True)
        }
        self.unverified = sum(map(len, self._unverified.values()))

    def count(self, name: str) -> int:
        """Returns how many values a column has."""
        return self._columns[name][1]

    def views(self) -> dict[str, memoryview]:
        """Returns the columns as they are mapped; before a value is used it is verified, while `unverified`
        blocks are left."""
        return self._maps.get(VIEWS) or self._map()

    def verify_range(self, name: str, start: int, stop: int) -> None:
        """Compares the blocks of these values with their checksums, if that was not done before. Raises
        InputError that names the first that differs."""
        size, unverified = np.dtype(self._columns[name][0]).itemsize, self._unverified[name]
        while (block := unverified.find(1, start * size // BLOCK, -(-stop * size // BLOCK))) >= 0:
            self._verify_block(name, block)
            with VERIFIED:
                self.unverified -= unverified[block]
                unverified[block] = 0

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns the values from `start` to before `stop`, verified, a view of the memory map. Raises
        InputError for damage."""
        self.verify_range(name, start, stop)
        return np.asarray(self.views()[name])[start:stop]

    def verify(self) -> None:
        """Compares every block with its checksum; raises InputError that names the first that differs."""
        for name, unverified in self._unverified.items():
            for block in range(len(unverified)):
                self._verify_block(name, block)

    def _map(self) -> dict[str, memoryview]:
        content = self._content
        if content is None:
            content = map_file(self.path, remedy="the next start makes it")
        place, count, crc32 = self._table
        whole = len(content) >= place + 4 * count and zlib.crc32(content[place : place + 4 * count]) == crc32
        require(whole, f"{self.path}: is damaged or cut short; {REMEDY}")
        columns = self._columns | {CHECKSUMS: ["<u4", count, place, 0]}
        views = {
            name: memoryview(np.frombuffer(content, dtype, count, place))
            for name, (dtype, count, place, _) in columns.items()
        }
        if self._content is None:
            return self._maps.keep(VIEWS, views)
        return self._maps.setdefault(VIEWS, views)

    def _verify_block(self, name: str, block: int) -> None:
        views = self.views()
        part = views[name].cast("B")[block * BLOCK : (block + 1) * BLOCK]
        require(
            zlib.crc32(part) == views[CHECKSUMS][self._columns[name][3] + block],
            lambda: f"{self.path}: block {block} of its {name} is damaged; {REMEDY}",
        )


def keep(path: str, of: str, make: Make) -> ColumnFile:
    """Returns a column file of these contents, and makes it if there is none.

    of: what decides its contents. Where it cannot be written it is made for this process alone, with no path.
    Raises InputError if there is no room for that either.
    """
    header = _header(path, of)
    if header is not None:
        return ColumnFile(path, header)
    try:
        with written_atomically(Path(path), sync=False) as stream:
            _write(stream, of, make)
            if stream.tell() > SMALL:
                os.fsync(stream.fileno())
    except InputError as error:
        if not isinstance(error.__cause__, OSError):
            raise  # of what it is made from
        return _unkept(path, of, make)
    # Unless somebody has taken it away again, or put one of something else in its place.
    header = _header(path, of)
    return ColumnFile(path, header) if header else _unkept(path, of, make)


def verify_columns(folder: Path) -> None:
    """Verifies all column files in a folder. Raises InputError that names the first damaged one."""
    for path in sorted(folder.glob(f"*{ENDING}")):
        header = _header(str(path), None)
        require(header is not None, f"{path}: is damaged or cut short; {REMEDY}")
        ColumnFile(str(path), header).verify()


def _unkept(path: str, of: str, make: Make) -> ColumnFile:
    try:
        with tempfile.TemporaryFile() as stream:
            _write(stream, of, make)
            stream.flush()
            size = stream.seek(0, io.SEEK_END)
            small = size <= SMALL  # which has no use for a file that stays open
            content = os.pread(stream.fileno(), size, 0) if small else mmap.mmap(
                stream.fileno(), 0, access=mmap.ACCESS_READ
            )  # fmt: skip
    except OSError as error:
        raise InputError(f"{path}: cannot be kept, nor a temporary file made ({error.strerror})") from error
    return ColumnFile(None, _parsed(content[:HEADER]), content)


def _write(stream: BinaryIO, of: str, make: Make) -> None:
    writer = Writer(stream, of)
    writer.finish(make(writer))
    stream.seek(0, io.SEEK_END)


def _header(path: str, of: str | None) -> dict | None:
    """Returns the header of a file, None if it has none that is whole, or is of something else. of: None is
    anything."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (paths are text, see `Split`)
            header, size = _parsed(file.read(HEADER)), os.fstat(file.fileno()).st_size
    except OSError:  # none, or what is no file
        return None
    if header is None or header["version"] != VERSION or of not in (None, header["of"]):
        return None
    place, count, _ = header["checksums"]
    return header if size == place + 4 * count else None


def _parsed(content: bytes) -> dict | None:
    begin = len(MAGIC) + 8
    if not content.startswith(MAGIC) or len(content) < begin:
        return None
    length, crc32 = np.frombuffer(content, "<u4", 2, len(MAGIC)).tolist()
    text = content[begin : begin + length]
    return json.loads(text) if len(text) == length and zlib.crc32(text) == crc32 else None

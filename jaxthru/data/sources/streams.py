"""Files as streams of bytes, decompressed by their suffix; and the libraries that only some formats need."""

import gzip
import importlib
import io
import zlib
from pathlib import Path
from typing import BinaryIO

from jaxthru.runtime.errors import InputError

READ_ERRORS = (EOFError, OSError, zlib.error)
"""What a stream raises where it is cut off, its compression is damaged or the disk fails."""
FEED = 4096
"""Compressed bytes at once. Memory must hold what they become: with Zstandard up to 32,768 times as much."""


def opened(path: Path) -> BinaryIO:
    """Returns the content of a file, decompressed if its name ends in .gz, .tgz or .zst."""
    if path.suffix in (".gz", ".tgz"):
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstandard(path))
    return path.open("rb")


def cannot_be_read(error: Exception) -> str:
    """Returns the reason for damage after which nothing more of a file can be had."""
    what = str(error).partition("\n")[0] or type(error).__name__
    return f"cannot be read from here on ({what})"


def optional(module: str, path: Path, package: str = "jaxthru[formats]"):
    """Returns a module that only some formats need. Raises InputError that says to install `package`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        raise InputError(f"{path}: reading it needs {name}; pip install {package}") from error


class _Zstandard(io.RawIOBase):
    """The library's own reader takes a file that was cut off for one that ends: this one raises EOFError."""

    def __init__(self, path: Path):
        self._library = optional("zstandard", path)
        self._file = path.open("rb")
        self._compressed, self._content = b"", memoryview(b"")
        self._frame = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._content:
            self._compressed = self._compressed or self._file.read(FEED)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("compressed file ended before the end of its last frame")
                return 0
            self._content = memoryview(self._decompress())
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count

    def _decompress(self) -> bytes:
        self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
        try:
            content = self._frame.decompress(self._compressed)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from error
        self._compressed = b""
        if self._frame.eof:  # another frame may follow: files that were appended to have several
            self._compressed, self._frame = self._frame.unused_data, None
        return content

    def close(self) -> None:
        self._file.close()
        super().close()

"""Safetensors files: a reader that maps them into memory, and a writer that takes one tensor at a time.

A file is the length of its header (8 bytes, little-endian), the header (JSON: each tensor's dtype, shape and
place, and perhaps `__metadata__`), and the tensors' bytes, row-major and without gaps.

Source: https://github.com/huggingface/safetensors, "Format"; the order of tensors is that library's, so that
what it wrote and what is written here of the same tensors are the same bytes.
"""

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxthru.runtime.errors import InputError, require
from jaxthru.runtime.mapped_files import remember

LONGEST_HEADER = 100_000_000
"""Bytes; the library reads no longer one."""

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I16": np.int16,
        "U16": np.uint16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I32": np.int32,
        "U32": np.uint32,
        "F32": np.float32,
        "C64": np.complex64,
        "F64": np.float64,
        "I64": np.int64,
        "U64": np.uint64,
    }.items()
}
"""Names of dtypes in a header, in the library's order."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
RANK = {name: index for index, name in enumerate(DTYPES)}
FORMAT = {"format": "pt"}
"""The metadata that transformers asks for; of several keys the library would change the order."""

MOST_DIMS = 32
LARGEST = 2**63
"""Bytes: what a tensor has is less, so that no size overflows."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """dtype: a key of DTYPES. offsets: of its first byte and behind its last, from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.size * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {[*self.shape]}"


class Reader:
    """A safetensors file whose header holds together. Its bytes are read when an array is looked at.

    tensors: {name: TensorInfo}, in the header's order. metadata: of the header, None without any. Raises
    InputError for whatever is no such file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = self._header(file.read(8), size, file.read)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._map = remember(mapped, str(path), "put it back as it was")
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        self._start = 8 + len(header)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.tensors, self.metadata = self._parsed(header, size - self._start)

    def _header(self, length: bytes, size: int, read: Callable[[int], bytes]) -> bytes:
        self._require(len(length) == 8, f"is no safetensors file: has {size} bytes")
        count = int.from_bytes(length, "little")
        self._require(count <= LONGEST_HEADER, f"header of {count} bytes: may have {LONGEST_HEADER}")
        self._require(
            count <= size - 8, f"header of {count} bytes: the file has only {size - 8} after its size"
        )
        header = read(count)
        self._require(len(header) == count, "became shorter while it was read")
        return header

    def _parsed(self, header: bytes, rest: int) -> tuple[dict[str, TensorInfo], dict[str, str] | None]:
        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key, value in pairs:
                self._require(key not in found, f"header: names {key!r} twice")
                found[key] = value
            return found

        self._require(header[:1] == b"{", "header: must begin with '{'")
        try:
            entries = json.loads(header.decode(), object_pairs_hook=once)
        except InputError:
            raise
        except (ValueError, RecursionError) as error:  # of Unicode, of JSON, of numbers that are too long
            raise InputError(f"{self.path}: header: is no JSON in UTF-8 ({error})") from error
        metadata = entries.pop("__metadata__", None)
        texts = metadata is None or isinstance(metadata, dict)
        texts = texts and all(isinstance(value, str) for value in (metadata or {}).values())
        self._require(texts, "header: __metadata__ must be texts by name")
        tensors = {name: self._entry(name, entry) for name, entry in entries.items()}
        self._check_places(tensors, rest)
        return tensors, metadata

    def _entry(self, name: str, entry: Any) -> TensorInfo:
        known = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
        self._require(known, f"tensor {name!r}: must have dtype, shape and data_offsets, and nothing else")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        self._require(
            isinstance(dtype, str) and dtype in DTYPES,
            f"tensor {name!r}: dtype {dtype!r} is not known; known are {', '.join(DTYPES)}",
        )
        dims = isinstance(shape, list) and len(shape) <= MOST_DIMS and all(map(_whole, shape))
        self._require(dims, f"tensor {name!r}: shape {shape!r} must be up to {MOST_DIMS} whole numbers")
        whole_pair = isinstance(offsets, list) and len(offsets) == 2 and all(map(_whole, offsets))
        self._require(whole_pair, f"tensor {name!r}: data_offsets {offsets!r} must be two whole numbers")
        info = TensorInfo(dtype, tuple(shape), (offsets[0], offsets[1]))
        full = math.prod(dim for dim in shape if dim) * DTYPES[dtype].itemsize
        self._require(full < LARGEST, f"tensor {name!r}: shape {shape!r} is too large")
        self._require(
            offsets[1] - offsets[0] == info.nbytes,
            f"tensor {name!r}: {info} takes {info.nbytes} bytes, its data_offsets {offsets} span "
            f"{offsets[1] - offsets[0]}",
        )
        return info

    def _check_places(self, tensors: Mapping[str, TensorInfo], rest: int) -> None:
        at = 0
        for name, info in sorted(tensors.items(), key=lambda item: item[1].offsets):
            begins = info.offsets[0]
            kind = "overlap" if begins < at else "leave a hole"
            self._require(
                begins == at, f"tensor {name!r}: data_offsets {[*info.offsets]} {kind}: {at} is next"
            )
            at = info.offsets[1]
        self._require(at == rest, f"tensors take {at} bytes, after the header the file has {rest}")

    def _require(self, condition: bool, said: str) -> None:
        require(condition, f"{self.path}: {said}")

    def array(self, name: str) -> np.ndarray:
        """Returns a tensor as a read-only view of the mapped file: nothing is copied."""
        info = self.tensors[name]
        return self.bytes(name).view(DTYPES[info.dtype]).reshape(info.shape)

    def bytes(self, name: str) -> np.ndarray:
        """Returns a tensor's bytes, uint8 [bytes], as `array` does."""
        first, behind = (self._start + offset for offset in self.tensors[name].offsets)
        return self._bytes[first:behind]


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def ordered(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Returns names of tensors in the order of a file: the largest dtypes first, so that all are aligned."""
    return sorted(tensors, key=lambda name: (-RANK[tensors[name].dtype], name))


def header_of(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = FORMAT) -> bytes:
    """Returns a file's bytes before its tensors, which lie as `ordered`. Offsets given are not looked at."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name in ordered(tensors):
        info = tensors[name]
        place = [at, at := at + info.nbytes]
        entries[name] = {"dtype": info.dtype, "shape": [*info.shape], "data_offsets": place}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    arrays: Callable[[Iterable[str]], Iterable[np.ndarray]],
    metadata: Mapping[str, str] | None = FORMAT,
) -> None:
    """Writes a safetensors file, one tensor after the other, and waits until the disk has it.

    tensors: dtype and shape of each. arrays: (names in the order of the file) -> their arrays in turn, each
    dropped before the next is asked for; with any strides, and of just this dtype and shape. Raises OSError,
    and ValueError for an array that is another.
    """
    with path.open("wb", buffering=0) as file:
        header = header_of(tensors, metadata)
        _write_all(file, memoryview(header))
        names = ordered(tensors)
        given = iter(arrays(names))
        for name in names:
            _write_all(file, _row_major(name, next(given), tensors[name]))
        size, written = len(header) + sum(info.nbytes for info in tensors.values()), file.tell()
        if size != written:
            raise ValueError(f"{path}: wrote {written} bytes of {size}")
        os.fsync(file.fileno())


def _row_major(name: str, array: np.ndarray, info: TensorInfo) -> memoryview:
    """Returns an array's bytes in the order of its dims, whatever its strides are."""
    if array.shape != info.shape or array.dtype != DTYPES[info.dtype]:
        raise ValueError(f"{name}: {info} was to be written, not {array.dtype} {[*array.shape]}")
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _write_all(file: Any, content: memoryview) -> None:
    while content:  # a system call takes 2 GiB at most
        content = content[file.write(content) :]

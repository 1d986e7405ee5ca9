"""From files to documents: one reader a format. A record that cannot be read is reported, never dropped."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxthru.data import docstrings
from jaxthru.data.files import File
from jaxthru.data.mix import Recipe
from jaxthru.runtime.errors import InputError


class Document(NamedTuple):
    """origin: the content hash (hex) that decides on which side of the held-out split the text falls.

    It is the originating file's, so that a file's docstrings follow it; a record of a jsonl or Parquet file
    has its own.
    """

    text: str
    origin: str


class Damage(NamedTuple):
    """A record that cannot be read. position: where in the file, in words."""

    file: str
    position: str
    reason: str


def read(files: list[File], recipe: Recipe) -> Iterator[Document | Damage]:
    """Yields the documents of the files in order, up to the recipe's cap.

    Empty texts are left out, and every text but the first of equal ones.
    """
    reader = {"text": _text, "docstrings": _docstrings, "jsonl": _jsonl, "parquet": _parquet}[recipe.format]
    seen: set[int] = set()
    size = 0
    for item in reader(files, recipe):
        if isinstance(item, Document):
            content = item.text.encode()
            key = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
            if key in seen or not content:
                continue
            seen.add(key)
            size += len(content)
        yield item
        if recipe.cap_bytes and size >= recipe.cap_bytes:
            return


def held_out(origin: str, share: float) -> bool:
    """Says whether a document of this origin (a SHA-256 in hex) is held out; true for `share` of origins.

    The last digits decide, for the first ones order the files and so choose what a cap leaves.
    """
    return int(origin[-16:], 16) < share * 2**64


def _text(files: list[File], recipe: Recipe) -> Iterator[Document | Damage]:
    for file in files:
        try:
            yield Document(file.path.read_text(encoding="utf-8"), file.digest)
        except UnicodeDecodeError as error:
            yield Damage(str(file.path), f"byte {error.start}", "not UTF-8")


def _docstrings(files: list[File], recipe: Recipe) -> Iterator[Document | Damage]:
    """Parses on all cores: in child processes, a few batches of files ahead of the reader."""
    workers = min(os.cpu_count() or 1, 16)
    batches = deque(files[start : start + 64] for start in range(0, len(files), 64))
    running: deque = deque()
    with ThreadPoolExecutor(workers) as pool:
        while batches or running:
            while batches and len(running) < 2 * workers:
                batch = batches.popleft()
                running.append((batch, pool.submit(_prose_in_child, batch)))
            batch, result = running.popleft()
            for file, text in zip(batch, result.result(), strict=True):
                if text is None:
                    yield Damage(str(file.path), "whole file", "not UTF-8, or not valid Python")
                elif text:
                    yield Document(text, file.digest)


def _prose_in_child(files: list[File]) -> list[str | None]:
    command = [sys.executable, "-I", "-S", str(Path(docstrings.__file__))]
    paths = json.dumps([str(file.path) for file in files]).encode()
    result = subprocess.run(command, input=paths, capture_output=True)
    if result.returncode == 0:
        return json.loads(result.stdout)
    if len(files) == 1:  # the parser can be made to overflow its stack
        return [None]
    return [text for file in files for text in _prose_in_child([file])]


def _jsonl(files: list[File], recipe: Recipe) -> Iterator[Document | Damage]:
    for file in files:
        number = 0
        try:
            with _open(file.path) as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield _record(str(file.path), number, line, recipe.text_key)
        except (EOFError, OSError, zlib.error) as error:  # a truncated .gz, or a bad block of it
            yield Damage(str(file.path), f"after line {number}", f"cannot be decompressed ({error})")
        except Exception as error:
            if type(error).__name__ != "ZstdError":  # zstandard is imported only for .zst
                raise
            yield Damage(str(file.path), f"after line {number}", f"cannot be decompressed ({error})")


def _record(file: str, number: int, line: bytes, key: str) -> Document | Damage:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return Damage(file, f"line {number}", "not UTF-8")
    except (ValueError, RecursionError):
        return Damage(file, f"line {number}", "not valid JSON")
    text = record.get(key) if isinstance(record, dict) else None
    return _checked(text, file, f"line {number}", f"no text under {key!r}")


def _checked(text: object, file: str, position: str, reason: str) -> Document | Damage:
    if not isinstance(text, str):
        return Damage(file, position, reason)
    try:
        return Document(text, hashlib.sha256(text.encode("utf-8")).hexdigest())
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape and UTF-8 cannot hold
        return Damage(file, position, "not valid Unicode")


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        zstandard = _optional("zstandard", path)
        return io.BufferedReader(zstandard.open(path, "rb", dctx=zstandard.ZstdDecompressor()))
    return path.open("rb")


def _parquet(files: list[File], recipe: Recipe) -> Iterator[Document | Damage]:
    for file in files:
        pyarrow, parquet = _optional("pyarrow", file.path), _optional("pyarrow.parquet", file.path)
        path, row = str(file.path), 0
        try:
            with parquet.ParquetFile(path) as table:
                if recipe.text_key not in table.schema_arrow.names:
                    yield Damage(path, "whole file", f"no column {recipe.text_key!r}")
                    continue
                for batch in table.iter_batches(batch_size=1024, columns=[recipe.text_key]):
                    for value in batch.column(0):
                        yield _cell(value, path, row, recipe.text_key)
                        row += 1
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            yield Damage(path, f"after row {row}" if row else "whole file", f"cannot be read ({reason})")


def _cell(value, path: str, row: int, key: str) -> Document | Damage:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return Damage(path, f"row {row}", "not UTF-8")
    return _checked(text, path, f"row {row}", f"no text in column {key!r}")


def _optional(module: str, path: Path):
    """Imports what only some formats need."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"{path}: reading it needs {module.split('.')[0]}; pip install jaxthru[formats]"
        ) from error

"""The checksums of a checkpoint: size and CRC-32 of every file in it, written before it is committed.

Orbax's storage notices a truncated index but not a flipped bit in an array's bytes; the checksums tell both.
"""

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etils import epath  # Orbax's paths

from jaxthru.runtime.bucket import AnyPath, entries

CHECKSUMS = "seal.json"
ALGORITHM = "crc32"
# Written by Orbax after the checksums, while it commits; nothing is read from them.
LEFT_OUT = frozenset({CHECKSUMS, "_CHECKPOINT_METADATA", "commit_success.txt"})
CHUNK = 1 << 22  # bytes read at a time


def write_checksums(directory: AnyPath) -> None:
    """Writes the checksums of everything below `directory`."""
    names = covered_names(directory)
    with ThreadPoolExecutor(max_workers=8) as pool:
        found = pool.map(lambda name: checksum(directory / name), names)
        content = {"algorithm": ALGORITHM, "files": dict(zip(names, found, strict=True))}
    with (directory / CHECKSUMS).open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        if isinstance(directory, Path):  # and no bucket, which keeps what it has taken
            os.fsync(file.fileno())


def broken(directory: AnyPath, part: int = 0, parts: int = 1) -> str | None:
    """Returns what is wrong with a directory by its checksums, in a few words, or None if all is as written.

    part, parts: looks only at every `parts`-th file, so that several processes can share the reading.
    """
    try:
        content = json.loads((directory / CHECKSUMS).read_text())
        if (algorithm := content["algorithm"]) != ALGORITHM:
            return f"{CHECKSUMS} has checksums by {algorithm!r}, and only {ALGORITHM} is known here"
        files = {name: (size, crc) for name, (size, crc) in content["files"].items()}
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except OSError as error:
        return f"{CHECKSUMS} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{CHECKSUMS} cannot be read"
    if extra := sorted(set(covered_names(directory)) - files.keys()):
        return f"{extra[0]} does not belong to it"
    with ThreadPoolExecutor(max_workers=8) as pool:
        faults = pool.map(lambda name: _fault(directory, name, files[name]), sorted(files)[part::parts])
        return next((fault for fault in faults if fault), None)


def _fault(directory: AnyPath, name: str, written: tuple[int, int]) -> str | None:
    path = directory / name
    try:
        stat = path.stat()
        size = stat.st_size if isinstance(path, Path) else stat.length
        if size != written[0]:
            return f"{name} has {size} bytes instead of {written[0]}"
        if checksum(path) != written:
            return f"{name} has other bytes than were written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except ValueError:  # a NUL in it
        return f"{CHECKSUMS} names {name!r}"
    return None


def covered_names(directory: AnyPath) -> list[str]:
    """Returns the paths, below `directory`, of the files that checksums cover."""
    files = (path.relative_to(directory) for path in files_below(directory))
    return sorted(str(path) for path in files if str(path) not in LEFT_OUT)


def absolute(path: AnyPath) -> epath.Path:
    """Returns a path as Orbax takes it: one on a disk made absolute."""
    return path if isinstance(path, epath.Path) else epath.Path(path.absolute())


def files_below(directory: AnyPath) -> Iterator[AnyPath]:
    """Yields the files in a directory and in those in it."""
    for path in entries(directory):
        if path.is_dir():
            yield from files_below(path)
        else:
            yield path


def checksum(path: AnyPath) -> tuple[int, int]:
    """Returns a file's size in bytes and its CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc

"""The seal of a checkpoint: size and CRC-32 of every file in it, written before it is committed.

Orbax's storage notices a truncated index but not a flipped bit in an array's bytes; the seal notices both.
"""

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SEAL = "seal.json"
# Written by Orbax after the seal, while it commits; nothing is read from them.
UNSEALED = frozenset({SEAL, "_CHECKPOINT_METADATA", "commit_success.txt"})
CHUNK = 1 << 22  # bytes read at a time


def write_seal(directory: Path) -> None:
    """Writes the seal of everything below `directory`."""
    names = sealed_names(directory)
    with ThreadPoolExecutor(max_workers=8) as pool:
        prints = pool.map(lambda name: fingerprint(directory / name), names)
        seal = {"algorithm": "crc32", "files": dict(zip(names, prints, strict=True))}
    with (directory / SEAL).open("w") as file:
        json.dump(seal, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def broken(directory: Path, part: int = 0, parts: int = 1) -> str | None:
    """Returns what is wrong with a sealed directory in a few words, or None if all is as it was sealed.

    part, parts: looks only at every `parts`-th file, so that several processes can share the reading.
    """
    try:
        seal = json.loads((directory / SEAL).read_text())
        files = {name: tuple(found) for name, found in seal["files"].items()}
    except FileNotFoundError:
        return f"{SEAL} is missing"
    except OSError as error:
        return f"{SEAL} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{SEAL} cannot be read"
    if extra := sorted(set(sealed_names(directory)) - files.keys()):
        return f"{extra[0]} does not belong to it"
    with ThreadPoolExecutor(max_workers=8) as pool:
        faults = pool.map(lambda name: _fault(directory, name, files[name]), sorted(files)[part::parts])
        return next((fault for fault in faults if fault), None)


def _fault(directory: Path, name: str, sealed: tuple[int, int]) -> str | None:
    path = directory / name
    try:
        size = path.stat().st_size
        if size != sealed[0]:
            return f"{name} has {size} bytes instead of {sealed[0]}"
        if fingerprint(path) != sealed:
            return f"{name} has other bytes than were written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except ValueError:  # a NUL in it
        return f"{SEAL} names {name!r}"
    return None


def sealed_names(directory: Path) -> list[str]:
    """Returns the paths, below `directory`, of the files that a seal covers."""
    files = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if str(path) not in UNSEALED)


def fingerprint(path: Path) -> tuple[int, int]:
    """Returns a file's size in bytes and its CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc

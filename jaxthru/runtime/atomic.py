"""Writing a file so that a kill leaves the old content or the new, never a part."""

import contextlib
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxthru.runtime.errors import InputError

STALE_SECONDS = 3600.0
"""No write takes so long: a partial file of another host that is older was left by a killed process."""


PARTIAL = re.compile(r"\.[0-9a-f]{32}\.(\d+)@([^/]+)\.partial$")
"""How the name of a file ends while it is written: (process, host). Others' may end in .partial, too."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes a file that is whole, whenever the process or the machine stops; makes its folder.

    Raises InputError when the disk is full or may not be written.
    """
    with written_atomically(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def written_atomically(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Yields a file to write to that gets its name, and so takes the place of an old one, once the block is
    left without an error; makes its folder.

    sync: wait for the disk; a file that checks itself when it is read can do without. Raises InputError when
    the disk is full or may not be written.
    """
    partial, named = path.with_name(f"{path.name}.{writer_id()}.partial"), False
    try:
        with _begun(partial) as stream:
            yield stream
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        partial.replace(path)
        named = True
        if sync:
            sync_folder(path.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        if not named:
            with contextlib.suppress(
                OSError
            ):  # a read-only file system refuses that even of what is not there
                partial.unlink(missing_ok=True)


def _begun(partial: Path) -> BinaryIO:
    """Returns a new file; its folder is there but for the first."""
    try:
        return partial.open("w+b")
    except FileNotFoundError:
        partial.parent.mkdir(parents=True, exist_ok=True)
        return partial.open("w+b")


def remove_partials(folder: Path) -> None:
    """Removes the unfinished files that killed writers of `write_atomically` have left in a folder and in the
    folders in it, where that may be written."""
    for path in (*folder.glob("*.partial"), *folder.glob("*/*.partial")):
        writer = PARTIAL.search(path.name)
        if writer and abandoned(path, writer[1], writer[2]):
            with contextlib.suppress(OSError):  # they are in nobody's way
                path.unlink(missing_ok=True)


def writer_id() -> str:
    """Returns what the name of something unfinished says of its writer: a fresh id, the process, the host."""
    return f"{uuid.uuid4().hex}.{os.getpid()}@{socket.gethostname()}"


def abandoned(path: Path, process: str, host: str) -> bool:
    """Says whether what a process on a host was writing has been left by it."""
    if host == socket.gethostname():
        return not _runs(int(process))
    return time.time() - _changed(path) > STALE_SECONDS


def sync_folder(folder: Path) -> None:
    """Has the new name of a file outlast a loss of power, where the file system can promise that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # its writer has finished it meanwhile
        return time.time()

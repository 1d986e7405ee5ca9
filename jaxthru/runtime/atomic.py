"""Writing a file so that a kill leaves the old content or the new, never a part."""

import os
import uuid
from pathlib import Path

from jaxthru.runtime.errors import InputError


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes a file that is whole, whenever the process or the machine stops; makes its folder.

    Raises InputError when the disk is full or may not be written.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)

"""Files that are memory-mapped: one that is cut while it is read ends the process in one line.

The kernel sends SIGBUS to whoever reads a page that the file has no more, or that its disk does not give. To
compare sizes before each read would not help, for the file may be cut in between, and to read by calls in
place of maps would copy everything.
"""

import mmap
import os
import signal
import weakref

from jaxthru.runtime import crashes
from jaxthru.runtime.errors import one_line
from jaxthru.runtime.exit_codes import BAD_INPUT, CANNOT_GO_ON

_maps: "weakref.WeakKeyDictionary[mmap.mmap, tuple[str, str]]" = weakref.WeakKeyDictionary()


def remember(mapped: mmap.mmap, path: str, remedy: str) -> mmap.mmap:
    """Returns a map of a whole file, whose path and remedy will be said if it can be read no more."""
    if not _maps:
        crashes.explain(signal.SIGBUS, _reason)
    _maps[mapped] = str(path), remedy
    return mapped


def _reason() -> tuple[str, int] | None:
    """Returns the line and the exit code for the file that has become too short; else for any."""
    maps = list(_maps.items())
    for mapped, (path, remedy) in maps:
        try:
            found = os.stat(path).st_size  # noqa: PTH116 - of a path as text
        except OSError:  # its pages stay there as long as it is mapped
            continue
        if found < len(mapped):
            cut = f"{path}: was cut from {len(mapped)} to {found} bytes while it was read; {remedy}"
            return one_line(cut), BAD_INPUT
    if not maps:
        return None
    said = f"a disk gives the pages of a mapped file no more (SIGBUS): of {maps[0][1][0]}, say"
    return one_line(said), CANNOT_GO_ON

"""Orbax's settings: it logs little, copies a few arrays at a time, and commits checkpoints with checksums."""

import functools
import logging
import sys
from pathlib import Path

import orbax.checkpoint as ocp
from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback, TransferPriority

from jaxthru.training.checksums import write_checksums


class ByTurns(DefaultSerializationStatusCallback):
    """Has Orbax heed `save_device_host_concurrent_gb`, which 0.12.4 to 0.12.8 do for nothing that is to be
    copied at once. The counters are: it warns if nothing is."""

    def key_priority(self, keypath: tuple) -> TransferPriority:
        at_once = len(keypath) == 1
        return TransferPriority.SYNCHRONOUS if at_once else TransferPriority.ASYNCHRONOUS_DEPRIORITIZED


@functools.cache
def quieten() -> None:
    """Keeps Orbax from saying what it does, and what it raises besides. When one array cannot be written, the
    writes under way break off in threads of its storage, each with a traceback."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(raised) -> None:
        code = getattr(raised.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        if not abandoned and str(raised.exc_value) != "Event loop is closed":
            before(raised)

    sys.unraisablehook = hook


def checksummed_path(after_commit) -> type:
    """Returns Orbax's way to commit by renaming, with checksums before and `after_commit` behind it."""

    class ChecksummedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
        async def finalize(self):
            write_checksums(Path(self.get()))
            await super().finalize()
            after_commit()

    return ChecksummedPath

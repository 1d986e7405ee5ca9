"""Orbax's settings: it logs little, copies a few arrays at a time, and commits checkpoints with checksums."""

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback, TransferPriority

from jaxthru.runtime.bucket import AnyPath, scheme_of
from jaxthru.training.checksums import write_checksums

Call = Callable[[], None]


class ByTurns(DefaultSerializationStatusCallback):
    """Has Orbax heed `save_device_host_concurrent_gb`, which 0.12.4 to 0.12.8 do for nothing that is to be
    copied at once. The counters are: it warns if nothing is."""

    def key_priority(self, keypath: tuple) -> TransferPriority:
        at_once = len(keypath) == 1
        return TransferPriority.SYNCHRONOUS if at_once else TransferPriority.ASYNCHRONOUS_DEPRIORITIZED


def of_arrays(primary: int | None, in_place: int) -> dict[str, Any]:
    """Returns settings of `PyTreeCheckpointHandler`. primary: the process that commits; None: each has a
    directory of its own and writes all of its shards. in_place: as of `Checkpointer`."""
    handler: dict[str, Any] = {"callback": ByTurns()} if in_place else {}
    if primary is None:
        handler |= {"primary_host": None, "replica_id": None, "use_replica_parallel": False}
    if not handler:
        return {}
    arrays = (jax.Array, ocp.type_handlers.ArrayHandler(**handler))
    settings = {"type_handler_registry": ocp.type_handlers.create_type_handler_registry(arrays)}
    little = 1 + 2 * in_place // 10**9
    limits = {"save_device_host_concurrent_gb": little, "restore_concurrent_gb": little}
    return settings | (limits if in_place else {})


def prepare(directory: AnyPath) -> None:
    """Makes Orbax fit to write and read checkpoints in a directory, on a disk or in a bucket."""
    _quieten()
    if scheme_of(directory) == "s3":
        from jaxthru.training import s3  # not before: it needs what Orbax calls private

        s3.teach_orbax()


@functools.cache
def _quieten() -> None:
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


def path_that_commits(in_bucket: bool) -> type:
    """Returns Orbax's way to commit: by renaming, or in a bucket, where nothing can be renamed at once, by a
    file that is written last."""
    atomicity = ocp.path.atomicity
    return atomicity.CommitFileTemporaryPath if in_bucket else atomicity.AtomicRenameTemporaryPath


def checksummed_path(before_commit: Call, after_commit: Call, in_bucket: bool = False) -> type:
    """Returns Orbax's way to commit, with checksums and a call before it, and another behind."""

    class ChecksummedPath(path_that_commits(in_bucket)):
        async def finalize(self):
            before_commit()
            write_checksums(self.get() if in_bucket else Path(self.get()))
            await super().finalize()
            after_commit()

    return ChecksummedPath

"""Saves and restores the training state, asynchronously and atomically; skips damaged checkpoints.

checkpoints/<step>/state/     Orbax: the arrays, laid out as in training/layout.py
checkpoints/<step>/data/      the data state, as JSON
checkpoints/<step>/seal.json  a checksum of every file, see training/checksums.py
damaged/<step>/               what was found broken; nothing is deleted

All processes call the methods together and share one file system; each writes the shards that it holds. A
second tier may lie on the hosts' own disks, see training/local_tier.py: the newest whole checkpoint of either
is the one that a run goes on from.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxthru.runtime.distributed import from_first, is_primary
from jaxthru.runtime.errors import TrainingError
from jaxthru.training import layout
from jaxthru.training.checkpoint_config import CheckpointConfig, LocalTierConfig
from jaxthru.training.checksums import AnyPath, absolute
from jaxthru.training.local_tier import LocalTier, common_steps, shards
from jaxthru.training.save_times import SaveTimes
from jaxthru.training.tier import TEMPORARY, CheckpointError, Tier, saved_steps

__all__ = [
    "TEMPORARY",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "LocalTierConfig",
    "newest_data_state",
    "newest_step",
    "saved_steps",
]

log = logging.getLogger(__name__)
PyTree = Any
SECONDS_AFTER_A_FAULT = 8.0
"""How long one of several processes that failed waits for a write to be committed."""


def newest_step(directory: AnyPath) -> int | None:
    """Returns the newest committed step as process 0 sees it: a file system may be slow to show it to all."""
    return from_first(lambda: max(saved_steps(directory), default=None))


def newest_data_state(directory: AnyPath, local: Path | None = None) -> dict:
    """Returns the data state of the newest checkpoint that it can be read from, {} if there is none.

    It is wanted before the parameters are restored, for it says which data to open. local: the directory of
    this process's local checkpoints.
    """

    def read() -> dict:
        folders = [folder for folder in (directory, local) if folder]
        found = [(step, folder) for folder in folders for step in saved_steps(folder)]
        for step, folder in sorted(found, key=lambda each: each[0], reverse=True):
            saved = absolute(folder) / f"{step}/data"
            # One that is damaged is passed over, as restoring does, which says so.
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if isinstance(state := ocp.JsonCheckpointHandler().restore(saved), dict):
                    return state
        return {}

    return from_first(read)


class Checkpointer:
    """Writes checkpoints in the background and reads the newest whole one. A context manager: leaving it
    waits for the writes in progress."""

    def __init__(
        self,
        directory: AnyPath,
        config: CheckpointConfig,
        in_place: int = 0,
        local: Path | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ):
        """directory: `checkpoints` of a run directory; made with the first checkpoint.

        in_place: bytes of the largest array of a state that lives in host memory. It is written from there,
        and what of it lives on the device a little at a time, while the caller waits: copied to the host at
        once, as else, it would take the memory of a second state there. 0: of one on the device.
        local: directory of this process's local checkpoints, see `local_tier.located`; None for no such tier.
        before_commit: process 0 calls it, in another thread, before a checkpoint that is not local counts.
        """
        self.config = config
        self._shared = Tier(directory, config.keep, config.keep_every, in_place, before_commit)
        self._local = LocalTier(local, config.local.keep, in_place) if local else None
        self._times = {self._shared: SaveTimes(config.every)}
        if self._local:
            self._times[self._local] = SaveTimes(config.local.every)
        self._tiers = [*self._times]
        self._in_place = in_place > 0

    @property
    def directory(self) -> AnyPath:
        """Returns the directory of the checkpoints that all processes share."""
        return self._shared.directory

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self._wait_at_the_end(failed=error is not None)
        except CheckpointError as failure:
            if error is None:
                raise
            if isinstance(error, TrainingError):  # of the same full disk, say: one line for both
                raise CheckpointError(f"{error}; {failure}") from error
            log.error("%s", failure)  # and let the first error go on
        finally:
            if error is None or jax.process_count() == 1:  # else it may wait for others
                for tier in self._tiers:
                    with contextlib.suppress(Exception):  # all that was to be saved has been waited for
                        tier.close()

    def _wait_at_the_end(self, failed: bool) -> None:
        """Waits for the writes in progress: for those that other processes may no more take part in, a while.
        Raises CheckpointError if one has failed."""
        if not failed or jax.process_count() == 1:
            self.wait()
            return
        failures = []

        def wait() -> None:  # an error that leaves a thread is a traceback of its own
            try:
                self.wait()
            except CheckpointError as failure:
                failures.append(failure)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(SECONDS_AFTER_A_FAULT)
        if failures:
            raise failures[0]

    def steps(self) -> list[int]:
        """Returns the steps of all committed checkpoints that are shared, oldest first."""
        return self._shared.steps()

    def due(self, step: int, last: bool) -> Tier | None:
        """Returns where the state after `step` updates is to be saved, if it is: not in both places. Call it
        once after each step. last: it is the run's last. Raises CheckpointError if a write in progress is
        known to have failed: other processes may wait for it."""
        for tier in self._tiers:
            tier.check(step)
        config = self.config
        due = [tier for tier, times in self._times.items() if times.due(step)]
        kept = config.keep_every and isinstance(config.every, str) and step % config.keep_every == 0
        if self._shared in due or kept or (last and config.last):
            return self._shared
        return due[0] if due else None

    def save(self, step: int, state: PyTree, data_state: dict, tier: Tier | None = None) -> None:
        """Starts to save; returns when `state` may be donated to the next step. The step that was saved or
        restored last is not saved again.

        step: completed updates. data_state: anything that JSON can hold. tier: where, as `due` says; None is
        what all processes share. A save waits for the one before, in either tier.
        Raises CheckpointError if this save cannot start or the one before it failed, ValueError for a state
        that a layered step has not settled.
        """
        tier = tier or self._shared
        if step == tier.newest:
            return
        if "pending" in state:
            raise ValueError("a state with a pending update is not whole: save DispatchedStep.settled of it")
        self.wait()  # one write at a time, over both tiers
        # On a GPU or TPU Orbax returns when all arrays have been copied to the host. On a CPU it keeps views
        # of the arrays' own memory; XLA does not reuse memory that is so held, but gives the update new.
        tier.save(step, layout.to_disk(state), data_state)
        if self._local and tier is self._shared:
            self._local.shared_at = time.time()
        if self._in_place:
            tier.wait()  # the next step uses the state up

    def wait(self) -> None:
        """Returns when nothing is being written. Raises CheckpointError if the last save failed."""
        for tier in self._tiers:
            tier.wait()

    def restore(self, abstract_state: PyTree) -> tuple[int, PyTree, dict] | None:
        """Returns (step, state, data state) of the newest checkpoint that is whole in all processes, of
        either tier, or None if none was ever saved.

        abstract_state: jax.ShapeDtypeStructs with shardings; the mesh and the form of the layers may differ
        from those that were saved. Damaged checkpoints are reported and passed over; those that all share are
        moved aside, local ones deleted.
        Raises InputError if the checkpoint is of another model or optimizer, or the mesh is one of which no
        local ones can be saved, CheckpointError if there were checkpoints but none of them is whole.
        """
        self.wait()
        if self._local:  # before there is something to lose
            shards(layout.abstract_disk(abstract_state))
        local = common_steps(self._local.directory) if self._local else []
        passed: list[int] = []
        while True:
            shared = newest_step(self.directory)
            if local and local[0] >= (shared or 0):
                step, tier = local.pop(0), self._local
            elif shared is not None:
                step, tier = shared, self._shared
            else:
                break
            log.info("restoring %s %d ...", tier.name, step)
            reason = tier.damage(step, abstract_state)
            if reason is None:
                state, data_state = tier.read(step, abstract_state)
                if self._local:
                    self._local.drop(after=step, useless=passed)
                if tier is self._local:  # else crashes could put the next shared one off for good
                    self._times[self._shared].ago = time.time() - self._local.shared_at
                return step, state, data_state
            if tier is self._shared:
                tier.move_aside(step, reason)
            else:
                passed.append(step)
                if is_primary():
                    log.warning("%s %d is passed over: %s", tier.name, step, reason)
        damaged = self.directory.parent / "damaged"
        if from_first(damaged.is_dir):
            raise CheckpointError(
                f"{self.directory}: no checkpoint can be restored: all were damaged and lie in {damaged}; "
                "give another run directory to start from the beginning"
            )
        if passed:
            raise CheckpointError(
                f"{self._local.directory}: none of its checkpoints can be restored, and {self.directory} "
                "holds none; give another run directory to start from the beginning"
            )
        if self._local:  # what is left is of no use, and in the way of what will be saved at these steps
            self._local.drop(after=0)
        return None

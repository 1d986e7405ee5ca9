"""What a data server has for all of its trainers: the data, the plans, and batches that are built once.

A batch lies in memory that trainers map as it is. It is held for each of them until that one gives its number
back; then, as in a process that is alone, its memory is used again. What a trainer has not given back when it
leaves is not: there may be arrays that outlive its connections.
"""

import collections
import concurrent.futures
import itertools
import logging
import os
import secrets
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from jaxthru.data.loading.batch_memory import MOST, BatchMemory
from jaxthru.data.loading.dataset import Data, DataConfig, open_data
from jaxthru.data.loading.host_channel import Arrays, SharedBlock
from jaxthru.data.loading.planned_batches import PlannedBatches
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.schedule import Schedule
from jaxthru.runtime.errors import require

log = logging.getLogger("jaxthru")

KEPT = 16
"""Batches that are kept for trainers that take the same rows and have not asked for them yet."""
SAME = ("sequence", "packing", "over_long", "groups")
"""Keys of `data` that decide what a batch holds: the same in all processes of a run."""


class Blocks:
    """The blocks of memory that batches lie in."""

    def __init__(self):
        self._at = weakref.WeakValueDictionary[int, SharedBlock]()

    def memory(self, most: int) -> BatchMemory:
        """Returns memory for batches, of which `most` blocks of a size are kept."""
        return BatchMemory(self._allocate, most, lambda block: not block.left)

    def leave(self, batch: Arrays) -> None:
        """Has nothing written any more where a batch lies."""
        if placed := self.places(batch):
            placed[0].left = True

    def _allocate(self, size: int) -> SharedBlock:
        block = SharedBlock(size)
        self._at[np.frombuffer(block, np.uint8).ctypes.data] = block
        return block

    def __len__(self) -> int:
        return len(self._at)

    def places(self, batch: Arrays) -> tuple[SharedBlock, dict[str, int]] | None:
        """Returns the block of a batch and where in it each field begins, in bytes; None if some lies
        elsewhere."""
        first = min(array.ctypes.data for array in batch.values())
        block = self._at.get(first)
        places = {name: array.ctypes.data - first for name, array in batch.items()}
        inside = block and all(places[name] + each.nbytes <= len(block) for name, each in batch.items())
        return (block, places) if inside else None


class Server:
    """What all connections share."""

    def __init__(self):
        self.data: Data | None = None
        self.blocks, self.identity = Blocks(), os.getpid()
        self.connections = collections.Counter[str]()  # of each trainer
        self._lock = threading.Lock()
        self.plans: dict[str, PlannedBatches] = {}
        self._takers = collections.defaultdict[tuple, set[str]](set)  # trainers that take such rows
        self.built: dict[tuple, Built] = {}
        self._held = collections.defaultdict[str, dict[int, Arrays]](dict)  # of each trainer
        # A number that a trainer has from a server before this one must not be one of this one's.
        self._numbers = itertools.count(secrets.randbits(60))

    def open(
        self, config: dict[str, Any], keys: dict[str, str], kept: str | None, cores: list[int], trainers: int
    ):
        """Opens the data for the first trainer that asks; others must want the same. cores: that the trainers
        may use, all of them together. trainers: of this host, how many. Raises InputError."""
        with self._lock:
            if self.data is None:
                _take_cores(cores)
                how = {"prepare": False, "begun": keys, "kept": Path(kept) if kept else None}
                self.data = open_data(DataConfig(**config), **how)
                self.data.builder.memory = self.blocks.memory(trainers * MOST)
            for name in SAME:
                here = getattr(self.data.config, name)
                said = f"data.{name} = {config[name]}: another process of this run on this host has {here}"
                require(config[name] == here, f"{said}; give all the same configuration")
            other = ", ".join(name for name, key in self.data.keys.items() if keys.get(name) != key)
            require(not other, f"sources that differ between processes of this run on this host: {other}")

    def plan(self, key: str, schedule: list, **asked: Any) -> PlannedBatches:
        """Returns the plan of this key, which is made if it is new. Raises InputError."""
        with self._lock:
            if key not in self.plans:
                self.plans[key] = PlannedBatches(self.data, schedule_of(schedule), **asked)
            return self.plans[key]

    def takes(self, trainer: str, key: str, local: tuple[int, int]) -> None:
        """Notes that a trainer takes these rows of the batches of a plan."""
        with self._lock:
            self._takers[key, local].add(trainer)

    def batch(self, trainer: str, key: str, local: tuple[int, int], step: int) -> tuple[int, Arrays]:
        """Returns a number and the batch of update `step` + 1, which is held until the trainer gives the
        number back. It is built once for all trainers that take it."""
        with self._lock:
            mine = (key, local, step) not in self.built
            built = self.built.setdefault((key, local, step), Built())
        if mine:
            try:
                built.future.set_result(self.plans[key].build(step, slice(*local)))
            except BaseException as error:
                built.future.set_exception(error)
        try:
            batch = built.future.result()
        except BaseException:
            with self._lock:
                self._forget(key, local, step, built)
            raise
        with self._lock:
            built.taken.add(trainer)
            if built.taken >= self._takers[key, local]:
                self._forget(key, local, step, built)
            done = [each for each, other in self.built.items() if other.future.done()]
            for each in done[: max(len(done) - KEPT * len(self._takers), 0)]:
                del self.built[each]
            number = next(self._numbers)
            self._held[trainer][number] = batch
        return number, batch

    def release(self, trainer: str, numbers: list[int]) -> None:
        """Lets go of batches that a trainer has no use for any more."""
        for number in numbers:
            self._held[trainer].pop(number, None)

    def joined(self, trainer: str) -> None:
        """Counts a connection."""
        with self._lock:
            self.connections[trainer] += 1

    def left(self, trainer: str) -> None:
        """Forgets a connection, and a trainer with its last."""
        with self._lock:
            self.connections[trainer] -= 1
            if self.connections[trainer] <= 0:
                del self.connections[trainer]
                for batch in self._held.pop(trainer, {}).values():
                    self.blocks.leave(batch)
                for takers in self._takers.values():
                    takers.discard(trainer)

    def _forget(self, key: str, local: tuple[int, int], step: int, built: "Built") -> None:
        if self.built.get((key, local, step)) is built:
            del self.built[key, local, step]


class Built:
    """A batch that is built, or being built. taken: by which trainers."""

    def __init__(self):
        self.future, self.taken = concurrent.futures.Future[Arrays](), set[str]()


def schedule_of(tree: list) -> Schedule:
    """Returns the schedule that `host_pool` described."""
    return tuple((step, Mixture.from_tree(mixture)) for step, mixture in tree)


def _take_cores(cores: list[int]) -> None:
    """Lets this process, and what it starts, run where any of its trainers may: it was started by one."""
    allowed = os.sched_getaffinity(0) | set(cores)
    try:
        for thread in Path("/proc/self/task").iterdir():  # each has its own
            os.sched_setaffinity(int(thread.name), allowed)
    except OSError:  # a thread has ended, or a control group allows fewer
        log.debug("the data server may not use all of the cores %s", sorted(allowed))

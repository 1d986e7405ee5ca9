"""The memory tally of a rehearsed step: what lives on a device and on its host, and copies under way.

It may have the places, too, that arrays get on a device, and so what the gaps between them take.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxthru.engine.best_fit import BestFit
from jaxthru.engine.offload import HOST
from jaxthru.profile.read.buffers import CATEGORIES, Breakdown

Tree = Any
NOTHING = Breakdown(dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0), 0, 0, "")


@dataclasses.dataclass(frozen=True)
class Moment:
    """One program of a step that is made of several, while it runs.

    program: what it needs beside arrays that live before it runs, its arguments among them. beside: bytes by
    category of those on the device. host: of those on the host.
    """

    name: str
    program: Breakdown
    beside: Mapping[str, int]
    host: Mapping[str, int]


@functools.cache
def shard_size(shape: tuple[int, ...], sharding: jax.sharding.NamedSharding) -> int:
    """Returns how many numbers of an array are on one device."""
    return math.prod(sharding.shard_shape(shape))


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes of one array, or of several that come and go as one: on one device, and in all. As an abstract
    array, it is placed by its sharding and its dims."""

    on_device: int
    nbytes: int
    sharding: jax.sharding.NamedSharding
    ndim: int

    @classmethod
    def of(cls, leaf: Any, sharding: jax.sharding.NamedSharding | None = None) -> "Size":
        sharding, item = sharding or leaf.sharding, leaf.dtype.itemsize
        on_device = item * shard_size(tuple(leaf.shape), sharding)
        return cls(on_device, item * math.prod(leaf.shape), sharding, leaf.ndim)

    def update(self, sharding: jax.sharding.NamedSharding) -> "Size":
        return dataclasses.replace(self, sharding=sharding)


@dataclasses.dataclass(eq=False)
class Copy:
    """Arrays on their way, all that one call has put. source_made: the last program whose result it reads.
    used_by: the first that reads what it writes. frees: what ends with it: (on the host, category, bytes,
    place)."""

    to_host: bool
    source_made: int
    used_by: int | None = None
    frees: list[tuple[bool, str, int, int | None]] = dataclasses.field(default_factory=list)


class Array:
    """Stands for a jax.Array. made: number of the program that makes it. comes: the copy that does. read:
    those that read it. place: of its memory, where places are told: new, or one that it takes over."""

    __slots__ = (
        "category",
        "comes",
        "gone",
        "like",
        "made",
        "on_host",
        "place",
        "read",
        "sharding",
        "size",
        "tally",
    )

    def __init__(
        self, tally: "MemoryTally", like: Size, sharding, category: str, made: int, comes=None, place=None
    ):
        self.tally, self.like, self.sharding = tally, like, sharding
        self.category, self.made, self.comes, self.gone = category, made, comes, False
        self.read: list[Copy] = []
        self.on_host = sharding.memory_kind == HOST
        self.size = like.on_device * (sharding.mesh.size if self.on_host else 1)
        tally.add(self.on_host, category, self.size)
        self.place = tally.take(self.size) if place is None and not self.on_host else place

    @property
    def nbytes(self) -> int:
        return self.like.nbytes

    def is_deleted(self) -> bool:
        return self.gone

    def delete(self) -> None:
        if self.gone:
            return
        self.gone = True
        self.tally.add(self.on_host, self.category, -self.size)
        under_way = [copy for copy in self.read if copy in self.tally.copies]
        if under_way:
            self.tally.add(self.on_host, "staging", self.size)
            under_way[-1].frees.append((self.on_host, "staging", self.size, self.place))
        else:
            self.tally.give(self.place)

    __del__ = delete

    def donate(self) -> int | None:
        """Deletes it, and returns its place, which another may take over or has to give."""
        place, self.place = self.place, None
        self.delete()
        return place

    def block_until_ready(self) -> "Array":
        self.tally.waited(self)
        return self


class MemoryTally:
    """What lives, by category: [False] on a device, [True] on the host. memory: of the device, by places."""

    def __init__(self, memory: BestFit | None = None):
        self.memory = memory
        self.live = [dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)]
        self.copies: list[Copy] = []
        self.moments: list[Moment] = []
        self.programs, self.latest, self.moved = 0, "start", 0
        # What was waited for since a copy or a program was last begun: to wait again ends nothing more.
        self.known: set[tuple[Copy | None, int]] = set()

    def add(self, on_host: bool, category: str, size: int) -> None:
        self.live[on_host][category] += size

    def take(self, size: int) -> int | None:
        """Returns a place on the device; None where they are not told."""
        return self.memory.take(size) if self.memory else None

    def give(self, place: int | None) -> None:
        if place is not None:
            self.memory.give(place)

    def arrays(self, sizes: Tree, category: str, made: int = 0) -> Tree:
        """Returns stand-ins for new arrays."""
        return jax.tree.map(lambda size: Array(self, size, size.sharding, category, made), sizes)

    def put(self, arrays: Iterable[Array], shardings: Iterable) -> list[Array]:
        """Stands for jax.device_put. What it is given is a part of the state, or what one block keeps: it
        comes and goes as one."""
        copied, copy = [], None
        self.known.clear()
        for array, sharding in zip(arrays, shardings, strict=True):
            if isinstance(array, np.generic):  # of the host's own
                copied.append(Array(self, Size.of(array, sharding), sharding, "other", 0))
                continue
            to_host = sharding.memory_kind == HOST
            if copy is None or copy.to_host != to_host:
                copy = Copy(to_host, array.made)
                self.copies.append(copy)
            copy.source_made = max(copy.source_made, array.made)
            array.read.append(copy)
            category = array.category if copy.to_host else "staging"
            copied.append(Array(self, array.like, sharding, category, array.made, copy))
            self.moved += min(array.size, copied[-1].size)
        if copied:
            self.moment(f"the copies after {self.latest}", NOTHING)
        return copied

    def moment(self, name: str, program: Breakdown) -> None:
        self.moments.append(Moment(name, program, dict(self.live[False]), dict(self.live[True])))

    def waited(self, array: Array) -> None:
        """Notes that the host has waited for an array."""
        if (what := (array.comes, array.made)) in self.known:
            return
        self.known.add(what)
        own = self.copies.index(array.comes) if array.comes in self.copies else -1

        over, left = [], []
        for place, copy in enumerate(self.copies):
            if place <= own and copy.to_host == array.comes.to_host:
                ended = True  # one after the other in each direction
            elif copy.to_host:
                ended = copy.source_made < array.made
            else:
                ended = copy.used_by is not None and copy.used_by <= array.made
            (over if ended else left).append(copy)
        self.copies = left
        for copy in over:
            for on_host, category, size, place in copy.frees:
                self.add(on_host, category, -size)
                self.give(place)

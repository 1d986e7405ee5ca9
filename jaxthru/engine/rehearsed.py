"""The rehearsed executor: arrays have a size and a place but no values, to count memory.

The dispatched step's own schedule is what is run: its programs and its copies are stand-ins that keep a tally
of what lives where, and so the tally cannot differ from the schedule. What a program needs beside its
arguments is read from its compile.

Approximate, to the safe side: a copy is taken to end only when the host has waited for it, or for a program
that needs it; until then both ends of it are counted, as `staging`. What only programs use is free as soon as
the last of them is dispatched, for they run in that order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxthru.engine.dispatched import DispatchedStep
from jaxthru.engine.offload import HOST
from jaxthru.engine.programs import trace
from jaxthru.engine.step import Batch, State
from jaxthru.models import scopes
from jaxthru.profile.read.buffers import CATEGORIES, Breakdown
from jaxthru.runtime.sharding import Layout

Tree = Any
NOTHING = Breakdown(dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0), 0, 0, "")
STEPS = 2  # the second begins while the last copies of the first are under way

RESULTS: dict[str, tuple[str, ...]] = {
    scopes.BEGIN: ("other", "other", "other"),
    scopes.EMBED: ("activations", "other"),
    scopes.FORWARD: ("activations", "activations", "other", "other"),
    scopes.LOSS_HEAD: ("other", "activations", "gradients", "gradients", "other"),
    scopes.BACKWARD: ("activations", "gradients", "other"),
    scopes.EMBED_BACKWARD: ("gradients", "other"),
    **dict.fromkeys(scopes.UPDATES, ("parameters", "optimizer")),
    scopes.FINISH: ("other", "other"),
}
"""Category of each result of a program."""

OUTPUT = {
    name: next((kind for kind in reversed(kinds) if kind != "other"), "other")
    for name, kinds in RESULTS.items()
}
"""Category of a program's large results that take over no argument's memory."""

TEMPORARY = {
    **dict.fromkeys(RESULTS, "activations"),
    **{scopes.BEGIN: "other", scopes.LOSS_HEAD: "loss", scopes.FINISH: "other"},
    **dict.fromkeys(scopes.UPDATES, "optimizer"),
}
"""Category of a program's temporaries."""


Analysis = Callable[[str, jax.stages.Traced], Breakdown]
"""What a program, by name, needs beside its arguments."""


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


class Rehearsal(NamedTuple):
    """moments: each program while it runs, and each start of copies. moved: bytes that a step copies
    between a device and its host, both ways."""

    moments: list[Moment]
    moved: int


def rehearse(
    make: Callable[[Callable, Callable], DispatchedStep],
    state: State,
    batch: Batch,
    layout: Layout,
    analysis: Analysis,
    trace: Callable[..., jax.stages.Traced] = trace,
) -> Rehearsal:
    """Returns what two steps need, dispatched one after the other.

    make: (compiler, put) -> the step. state, batch: abstract. trace: as `programs.trace`, which a caller may
    want to remember what it returned.
    """
    tally, moved = _MemoryTally(), []

    def compiler(name, function, arguments, donate=(), **settings):
        traced = trace(name, function, arguments, donate, **settings)
        results = _with_shardings(traced.out_info, layout)
        return _Program(tally, name, analysis(name, traced), results, donate), results

    step = make(compiler, tally.put)
    kinds = {"params": "parameters", "opt_state": "optimizer"}
    arrays = {name: tally.arrays(tree, kinds.get(name, "other")) for name, tree in state.items()}
    for _ in range(STEPS):
        arrays, _ = step(arrays, tally.arrays(batch, "other"))
        moved.append(tally.moved)
    step.settled(arrays)  # before a checkpoint and an evaluation; nothing else paces the stores
    return Rehearsal(tally.moments, moved[-1] - moved[-2])


def _with_shardings(results: Tree, layout: Layout) -> Tree:
    """Returns abstract arrays; what the compiler is free to place is taken to be split by rows, its second
    dim, as are all things of which there is one for each token."""

    def place(leaf):
        axes = (None, "batch") if len(leaf.shape) > 1 else ()
        sharding = leaf.sharding or layout.sharding(axes).with_memory_kind("device")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, results)


@dataclasses.dataclass(eq=False)
class _Copy:
    """On its way. source_made: the program whose result it reads. used_by: the first that reads what it
    writes. frees: what ends with it: (on the host, category, bytes)."""

    to_host: bool
    source_made: int
    used_by: int | None = None
    frees: list[tuple[bool, str, int]] = dataclasses.field(default_factory=list)


@functools.cache
def shard_size(shape: tuple[int, ...], sharding: jax.sharding.NamedSharding) -> int:
    """Returns how many numbers of an array are on one device."""
    return math.prod(sharding.shard_shape(shape))


class _Array:
    """Stands for a jax.Array. made: number of the program that makes it. comes: the copy that does. read:
    those that read it."""

    __slots__ = ("category", "comes", "dtype", "gone", "made", "read", "shape", "sharding", "size", "tally")

    def __init__(self, tally: "_MemoryTally", like, sharding, category: str, made: int, comes=None):
        self.tally, self.shape, self.dtype, self.sharding = tally, like.shape, like.dtype, sharding
        self.category, self.made, self.comes, self.gone = category, made, comes, False
        self.read: list[_Copy] = []
        size = self.dtype.itemsize * shard_size(tuple(self.shape), sharding)
        self.size = size * (sharding.mesh.size if self.on_host else 1)
        tally.add(self.on_host, category, self.size)

    @property
    def on_host(self) -> bool:
        return self.sharding.memory_kind == HOST

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

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
            under_way[-1].frees.append((self.on_host, "staging", self.size))

    __del__ = delete

    def block_until_ready(self) -> "_Array":
        self.tally.waited(self)
        return self


class _MemoryTally:
    """What lives, by category: [False] on a device, [True] on the host."""

    def __init__(self):
        self.live = [dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)]
        self.copies: list[_Copy] = []
        self.moments: list[Moment] = []
        self.programs, self.latest, self.moved = 0, "start", 0
        # What was waited for since a copy or a program was last begun: to wait again ends nothing more.
        self.known: set[tuple[_Copy | None, int]] = set()

    def add(self, on_host: bool, category: str, size: int) -> None:
        self.live[on_host][category] += size

    def arrays(self, abstract: Tree, category: str, made: int = 0) -> Tree:
        """Returns stand-ins for new arrays."""
        return jax.tree.map(lambda leaf: _Array(self, leaf, leaf.sharding, category, made), abstract)

    def put(self, arrays: Iterable[_Array], shardings: Iterable) -> list[_Array]:
        """Stands for jax.device_put."""
        copied = []
        for array, sharding in zip(arrays, shardings, strict=True):
            if isinstance(array, np.generic):  # of the host's own
                copied.append(_Array(self, array, sharding, "other", 0))
                continue
            copy = _Copy(sharding.memory_kind == HOST, array.made)
            self.known.clear()
            self.copies.append(copy)
            array.read.append(copy)
            category = array.category if copy.to_host else "staging"
            copied.append(_Array(self, array, sharding, category, array.made, copy))
            self.moved += min(array.size, copied[-1].size)
        if copied:
            self.moment(f"the copies after {self.latest}", NOTHING)
        return copied

    def moment(self, name: str, program: Breakdown) -> None:
        self.moments.append(Moment(name, program, dict(self.live[False]), dict(self.live[True])))

    def waited(self, array: _Array) -> None:
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
            for on_host, category, size in copy.frees:
                self.add(on_host, category, -size)


class _Program:
    """Stands for a compiled program."""

    def __init__(self, tally: _MemoryTally, name: str, needs: Breakdown, results: Tree, donate: tuple):
        self.tally, self.name, self.needs = tally, name, needs
        self.results, self.donate = results, donate

    def __call__(self, *arguments) -> Tree:
        tally = self.tally
        tally.programs += 1
        tally.known.clear()
        tally.latest = self.name
        for leaf in jax.tree.leaves(arguments):
            if isinstance(leaf, _Array) and leaf.comes is not None and leaf.comes.used_by is None:
                leaf.comes.used_by = tally.programs
        tally.moment(self.name, self.needs)
        for index in self.donate:
            for leaf in jax.tree.leaves(arguments[index]):
                leaf.delete()
        pairs = zip(self.results, RESULTS[scopes.program_of(self.name)], strict=True)
        return tuple(tally.arrays(result, kind, tally.programs) for result, kind in pairs)

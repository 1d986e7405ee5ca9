"""The rehearsed executor: arrays have a size and a place but no values, to count memory.

The dispatched step's own schedule is what is run: its programs and its copies are stand-ins that keep account
of what lives where, and so the account cannot differ from the schedule. What a program needs beside its
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
from jaxthru.engine.model import parts
from jaxthru.engine.offload import HOST, OffloadConfig, on_device, placed
from jaxthru.engine.programs import trace
from jaxthru.engine.step import Batch, State, counters_of, slots_by_part, state_of
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


class Rehearsals:
    """A step that is rehearsed with any part of its state on the host: its programs are the same with all."""

    def __init__(
        self,
        make: Callable[[Callable, Callable], DispatchedStep],
        state: State,
        batch: Batch,
        layout: Layout,
        analysis: Analysis,
    ):
        """make: (compiler, put) -> the step. state, batch: abstract. analysis: is asked once a program."""
        self._account = _Account()

        def compiler(name, function, arguments, donate=(), **settings):
            traced = trace(name, function, arguments, donate, **settings)
            results = _placed(traced.out_info, layout)
            sizes, needs = _results(name, results), analysis(name, traced)
            return _Program(lambda: self._account, name, needs, sizes, donate), results

        self._step = make(compiler, lambda *arguments: self._account.put(*arguments))
        self._state, self._batch = _by_part(state), _sizes(batch)

    def __call__(self, offload: OffloadConfig) -> Rehearsal:
        """Returns what two steps need with this offload, dispatched one after the other."""
        account = self._account = _Account()
        state, moved = placed(self._state, offload), []
        step = self._step.at_home(offload, state)
        kinds = {"params": "parameters", "opt_state": "optimizer"}
        arrays = {name: account.arrays(tree, kinds.get(name, "other")) for name, tree in state.items()}
        for _ in range(STEPS):
            arrays, _ = step(arrays, account.arrays(self._batch, "other"))
            moved.append(account.moved)
        step.settled(arrays)  # before a checkpoint and an evaluation; nothing else paces the stores
        return Rehearsal(account.moments, moved[-1] - moved[-2])


def _placed(results: Tree, layout: Layout) -> Tree:
    """Returns abstract arrays; what the compiler is free to place is taken to be split by rows, its second
    dim, as are all things of which there is one for each token."""

    def place(leaf):
        axes = (None, "batch") if len(leaf.shape) > 1 else ()
        sharding = leaf.sharding or layout.sharding(axes).with_memory_kind("device")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, results)


@functools.cache
def shard_size(shape: tuple[int, ...], sharding: jax.sharding.NamedSharding) -> int:
    """Returns how many numbers of an array are on one device."""
    return math.prod(sharding.shard_shape(shape))


@dataclasses.dataclass(frozen=True)
class _Size:
    """Bytes of one array, or of several that come and go as one: on one device, and in all. As an abstract
    array, it is placed by its sharding and its dims."""

    on_device: int
    nbytes: int
    sharding: jax.sharding.NamedSharding
    ndim: int

    @classmethod
    def of(cls, leaf: Any, sharding: jax.sharding.NamedSharding | None = None) -> "_Size":
        sharding, item = sharding or leaf.sharding, leaf.dtype.itemsize
        on_device = item * shard_size(tuple(leaf.shape), sharding)
        return cls(on_device, item * math.prod(leaf.shape), sharding, leaf.ndim)

    def update(self, sharding: jax.sharding.NamedSharding) -> "_Size":
        return dataclasses.replace(self, sharding=sharding)


def _sizes(tree: Tree) -> Tree:
    return jax.tree.map(_Size.of, tree)


def _whole(tree: Tree) -> dict[str, _Size | None]:
    """Returns a part's abstract tree as two sizes: of its matrices, which offload moves, and of the rest.

    A model of 64 layers has thousands of leaves, and a search rehearses it tens of times.
    """
    leaves = jax.tree.leaves(tree)

    def total(leaves: list, ndim: int) -> _Size | None:
        sizes = _sizes(leaves)
        sums = (sum(each.on_device for each in sizes), sum(each.nbytes for each in sizes))
        return _Size(*sums, sizes[0].sharding, ndim) if sizes else None

    groups = [leaf for leaf in leaves if leaf.ndim > 1], [leaf for leaf in leaves if leaf.ndim < 2]
    return {"matrices": total(groups[0], 2), "rest": total(groups[1], 1)}


def _by_part(state: State) -> State:
    """Returns an abstract state on the device, each part's weights and its slots as `_whole` has them."""
    state = jax.tree.map(lambda leaf, home: leaf.update(sharding=home), state, on_device(state))
    weights, slots = map(_whole, parts(state["params"])), map(_whole, slots_by_part(state))
    counters = _sizes(counters_of(state))
    return state_of(list(weights), [{"all": each} for each in slots], counters, state["params"])


def _results(name: str, results: tuple) -> tuple:
    """Returns the sizes of a program's results, those of the state and gradients as `_whole` has them."""

    def sizes(tree: Tree, kind: str) -> Tree:
        if tree is None or kind not in ("parameters", "optimizer", "gradients"):
            return _sizes(tree)
        return {"all": _whole(tree)} if kind == "optimizer" else _whole(tree)

    return tuple(map(sizes, results, RESULTS[scopes.program_of(name)]))


@dataclasses.dataclass(eq=False)
class _Copy:
    """Arrays on their way, all that one call has put. source_made: the last program whose result it reads.
    used_by: the first that reads what it writes. frees: what ends with it: (on the host, category, bytes)."""

    to_host: bool
    source_made: int
    used_by: int | None = None
    frees: list[tuple[bool, str, int]] = dataclasses.field(default_factory=list)


class _Array:
    """Stands for a jax.Array. made: number of the program that makes it. comes: the copy that does. read:
    those that read it."""

    __slots__ = (
        "account",
        "category",
        "comes",
        "gone",
        "like",
        "made",
        "on_host",
        "read",
        "sharding",
        "size",
    )

    def __init__(self, account: "_Account", like: _Size, sharding, category: str, made: int, comes=None):
        self.account, self.like, self.sharding = account, like, sharding
        self.category, self.made, self.comes, self.gone = category, made, comes, False
        self.read: list[_Copy] = []
        self.on_host = sharding.memory_kind == HOST
        self.size = like.on_device * (sharding.mesh.size if self.on_host else 1)
        account.add(self.on_host, category, self.size)

    @property
    def nbytes(self) -> int:
        return self.like.nbytes

    def is_deleted(self) -> bool:
        return self.gone

    def delete(self) -> None:
        if self.gone:
            return
        self.gone = True
        self.account.add(self.on_host, self.category, -self.size)
        under_way = [copy for copy in self.read if copy in self.account.copies]
        if under_way:
            self.account.add(self.on_host, "staging", self.size)
            under_way[-1].frees.append((self.on_host, "staging", self.size))

    __del__ = delete

    def block_until_ready(self) -> "_Array":
        self.account.waited(self)
        return self


class _Account:
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

    def arrays(self, sizes: Tree, category: str, made: int = 0) -> Tree:
        """Returns stand-ins for new arrays."""
        return jax.tree.map(lambda size: _Array(self, size, size.sharding, category, made), sizes)

    def put(self, arrays: Iterable[_Array], shardings: Iterable) -> list[_Array]:
        """Stands for jax.device_put. What it is given is a part of the state, or what one block keeps: it
        comes and goes as one."""
        copied, copy = [], None
        self.known.clear()
        for array, sharding in zip(arrays, shardings, strict=True):
            if isinstance(array, np.generic):  # of the host's own
                copied.append(_Array(self, _Size.of(array, sharding), sharding, "other", 0))
                continue
            to_host = sharding.memory_kind == HOST
            if copy is None or copy.to_host != to_host:
                copy = _Copy(to_host, array.made)
                self.copies.append(copy)
            copy.source_made = max(copy.source_made, array.made)
            array.read.append(copy)
            category = array.category if copy.to_host else "staging"
            copied.append(_Array(self, array.like, sharding, category, array.made, copy))
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

    def __init__(
        self, account: Callable[[], _Account], name: str, needs: Breakdown, results: Tree, donate: tuple
    ):
        """account: returns the one of the rehearsal that is under way."""
        self.account, self.name, self.needs = account, name, needs
        self.results, self.donate = results, donate

    def __call__(self, *arguments) -> Tree:
        account = self.account()
        account.programs += 1
        account.known.clear()
        account.latest = self.name
        for leaf in jax.tree.leaves(arguments):
            if isinstance(leaf, _Array) and leaf.comes is not None and leaf.comes.used_by is None:
                leaf.comes.used_by = account.programs
        account.moment(self.name, self.needs)
        for index in self.donate:
            for leaf in jax.tree.leaves(arguments[index]):
                leaf.delete()
        pairs = zip(self.results, RESULTS[scopes.program_of(self.name)], strict=True)
        return tuple(account.arrays(result, kind, account.programs) for result, kind in pairs)

"""The rehearsed executor: arrays have a size and a place but no values, to count memory.

The dispatched step's own schedule is what is run: its programs and its copies are stand-ins that keep a tally
of what lives where, and so the tally cannot differ from the schedule. What a program needs beside its
arguments is read from its compile.

Approximate, to the safe side: a copy is taken to end only when the host has waited for it, or for a program
that needs it; until then both ends of it are counted, as `staging`. What only programs use is free as soon as
the last of them is dispatched, for they run in that order.

Arrays are counted a stage's as one or two, which is fast, or each has the place that XLA's allocator gives it
(best_fit.py): then the gaps between them count, too.
"""

import collections
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxthru.engine.best_fit import BestFit
from jaxthru.engine.dispatched import DispatchedStep
from jaxthru.engine.memory_tally import Array, MemoryTally, Moment, Size
from jaxthru.engine.model import split_stages
from jaxthru.engine.offload import OffloadConfig, offloaded_state, on_device
from jaxthru.engine.programs import trace
from jaxthru.engine.step import Batch, State, counters_of, slots_by_stage, state_of
from jaxthru.models import scopes
from jaxthru.profile.read.buffers import Breakdown
from jaxthru.runtime.sharding import Layout

Tree = Any
STEPS = 2  # the second begins while the last copies of the first are under way
PLACED_STEPS = 16  # by when gaps have grown to within 0.5 % of what they ever do

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


class Rehearsal(NamedTuple):
    """moments: each program while it runs, and each start of copies. moved: bytes that a step copies
    between a device and its host, both ways. needs: bytes of device memory with the gaps between arrays, see
    `BestFit`; 0 where arrays got no places."""

    moments: list[Moment]
    moved: int
    needs: int


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
        self._tally = MemoryTally()

        def compiler(name, function, arguments, donate=(), **settings):
            traced = trace(name, function, arguments, donate, **settings)
            results = _with_shardings(traced.out_info, layout)
            whole, each = _results(name, results), _sizes(results)
            return _Program(lambda: self._tally, name, analysis(name, traced), whole, each, donate), results

        self._step = make(compiler, lambda *arguments: self._tally.put(*arguments))
        trains = self._step.trains
        state = jax.tree.map(lambda leaf, home: leaf.update(sharding=home), state, on_device(state))
        self._whole = _by_stage(state, trains), [WHOLE] * len(trains)
        self._each, self._batch = (_sizes(state), trains), _sizes(batch)

    def __call__(self, offload: OffloadConfig, memory: int = 0) -> Rehearsal:
        """Returns what steps need with this offload, dispatched one after the other. memory: bytes of a
        device's, in which each array then gets a place: some twenty times as slow."""
        tally = self._tally = MemoryTally(BestFit(memory) if memory else None)
        state, trains = self._each if memory else self._whole
        state, moved = offloaded_state(state, offload), []
        step = self._step.at_home(offload, state)
        step.trains = trains
        kinds = {"params": "parameters", "opt_state": "optimizer"}
        arrays = {name: tally.arrays(tree, kinds.get(name, "other")) for name, tree in state.items()}
        for _ in range(PLACED_STEPS if memory else STEPS):
            arrays, _ = step(arrays, tally.arrays(self._batch, "other"))
            moved.append(tally.moved)
        step.settled(arrays)  # before a checkpoint and an evaluation; nothing else paces the stores
        return Rehearsal(tally.moments, moved[-1] - moved[-2], tally.memory.needs if memory else 0)


def _with_shardings(results: Tree, layout: Layout) -> Tree:
    """Returns abstract arrays; what the compiler is free to place is taken to be split by rows, its second
    dim, as are all things of which there is one for each token."""

    def place(leaf):
        axes = (None, "batch") if len(leaf.shape) > 1 else ()
        sharding = leaf.sharding or layout.sharding(axes).with_memory_kind("device")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, results)


def _sizes(tree: Tree) -> Tree:
    return jax.tree.map(Size.of, tree)


WHOLE = {"matrices": True, "rest": True, "untrained": False}
"""Whether each part of `_whole` trains."""


def _whole(tree: Tree, trains: Tree = None) -> dict[str, Size | None]:
    """Returns a stage's abstract tree as few sizes: of its matrices, which offload moves, of the rest, and of
    what does not train. trains: whether each leaf does; None: all.

    A model of 64 layers has thousands of leaves, and a search rehearses it tens of times.
    """
    leaves, still = jax.tree.leaves(tree), []
    if trains is not None:
        pairs = list(zip(leaves, jax.tree.leaves(trains), strict=True))
        leaves, still = ([leaf for leaf, does in pairs if does is kind] for kind in (True, False))

    def total(leaves: list, ndim: int) -> Size | None:
        sizes = _sizes(leaves)
        sums = (sum(each.on_device for each in sizes), sum(each.nbytes for each in sizes))
        return Size(*sums, sizes[0].sharding, ndim) if sizes else None

    groups = [leaf for leaf in leaves if leaf.ndim > 1], [leaf for leaf in leaves if leaf.ndim < 2]
    return {"matrices": total(groups[0], 2), "rest": total(groups[1], 1), "untrained": total(still, 2)}


def _by_stage(state: State, trains: list[Tree]) -> State:
    """Returns an abstract state, each stage's weights and its slots as `_whole` has them."""
    weights, slots = map(_whole, split_stages(state["params"]), trains), map(_whole, slots_by_stage(state))
    counters = _sizes(counters_of(state))
    return state_of(list(weights), [{"all": each} for each in slots], counters, state["params"])


def _results(name: str, results: tuple) -> tuple:
    """Returns the sizes of a program's results, those of the state and gradients as `_whole` has them."""

    def sizes(tree: Tree, kind: str) -> Tree:
        if tree is None or kind not in ("parameters", "optimizer", "gradients"):
            return _sizes(tree)
        return {"all": _whole(tree)} if kind == "optimizer" else _whole(tree)

    return tuple(map(sizes, results, RESULTS[scopes.program_of(name)]))


class _Program:
    """Stands for a compiled program."""

    def __init__(
        self,
        tally: Callable[[], MemoryTally],
        name: str,
        needs: Breakdown,
        whole: Tree,
        each: Tree,
        donate: tuple,
    ):
        """tally: returns the one of the rehearsal that is under way. whole, each: sizes of the results, those
        of the state and gradients as `_whole` has them, and of all arrays."""
        self.tally, self.name, self.needs = tally, name, needs
        self.whole, self.each, self.donate = whole, each, donate

    def __call__(self, *arguments) -> Tree:
        tally = self.tally()
        tally.programs += 1
        tally.known.clear()
        tally.latest = self.name
        for leaf in jax.tree.leaves(arguments):
            if isinstance(leaf, Array) and leaf.comes is not None and leaf.comes.used_by is None:
                leaf.comes.used_by = tally.programs
        tally.moment(self.name, self.needs)
        donated = [leaf for index in self.donate for leaf in jax.tree.leaves(arguments[index])]
        if tally.memory:
            return self._placed(tally, donated)
        for leaf in donated:
            leaf.delete()
        pairs = zip(self.whole, RESULTS[scopes.program_of(self.name)], strict=True)
        return tuple(tally.arrays(result, kind, tally.programs) for result, kind in pairs)

    def _placed(self, tally: MemoryTally, donated: list[Array]) -> Tree:
        """Returns the results, which take over the places of what was donated, in order, as far as sizes
        agree."""
        places, new = collections.defaultdict(list), 0
        for leaf in donated:
            places[leaf.size].append(leaf.donate())

        def array(size: Size, category: str) -> Array:
            nonlocal new
            over = places[size.on_device]
            new += 0 if over else size.on_device
            place = over.pop(0) if over else None
            return Array(tally, size, size.sharding, category, tally.programs, place=place)

        pairs = zip(self.each, RESULTS[scopes.program_of(self.name)], strict=True)
        results = tuple(jax.tree.map(lambda size, kind=kind: array(size, kind), tree) for tree, kind in pairs)
        tally.give(tally.take(self.needs.peak_device - new))  # the temporaries, all in one place
        for place in itertools.chain(*places.values()):
            tally.give(place)
        return results

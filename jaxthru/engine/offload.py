"""Offload of the training state to host memory, by JAX's memory kinds: where it lives, and how it moves.

A stage is what is updated at once: the embedding, the head, or one layer (engine/model.py `split_stages`). A
stage on the host is fetched to the device ahead of its use and stored back behind it, by transfers that JAX
dispatches on their own: on an H200 they run in both directions at once (90 GB/s measured) and beside compute,
where copies within one compiled program share 54 GB/s.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Sharding

from jaxthru.engine.model import join_stages, split_stages
from jaxthru.engine.step import State, slots_by_stage
from jaxthru.runtime.errors import require
from jaxthru.runtime.sharding import shardings

Tree = Any
HOST = "pinned_host"
AHEAD = 2
"""Stages on their way to or from the device beside the one in use, by default. With one, 72 GB/s instead of
90 on an H200; with three, no more."""


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """level: `none`: nothing. `optimizer`: moments and what else only the update reads (ZeRO stage 1,
        arXiv:1910.02054). `gradients`: and with optim.clip_rule = exact the gradients, which have to wait for
        their norm; with `previous` each is used as soon as it is there. `parameters`: and the weights.
        `auto`: none where the step fits the device; else the level and the smallest fraction that fit, with
        the remat.policy that makes the faster step (`plan memory --best` says). On a CPU none.
    fraction: share of the model's stages that `level` is applied to, evenly spread over its depth.
    activations: `inputs` sends each layer's input to the host until its backward pass; `names` also what
        remat.policy keeps.
    staging_gib: device memory, of all devices together, that state on its way may take in either direction;
        `prefetch` stages may be in any case.
    prefetch: stages that are on their way beside the one in use, at most 2. 0: one stage at a time, which is
        the least memory: the device waits for its copies. With level `auto` 0 may be chosen, where more would
        take more to the host.
    host_gib: host memory to pin at most, GiB; the process takes 6 to 10 beside it, and the driver 5 % of
        it. None is what the limit of the process's control group, or the machine's memory, leaves. A CPU
        whose memory grows as it is used shows less than it has: this says how much it has.
    """

    level: Literal["auto", "none", "optimizer", "gradients", "parameters"] = "auto"
    fraction: float = 1.0
    activations: Literal["none", "inputs", "names"] = "none"
    staging_gib: float = 4.0
    prefetch: int = AHEAD
    host_gib: float | None = None

    def __post_init__(self):
        require(0 < self.fraction <= 1, f"offload.fraction = {self.fraction}: must be above 0, at most 1")
        require(self.staging_gib >= 0, f"offload.staging_gib = {self.staging_gib}: must be at least 0")
        said = f"offload.prefetch = {self.prefetch}: must be at least 0, at most {AHEAD}"
        require(0 <= self.prefetch <= AHEAD, said)
        for name in ("staging_gib", "host_gib"):
            require(getattr(self, name) != math.inf, f"offload.{name} = inf: must be finite")
        require(
            self.host_gib is None or self.host_gib > 0,
            f"offload.host_gib = {self.host_gib}: must be above 0",
        )

    @property
    def layered(self) -> bool:
        """Says whether the host dispatches the layers one by one."""
        return self.level not in ("none", "auto") or self.activations != "none"

    def on_host(self, count: int) -> tuple[bool, ...]:
        """Returns which of so many stages have their state on the host, in the order of the forward pass."""
        share = self.fraction if self.level not in ("none", "auto") else 0.0
        # Bresenham's line: the share of any stretch of the depth is the share of the whole.
        return tuple(int((i + 1) * share + 1e-9) > int(i * share + 1e-9) for i in range(count))


def offloaded_state(abstract: State, config: OffloadConfig) -> State:
    """Returns an abstract state with the leaves that are to live on the host there.

    What has fewer than two dims, norms and most biases, stays on the device: it is small, and each transfer
    has a price.
    """

    def place(tree: Tree) -> Tree:
        return join_stages(hosted(split_stages(tree), config), tree)

    params, opt_state = abstract["params"], abstract["opt_state"]
    slots = {name: place(tree) for name, tree in opt_state["slots"].items()}
    if config.level == "parameters":
        params = place(params)
    return abstract | {"params": params, "opt_state": opt_state | {"slots": slots}}


def hosted(trees: list[Tree], config: OffloadConfig) -> list[Tree]:
    """Returns abstract trees of `split_stages`, those that the fraction names with their matrices in host
    memory."""
    count = len(trees)
    forward_order = [0, *range(2, count), 1]
    chosen = dict(zip(forward_order, config.on_host(count), strict=True))
    return [to_host(tree) if chosen[index] else tree for index, tree in enumerate(trees)]


class Homes(NamedTuple):
    """Shardings of each stage: where its weights, slots and gradients live between their uses, and where
    weights and slots are used."""

    weights: list[Tree]
    slots: list[Tree]
    gradients: list[Tree]
    weights_used: list[Tree]
    slots_used: list[Tree]

    @classmethod
    def of(cls, config: OffloadConfig, abstract: State) -> "Homes":
        """abstract: the state, where it lives."""
        weights, slots = split_stages(abstract["params"]), slots_by_stage(abstract)
        weights_used, slots_used = on_device(weights), on_device(slots)
        gradients = weights_used
        if config.level in ("gradients", "parameters"):
            there = jax.tree.map(lambda leaf, used: leaf.update(sharding=used), weights, weights_used)
            gradients = shardings(hosted(there, config))
        return cls(shardings(weights), shardings(slots), gradients, weights_used, slots_used)


def trained(trains: Tree, tree: Tree) -> Tree:
    """Returns a stage's tree with None in place of what does not train. trains: whether each leaf does."""
    return jax.tree.map(lambda does, leaf: leaf if does else None, trains, tree)


def with_untrained(tree: Tree, whole: Tree) -> Tree:
    """Returns a tree of `trained` with what it lacks, taken from a whole one."""
    is_none = lambda leaf: leaf is None  # noqa: E731
    return jax.tree.map(lambda own, other: other if own is None else own, tree, whole, is_leaf=is_none)


def to_host(tree: Tree) -> Tree:
    """Returns an abstract tree with its matrices in host memory."""

    def move(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf if leaf.ndim < 2 else leaf.update(sharding=leaf.sharding.with_memory_kind(HOST))

    return jax.tree.map(move, tree)


def in_place(abstract: State) -> int:
    """Returns the bytes of the largest array of a state that is saved from where it lives (`Checkpointer`),
    as one is with any part of it in host memory; 0 for others."""
    leaves = jax.tree.leaves(abstract)
    if all(leaf.sharding.memory_kind != HOST for leaf in leaves):
        return 0
    return max(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def on_device(tree: Tree) -> Tree:
    """Returns the shardings of a tree with all of its leaves in device memory."""
    return jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind("device"), tree)


def move(tree: Tree, shardings: Tree, *, donate: bool = False, put: Callable = jax.device_put) -> Tree:
    """Starts to copy the leaves that lie elsewhere than `shardings` say; the others come back as they are.

    donate: frees each leaf that was copied as soon as its copy is done. put: (arrays, shardings) -> copies.
    """
    # None is the gradient of what does not train, where its weight has a sharding.
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
    targets: list[Sharding | None] = structure.flatten_up_to(shardings)
    moved = [i for i, leaf in enumerate(leaves) if leaf is not None]
    away = [i for i in moved if leaves[i].sharding.memory_kind != targets[i].memory_kind]
    copies = put([leaves[i] for i in away], [targets[i] for i in away])
    for i, copy in zip(away, copies, strict=True):
        if donate:
            leaves[i].delete()  # the runtime keeps the memory until the copy has read it
        leaves[i] = copy
    return jax.tree.unflatten(structure, leaves)


def away_bytes(tree: Tree) -> int:
    """Returns the bytes of a tree that are in host memory, of all devices together."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == HOST)


class Fetched(Iterator[Tree]):
    """Yields each tree on the device, with more of them on their way there: `prefetch`, or so many that they
    take `staging` bytes. trees: with their shardings. donate, put: see `move`."""

    def __init__(
        self,
        trees: Iterable[tuple[Tree, Tree]],
        staging: int = 0,
        *,
        prefetch: int = AHEAD,
        donate: bool = False,
        put: Callable = jax.device_put,
    ):
        self._trees, self._staging, self._prefetch = iter(trees), staging, prefetch
        self._move = functools.partial(move, donate=donate, put=put)
        self._coming: collections.deque[tuple[Tree, int]] = collections.deque()

    def start(self) -> None:
        """Starts the transfers that may be on their way."""
        while len(self._coming) <= self._prefetch or sum(size for _, size in self._coming) < self._staging:
            for tree, home in self._trees:
                size = away_bytes(tree)
                self._coming.append((self._move(tree, home), size))
                break
            else:
                return

    def __next__(self) -> Tree:
        self.start()
        if not self._coming:
            raise StopIteration
        return self._coming.popleft()[0]


class Pending(NamedTuple):
    """An update whose gradients have got their norm, and whose stages wait for the next forward pass to come
    by: what then moves to and from the host does so beside the layers' compute.

    known: counters, the sum of squares and the loss, as `Programs.update` takes them, and the terms of each
    stage, by its index. slots, gradients: on their way, in the order of the forward pass.
    """

    known: tuple[State, jax.Array, jax.Array, dict[int, Tree]]
    slots: Fetched
    gradients: Fetched


def taken(state: State) -> tuple[list[Tree], list[Tree], Pending | None]:
    """Returns the weights and slots of a state by stages, and its pending update, if there is one."""
    return split_stages(state["params"]), slots_by_stage(state), state.get("pending")


class Stores:
    """Keeps the host from dispatching more while transfers to it take above `staging` bytes of the device,
    and are more than `prefetch` stages: a stage's device memory is free when its copy has ended."""

    def __init__(self, staging: int, prefetch: int):
        self._staging, self._prefetch = staging, prefetch
        self._going: collections.deque[tuple[Tree, int]] = collections.deque()

    def __call__(self, stored: Tree) -> None:
        """Takes note of a stage that is being stored, and waits for earlier ones if need be."""
        leaves = [leaf for leaf in jax.tree.leaves(stored) if leaf.sharding.memory_kind == HOST]
        self._going.append((leaves, away_bytes(leaves)))
        while len(self._going) > self._prefetch and sum(size for _, size in self._going) > self._staging:
            # One that was used up since has been stored long ago.
            jax.block_until_ready([leaf for leaf in self._going.popleft()[0] if not leaf.is_deleted()])


class Pace:
    """Keeps the host from running further ahead than so many programs: the memory of a program's results is
    taken when it is dispatched."""

    def __init__(self, prefetch: int = AHEAD):
        self._prefetch = prefetch
        self._latest: collections.deque[jax.Array] = collections.deque()

    def __call__(self, result: Tree) -> None:
        """Waits until the result handed over `prefetch` calls ago is there."""
        self._latest.append(result)
        if len(self._latest) > self._prefetch:
            jax.block_until_ready(self._latest.popleft())


def free_host(tree: Tree) -> None:
    """Frees what of a tree lies in host memory; the runtime waits for copies that still read it."""
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind == HOST:
            leaf.delete()


def emptied(stack: list[Tree]) -> Iterator[Tree]:
    """Yields from the top of a list, and forgets what was yielded."""
    while stack:
        yield stack.pop()

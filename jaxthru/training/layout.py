"""The layout of a training state on disk: one entry per layer, for scanned and unrolled layers alike.

In memory a tree named "layers" is a tuple of groups, each a tuple with an entry for each block of its
pattern: a tuple of trees, one a repetition (unrolled), or one tree whose arrays carry them as a leading dim
(scanned). On disk it is always {"0": tree, "1": tree, ...}, so that a checkpoint of either restores into the
other. Everything else keeps its place; named tuples become dicts of their fields, and
nodes without arrays (slots that a parameter has not) leave no trace.

Leaves are converted one at a time: at most one stacked array exists twice on a device.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

Tree = Any
Read = Callable[[tuple[str, ...], jax.ShapeDtypeStruct], jax.Array]
"""(The place of an array on disk, its shape, dtype and sharding) -> the array."""
LAYERS = "layers"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One leaf of the state in memory, and the arrays on disk that it is made of.

    name: the leaf's place in memory, for messages. paths: one place on disk, or one per layer if `stacked`.
    """

    name: str
    leaf: Any
    paths: tuple[tuple[str, ...], ...]
    stacked: bool

    def on_disk(self) -> jax.ShapeDtypeStruct:
        """Returns shape, dtype and sharding of each of this leaf's arrays on disk. What lives in host memory
        is read there, but for layers that are to be stacked, which is a device's work."""
        leaf, shape, sharding = self.leaf, self.leaf.shape, self.leaf.sharding
        if self.stacked:
            shape, sharding = shape[1:], layer_sharding(device_sharding(leaf))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def entries(state: Tree) -> Iterator[Entry]:
    """Yields an Entry for each leaf of a concrete or abstract state. All trees called "layers" lie alike."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    repetitions = _repetitions(leaves)
    for keys, leaf in leaves:
        path = tuple(key_name(key) for key in keys)
        name = "/".join(path)
        if LAYERS not in path[:-1]:
            yield Entry(name, leaf, (path,), stacked=False)
            continue
        at = path.index(LAYERS)
        before, (group, block), after = path[: at + 1], map(int, path[at + 1 : at + 3]), path[at + 3 :]
        groups = functools.reduce(_child, keys[: at + 1], state)
        first = sum(len(each) * repetitions[index] for index, each in enumerate(groups[:group])) + block
        pattern = len(groups[group])
        if isinstance(keys[at + 3], jax.tree_util.SequenceKey):
            layer = first + pattern * int(after[0])
            yield Entry(name, leaf, ((*before, str(layer), *after[1:]),), stacked=False)
            continue
        if not leaf.ndim:
            raise ValueError(f"{name}: a scalar among stacked layers has no layer dim")
        places = range(first, first + pattern * leaf.shape[0], pattern)
        yield Entry(name, leaf, tuple((*before, str(layer), *after) for layer in places), stacked=True)


def _child(tree: Tree, key: Any) -> Tree:
    """Returns what lies below a node by a tree key."""
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(tree, key.name)
    return tree[key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key]


def _repetitions(leaves: list[tuple[tuple, Any]]) -> dict[int, int]:
    """Returns how often each group's pattern is repeated, by whatever leaf there is of it: a slot need not
    have any, as of weights that do not train."""
    found: dict[int, int] = {}
    for keys, leaf in leaves:
        names = [key_name(key) for key in keys]
        if LAYERS in names[:-1]:
            group, after = int(names[names.index(LAYERS) + 1]), keys[names.index(LAYERS) + 3]
            unrolled = isinstance(after, jax.tree_util.SequenceKey)
            count = after.idx + 1 if unrolled else leaf.shape[0] if leaf.ndim else 0
            found[group] = max(found.get(group, 0), count)
    return found


def key_name(key: Any) -> str:
    """Returns what a tree key is called on disk: a dict key, an index or a field name."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"no name on disk for tree key {key!r}")


def to_disk(state: Tree) -> Tree:
    """Returns nested dicts of the state's arrays with one entry per layer.

    Slices of stacked arrays wait in host memory where the device has its own, so that the device never holds
    more than one stacked array twice. The other leaves are the state's own arrays, not copies.
    """
    disk: Tree = {}
    for entry in entries(state):
        arrays = unstack(entry.leaf) if entry.stacked else (entry.leaf,)
        for path, array in zip(entry.paths, arrays, strict=True):
            insert(disk, path, array)
    return disk


def abstract_disk(abstract_state: Tree) -> Tree:
    """Returns what `to_disk` would give, as ShapeDtypeStructs that say where to read each array to."""
    disk: Tree = {}
    for entry in entries(abstract_state):
        for path in entry.paths:
            insert(disk, path, entry.on_disk())
    return disk


def from_disk(disk: Tree, abstract_state: Tree) -> Tree:
    """Returns the state that `to_disk` took apart, in the form and sharding of `abstract_state`.

    Empties `disk` on the way, so that no more than one stacked array exists twice.
    """
    return assembled(abstract_state, lambda path, like: remove(disk, path))


def assembled(abstract_state: Tree, read: Read) -> Tree:
    """Returns the state in the form and sharding of `abstract_state`, made of its arrays on disk: each is
    asked for once, and of stacked layers those of one weight one after the other."""
    leaves = [assembled_leaf(entry, read) for entry in entries(abstract_state)]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def assembled_leaf(entry: Entry, read: Read) -> jax.Array:
    """Returns one leaf of what `assembled` does."""
    like = entry.on_disk()
    arrays = [read(path, like) for path in entry.paths]
    array = stack(arrays, device_sharding(entry.leaf)) if entry.stacked else arrays.pop()
    return jax.device_put(array, entry.leaf.sharding)


def unstack(stacked: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the layers of an array with a leading layer dim, in host memory if the device has its own."""
    # Slicing is a device's work: an array that lives in host memory comes over first, alone.
    on_device = device_sharding(stacked)
    stacked = jax.device_put(stacked, on_device)
    sharding = layer_sharding(on_device)
    layers = _splitter(stacked.shape[0], sharding)(stacked)
    if next(iter(on_device.device_set)).platform == "cpu":
        return layers
    layers = jax.device_put(layers, sharding.with_memory_kind("pinned_host"))
    return jax.block_until_ready(layers)  # so that the slices' device memory is free before the next leaf


@functools.cache  # a jitted function keeps what it compiled; a new one would compile at every save
def _splitter(count: int, sharding: Sharding) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    def split(stacked):
        return tuple(jax.lax.index_in_dim(stacked, i, keepdims=False) for i in range(count))

    return jax.jit(split, out_shardings=(sharding,) * count)


def stack(layers: list[jax.Array], sharding: Sharding) -> jax.Array:
    """Returns the layers as one array with a leading layer dim. Empties the list."""
    stacked = _stacker(sharding)(*layers)
    layers.clear()
    return stacked


@functools.cache
def _stacker(sharding: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda *layers: jnp.stack(layers), out_shardings=sharding)


def device_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> Sharding:
    """Returns the leaf's sharding with its arrays in device memory."""
    device = next(iter(leaf.sharding.device_set))
    return leaf.sharding.with_memory_kind(device.default_memory().kind)


def layer_sharding(sharding: Sharding) -> Sharding:
    """Returns the sharding of one layer of a stacked array: the same without its leading dim."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = PartitionSpec(*sharding.spec[1:])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def insert(tree: Tree, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def remove(tree: Tree, path: tuple[str, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree.pop(path[-1])

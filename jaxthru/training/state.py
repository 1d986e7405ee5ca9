"""The training state: its shapes and shardings, and its first values."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.engine.model import LAYERS, Model, parts
from jaxthru.engine.offload import Pace, move, on_device
from jaxthru.engine.step import State, counters_of, first_state, slots_by_part, state_of
from jaxthru.optim.optimizer import Optimizer
from jaxthru.runtime.sharding import Axes, Layout
from jaxthru.training import layout as on_disk

Tree = Any


def init_state(model: Model, optimizer: Optimizer, key: jax.Array) -> State:
    """Returns the state before the first update."""
    return first_state(*optimizer.init(model.init(key)))


def abstract_state(model: Model, optimizer: Optimizer, layout: Layout) -> State:
    """Returns the state's shapes, dtypes and shardings, without making it.

    A slot of the optimizer is laid out as its parameter.
    """
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))

    def placed(axes: Axes, tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: _placed(leaf, layout, axes), tree)

    def like_params(tree: Tree) -> Tree:
        return jax.tree.map(lambda info, leaf: placed(info.axes, leaf), model.weights, tree)

    params, opt_state = shapes.pop("params"), shapes.pop("opt_state")
    slots = {name: like_params(tree) for name, tree in opt_state["slots"].items()}
    opt_state = {"count": placed((), opt_state["count"]), "slots": slots}
    return placed((), shapes) | {"params": like_params(params), "opt_state": opt_state}


def _placed(leaf: jax.ShapeDtypeStruct, layout: Layout, axes: Axes) -> jax.ShapeDtypeStruct:
    sharding = layout.sharding(axes)
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError:
        # Fewer scales of 8-bit blocks than devices along the last dim: they are whole on each device.
        sharding = layout.sharding((*axes[:-1], None))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def sharded_init(model: Model, optimizer: Optimizer, abstract: State, seed: int) -> State:
    """Returns the first state, each shard made where it lives. abstract: as from `abstract_state`."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(lambda key: init_state(model, optimizer, key), out_shardings=shardings)
    return make(jax.random.key(seed))


def init_by_parts(model: Model, optimizer: Optimizer, abstract: State, seed: int) -> State:
    """Returns the first state, part after part made where it is to live: no more than a few of them are ever
    on the device in float32.

    abstract: shapes, dtypes and shardings of the state; layers are unrolled.
    """
    homes = list(zip(parts(abstract["params"]), slots_by_part(abstract), strict=True))
    infos, pace = parts(optimizer.infos), Pace()
    stages = [model.chain.embedding, model.chain.head, *model.chain.layers]

    @functools.cache
    def program(first: int) -> Callable:
        make = lambda key: optimizer.init_part(stages[first].init(key), infos[first])  # noqa: E731
        return jax.jit(make, out_shardings=on_device(homes[first]))

    made = []
    for index, key in enumerate(model.part_keys(jax.random.key(seed))):
        first = stages.index(stages[index], min(index, LAYERS))  # of equal ones, which share a program
        made.append(move(program(first)(key), _shardings(homes[index]), donate=True))
        pace(made[-1])
    return _first_state_of(made, abstract)


def state_of_weights(optimizer: Optimizer, abstract: State, read: on_disk.Read) -> State:
    """Returns the first state with weights that are there, part after part, each made where it is to live.

    abstract: shapes, dtypes and shardings of the state. read: gives each weight, asked for in float32 on the
    devices, see `training.layout.assembled`.
    """
    params, pace = abstract["params"], Pace()
    float32 = lambda leaf: leaf.update(dtype=jnp.float32, sharding=on_disk.device_sharding(leaf))  # noqa: E731
    entries = jax.tree.unflatten(
        jax.tree.structure(params), list(on_disk.entries(jax.tree.map(float32, params)))
    )

    @functools.cache  # layers that are alike share a program
    def program(infos: tuple, tree: Any, home: tuple) -> Callable:
        keep = lambda weights: optimizer.init_part(weights, jax.tree.unflatten(tree, infos))  # noqa: E731
        return jax.jit(keep, donate_argnums=0, out_shardings=jax.tree.unflatten(*reversed(home)))

    made = []
    homes = zip(parts(params), slots_by_part(abstract), strict=True)
    for part, infos, home in zip(parts(entries), parts(optimizer.infos), homes, strict=True):
        weights = jax.tree.map(lambda entry: on_disk.assembled_leaf(entry, read), part)
        leaves, tree = jax.tree.flatten(infos)
        places, home_tree = jax.tree.flatten(jax.tree.map(on_disk.device_sharding, home))
        keep = program(tuple(leaves), tree, (tuple(places), home_tree))
        made.append(move(keep(weights), _shardings(home), donate=True))
        pace(made[-1])
    return _first_state_of(made, abstract)


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _first_state_of(made: list[tuple[Tree, dict[str, Tree]]], abstract: State) -> State:
    """Returns the first state. made: the weights and slots of each part."""
    weights, slots = map(list, zip(*made, strict=True))
    # By a program: a step takes each of them over, so each has to have memory of its own.
    make = jax.jit(
        lambda: counters_of(first_state(None, {"count": jnp.zeros((), jnp.int32)})),
        out_shardings=abstract["opt_state"]["count"].sharding,
    )
    return state_of(weights, slots, make(), abstract["params"])

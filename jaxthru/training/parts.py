"""The state part by part: embedding, head and each layer with what belongs to it, and making it so."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.models.bind import Model, from_parts, parts
from jaxthru.optim.optimizer import Optimizer
from jaxthru.training.offload import Pace, move, on_device
from jaxthru.training.state import State, first_state

Tree = Any
EMBEDDING, HEAD, LAYERS = 0, 1, 2
"""Where `parts` has the embedding, the head and the first layer."""


def counters_of(state: State) -> State:
    """Returns the scalars of a state."""
    trees = ("params", "opt_state", "pending")
    scalars = {name: leaf for name, leaf in state.items() if name not in trees}
    return scalars | {"count": state["opt_state"]["count"]}


def slots_by_part(slots: dict[str, Tree]) -> list[dict[str, Tree]]:
    columns = {name: parts(tree) for name, tree in slots.items()}
    return [dict(zip(columns, of, strict=True)) for of in zip(*columns.values(), strict=True)]


def slots_by_name(slots: list[dict[str, Tree]], params: Tree) -> dict[str, Tree]:
    """Returns what `slots_by_part` took apart."""
    return {name: from_parts([slot[name] for slot in slots], params) for name in slots[0]}


def shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def init_by_parts(model: Model, optimizer: Optimizer, abstract: State, seed: int) -> State:
    """Returns the first state, part after part made where it is to live: no more than a few of them are ever
    on the device in float32.

    abstract: shapes, dtypes and shardings of the state; layers are unrolled.
    """
    homes = list(zip(parts(abstract["params"]), slots_by_part(abstract["opt_state"]["slots"]), strict=True))
    matrices, pace = parts(optimizer.matrices), Pace()

    @functools.cache
    def program(kind: int) -> Callable:
        init = {EMBEDDING: model.embedding, HEAD: model.head, LAYERS: model.layer}[kind].init
        make = lambda key: optimizer.init_part(init(key), matrices[kind])  # noqa: E731
        return jax.jit(make, out_shardings=on_device(homes[kind]))

    made = []
    for index, key in enumerate(model.part_keys(jax.random.key(seed))):
        made.append(move(program(min(index, LAYERS))(key), shardings(homes[index]), donate=True))
        pace(made[-1])
    weights, slots = map(list, zip(*made, strict=True))
    params = from_parts(weights, abstract["params"])
    scalar = abstract["opt_state"]["count"].sharding
    count = jax.device_put(jnp.zeros((), jnp.int32), scalar)
    state = first_state(params, {"count": count, "slots": slots_by_name(slots, params)})
    counters = {name: state[name] for name in state.keys() - {"params", "opt_state"}}
    return state | jax.device_put(counters, scalar)

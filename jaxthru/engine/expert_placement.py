"""Expert placement: which device has which experts, so that all are given about as many tokens.

A layer waits for its busiest device. So the experts of each layer change places, by how many tokens each was
given in a step: their matrices with all that the optimizer keeps of them, and the router's columns with them.
The model computes the same, up to rounding: sums over all experts, as a softmax has, are made in another
order, and of equal scores that of the first expert counts.

Shapes: L layers of experts, E experts of each.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxthru.engine.advance import rows_by_stage
from jaxthru.engine.model import Model, split_stages
from jaxthru.engine.offload import move, on_device
from jaxthru.engine.step import State, counters_of, slots_by_stage, state_of
from jaxthru.models.router import TOKENS
from jaxthru.models.stage import Mixture
from jaxthru.runtime.weights import WeightInfo

Tree = Any
log = logging.getLogger("jaxthru")

FIRST = 1, 10, 100
"""Steps after which experts are placed first: a router that was just initialised moves fast."""
WORTH = 0.01
"""By how much the busiest devices must have less work, as a share of the mean, for experts to move."""
COUNTS_EXPERTS = "experts", "routed"


class ExpertPlacement:
    """Places experts anew after some steps. It looks at one step alone, so that a run that is continued
    does what it would have done."""

    def __init__(self, model: Model, every: int):
        """every: steps between two looks at the load; 0 is never."""
        self.model, self.devices = model, model.ops.layout.size("experts")
        mixtures = (stage.mixture for stage in model.chain.layers if TOKENS in stage.metrics)
        mixture = next(filter(None, mixtures), Mixture(1, 1))
        self.together = mixture.together
        may = self.devices > 1 and mixture.experts // mixture.together % self.devices == 0
        self.every = every if may else 0
        how = {"static_argnums": (2, 3), "donate_argnums": 0, "compiler_options": model.compiler_options()}
        self._reorder = jax.jit(_reordered, **how)

    def due(self, step: int) -> bool:
        """Says whether to look at the load after this step."""
        return self.every > 0 and (step in FIRST or step % self.every == 0)

    def __call__(self, state: State, metrics: Mapping[str, jax.Array]) -> State:
        """Returns the state with its experts placed anew, or as it is where that is not worth it, or its
        update was skipped.

        state: at rest, see `settled` of a step; it is taken over. metrics: of the step that made it.
        """
        step, skipped, counts = jax.device_get([state["step"], metrics["skipped_in_a_row"], metrics[TOKENS]])
        counts_LE = counts.astype(np.int64)
        order_LE = np.array([dealt(counts_E, self.devices, self.together) for counts_E in counts_LE])
        before = busiest(counts_LE, self.devices)
        after = busiest(np.take_along_axis(counts_LE, order_LE, axis=1), self.devices)
        if skipped or before - after < WORTH:  # of what is not finite, no router's choice means anything
            return state
        said = "step %d: experts placed anew: the busiest of %d devices has %.3f times the mean of tokens, "
        log.info(said + "for %.3f", step, self.devices, after, before)
        return self.placed(state, order_LE)

    def placed(self, state: State, order_LE: np.ndarray) -> State:
        """Returns the state in which expert e of a layer is the one that was at order_LE[layer, e]."""
        weights, slots = split_stages(state["params"]), slots_by_stage(state)
        infos = split_stages(self.model.weights)
        for at, (_, rows) in enumerate(rows_by_stage(self.model)):
            if TOKENS in rows:
                one = functools.partial(self._of_weight, order_LE[rows[TOKENS]].astype(np.int32))
                weights[at] = jax.tree.map(one, infos[at], weights[at])
                slots[at] = {name: jax.tree.map(one, infos[at], tree) for name, tree in slots[at].items()}
        return state_of(weights, slots, counters_of(state), state["params"])

    def _of_weight(self, order: np.ndarray, info: WeightInfo, tree: Tree) -> Tree:
        """Returns a weight, or what the optimizer keeps of one, with its experts in this order, where it
        was."""
        dims = [dim for dim, axis in enumerate(info.axes) if axis in COUNTS_EXPERTS]

        def placed(leaf: jax.Array) -> jax.Array:
            home = leaf.sharding
            near = move(leaf, on_device(leaf), donate=True)
            back = move(self._reorder(near, order, dims[0], near.sharding), home, donate=True)
            # One array at a time: dispatched ahead, all of host memory's would be on the device at once.
            return jax.block_until_ready(back)

        return jax.tree.map(placed, tree) if dims else tree


def dealt(counts_E: np.ndarray, devices: int, together: int = 1) -> np.ndarray:
    """Returns the order [E] in which the experts of a layer are dealt to devices, each of which has equally
    many of them one behind the other: the busiest first, each to the device that has been given least. Where
    no device has less to do then, they stay.

    together: so many experts that lie side by side, and stay so, are dealt as one.
    Source: longest processing time first, Graham 1969.
    """
    counts_U = counts_E.reshape(-1, together).sum(axis=-1)
    room = len(counts_U) // devices
    hands: list[list[int]] = [[] for _ in range(devices)]
    given = np.zeros(devices, np.int64)
    for unit in np.argsort(-counts_U, kind="stable"):
        to = min((at for at in range(devices) if len(hands[at]) < room), key=given.__getitem__)
        hands[to].append(int(unit))
        given[to] += counts_U[unit]
    if given.max() >= counts_U.reshape(devices, room).sum(axis=-1).max():
        return np.arange(len(counts_E))
    order_U = np.concatenate([sorted(hand) for hand in hands])
    return (order_U[:, None] * together + np.arange(together)).reshape(-1)


def busiest(counts_LE: np.ndarray, devices: int) -> float:
    """Returns the tokens of each layer's busiest device over the mean of its devices, the mean over
    layers."""
    of_device = counts_LE.reshape(len(counts_LE), devices, -1).sum(axis=-1)
    return float(np.mean(of_device.max(axis=1) / np.maximum(of_device.mean(axis=1), 1)))


def _reordered(x: jax.Array, order: jax.Array, dim: int, sharding: NamedSharding) -> jax.Array:
    """Returns x with what is along a dim in this order, [E], or in one for each of its layers, [L, E].

    One layer at a time is whole along that dim on each device.
    """

    def of_shard(x: jax.Array, order: jax.Array) -> jax.Array:
        if order.ndim == 1:
            return taken(x, order, dim)
        one = lambda at, x: x.at[at].set(taken(x[at], order[at], dim - 1))  # noqa: E731
        return jax.lax.fori_loop(0, len(order), one, x)

    def taken(x: jax.Array, order_E: jax.Array, along: int) -> jax.Array:
        own = x.shape[along]
        if own < len(order_E):
            axis = sharding.spec[dim]
            order_E = jax.lax.dynamic_slice_in_dim(order_E, jax.lax.axis_index(axis) * own, own)
            x = jax.lax.all_gather(x, axis, axis=along, tiled=True)
        return jnp.take(x, order_E, axis=along)

    specs = sharding.spec, PartitionSpec()
    sharded = jax.shard_map(of_shard, mesh=sharding.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return sharded(x, order)

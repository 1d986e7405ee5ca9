"""Expert placement: which device has which experts, so that all are given about as many tokens.

A layer waits for its busiest device. So experts of each layer change places in pairs, by how many tokens each
was given in a step: their matrices with all that the optimizer keeps of them, and the router's columns with
them. The model computes the same, up to rounding: sums over all experts, as a softmax has, are made in
another order, and of equal scores that of the first expert counts.

Few pairs are enough, and what their moves take decides how often they are worth it: a router that was just
initialised favours other experts within tens of steps.

Shapes: L layers of experts, E experts of each, D devices, K experts that each device gives the others.
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxthru.engine.advance import rows_by_stage
from jaxthru.engine.model import Model, split_stages
from jaxthru.engine.offload import away_bytes, move, on_device
from jaxthru.engine.step import State, counters_of, slots_by_stage, state_of
from jaxthru.models.router import TOKENS
from jaxthru.models.stage import Mixture
from jaxthru.runtime.sharding import Axes

Tree = Any
log = logging.getLogger("jaxthru")

WORTH = 0.01
"""By how much the busiest devices must have less work, as a share of the mean, for experts to move; with
state in host memory by so much that the steps until the next look save one."""
EVEN = 0.002
"""A device with no more above the mean than this share of it is not relieved: from step to step tokens differ
by more."""
MOST = 8
"""Experts of a layer that a device gives away at a look. All that moves of a layer is beside it at once."""
COUNTS_EXPERTS = "experts", "routed"
Layouts = tuple[tuple[Axes, NamedSharding], ...]
"""The axes and the sharding of each of some arrays."""


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

        @functools.cache
        def reorder(layouts: Layouts) -> Callable[..., list[jax.Array]]:
            how = {"donate_argnums": 0, "compiler_options": model.compiler_options()}
            homes = [sharding for _, sharding in layouts]
            return jax.jit(functools.partial(_reordered, layouts), out_shardings=homes, **how)

        self._reorder = reorder

    def due(self, step: int) -> bool:
        """Says whether to look at the load after this step."""
        return self.every > 0 and (step == 1 or step % self.until_next(step) == 0)

    def until_next(self, step: int) -> int:
        """Returns the steps between looks. The first ones are closer together: after the first step, every 8
        steps, and from 64 steps on four times each time that the steps double."""
        return min(self.every, max(8, 2 ** (step.bit_length() - 3)))

    def __call__(self, state: State, metrics: Mapping[str, jax.Array]) -> State:
        """Returns the state with its experts placed anew, or as it is where that is not worth it, or its
        update was skipped.

        state: at rest, see `settled` of a step; it is taken over. metrics: of the step that made it.
        """
        step, skipped, counts = jax.device_get([state["step"], metrics["skipped_in_a_row"], metrics[TOKENS]])
        counts_LE = counts.astype(np.int64)
        order_LE = np.array([evened(counts_E, self.devices, self.together) for counts_E in counts_LE])
        before = busiest(counts_LE, self.devices)
        after = busiest(np.take_along_axis(counts_LE, order_LE, axis=1), self.devices)
        # To and from host memory a stage's arrays go whole, which takes about a step.
        cost = 1 / self.until_next(int(step)) if away_bytes(state) else 0
        # Of what is not finite, no router's choice means anything.
        if skipped or before - after < max(WORTH, cost):
            return state
        begun = time.monotonic()
        state = jax.block_until_ready(self.placed(state, order_LE))
        moved, took = np.count_nonzero(order_LE != np.arange(order_LE.shape[1])), time.monotonic() - begun
        said = "step %d: experts placed anew: the busiest of %d devices has %.3f times the mean of tokens, "
        said += "for %.3f; %d experts of %d layers moved in %.2f s"
        log.info(said, step, self.devices, after, before, moved, len(order_LE), took)
        return state

    def placed(self, state: State, order_LE: np.ndarray) -> State:
        """Returns the state in which expert e of a layer is the one that was at order_LE[layer, e]."""
        weights, slots = split_stages(state["params"]), slots_by_stage(state)
        infos = split_stages(self.model.weights)
        for at, (_, rows) in enumerate(rows_by_stage(self.model)):
            own = np.atleast_1d(rows.get(TOKENS, np.array([], int)))
            if (order_LE[own] != np.arange(order_LE.shape[1])).any():
                trees = [weights[at], *slots[at].values()]
                exchange = Exchange.of(order_LE[own], self.devices)
                weights[at], *kept = self._of_stage(exchange, infos[at], trees)
                slots[at] = dict(zip(slots[at], kept, strict=True))
        return state_of(weights, slots, counters_of(state), state["params"])

    def _of_stage(self, exchange: "Exchange", infos: Tree, trees: list[Tree]) -> list[Tree]:
        """Returns a stage's weights, and what the optimizer keeps of them, with experts exchanged, each array
        where it was. trees: each in the structure of infos."""
        infos, of_infos = jax.tree.flatten(infos)
        leaves, structure = jax.tree.flatten(trees)
        columns = [zip(infos, of_infos.flatten_up_to(tree), strict=True) for tree in trees]
        axes = [info.axes for column in columns for info, tree in column for _ in jax.tree.leaves(tree)]
        which = [i for i in range(len(leaves)) if {*axes[i]} & {*COUNTS_EXPERTS}]
        near = [i for i in which if leaves[i].sharding == on_device(leaves[i])]
        # Together they are dispatched once; of those in host memory not all may fit the device at once.
        for group in filter(None, (near, *([i] for i in which if i not in near))):
            arrays = [leaves[i] for i in group]
            homes = [array.sharding for array in arrays]
            arrays = move(arrays, on_device(arrays), donate=True)
            layouts = tuple((axes[i], array.sharding) for i, array in zip(group, arrays, strict=True))
            arrays = move(self._reorder(layouts)(arrays, exchange), homes, donate=True)
            if group is not near:
                jax.block_until_ready(arrays)
            for i, array in zip(group, arrays, strict=True):
                leaves[i] = array
        return jax.tree.unflatten(structure, leaves)


def evened(counts_E: np.ndarray, devices: int, together: int = 1) -> np.ndarray:
    """Returns the order [E] of a layer's experts after which devices, each of which has equally many of them
    one behind the other, have about as many tokens: of the busiest device's and another's those two change
    places that leave the busier of both least; until no two help, it has hardly more than the mean, or a
    device has changed `MOST` of its own.

    together: so many experts that lie side by side, and stay so, change places as one.
    """
    held_DU = counts_E.reshape(devices, -1, together).sum(axis=-1)
    order_DU = np.arange(held_DU.size).reshape(held_DU.shape)
    changes_D = np.zeros(devices, int)
    while changes_D.max() < MOST:
        given_D = held_DU.sum(axis=1)
        at = int(given_D.argmax())
        if given_D[at] <= (1 + EVEN) * given_D.mean():
            break
        more_UDU = held_DU[at][:, None, None] - held_DU
        left_UDU = np.maximum(given_D[at] - more_UDU, given_D[:, None] + more_UDU)
        left_UDU[:, at] = given_D[at]
        mine, to, other = np.unravel_index(left_UDU.argmin(), left_UDU.shape)
        if left_UDU[mine, to, other] == given_D[at]:
            break
        changes_D[[at, to]] += 1
        for of_units in (held_DU, order_DU):
            of_units[at, mine], of_units[to, other] = of_units[to, other], of_units[at, mine]
    return (order_DU.reshape(-1, 1) * together + np.arange(together)).reshape(-1)


def busiest(counts_LE: np.ndarray, devices: int) -> float:
    """Returns the tokens of each layer's busiest device over the mean of its devices, the mean over
    layers."""
    of_device = counts_LE.reshape(len(counts_LE), devices, -1).sum(axis=-1)
    return float(np.mean(of_device.max(axis=1) / np.maximum(of_device.mean(axis=1), 1)))


class Exchange(NamedTuple):
    """How experts come into an order, of each layer: what each device gives away, and what it takes for it.

    order_LE: where each was before. place_LDK: which of a device's experts it gives away, each replaced by
    what it takes; past its last one where they are fewer than K. source_LDK: which of all that are given,
    [D * K], it takes.
    """

    order_LE: np.ndarray
    place_LDK: np.ndarray
    source_LDK: np.ndarray

    @classmethod
    def of(cls, order_LE: np.ndarray, devices: int) -> "Exchange":
        """K is MOST where that is enough, or else all of a device's: two programs do for all orders."""
        order_LDE = order_LE.reshape(len(order_LE), devices, -1)
        own = order_LDE.shape[2]
        moves_LDE = order_LDE != np.arange(devices * own).reshape(devices, own)
        most = MOST if moves_LDE.sum(axis=2).max() <= MOST < own else own
        place_LDK = np.tile(own + np.arange(most), (len(order_LE), devices, 1))
        source_LDK = np.zeros_like(place_LDK)
        for layer in range(len(order_LE)):
            given_E = np.zeros(devices * own, int)  # of each expert which of all that are given it is
            places = [np.flatnonzero(moves_E) for moves_E in moves_LDE[layer]]
            for device, at in enumerate(places):
                place_LDK[layer, device, : len(at)] = at
                given_E[device * own + at] = device * most + np.arange(len(at))
            for device, at in enumerate(places):
                source_LDK[layer, device, : len(at)] = given_E[order_LDE[layer, device, at]]
        return cls(order_LE.astype(np.int32), place_LDK.astype(np.int32), source_LDK.astype(np.int32))


def _reordered(layouts: Layouts, arrays: list[jax.Array], exchange: Exchange) -> list[jax.Array]:
    """Returns arrays with their experts in that order."""
    return [_in_order(x, exchange, *layout) for x, layout in zip(arrays, layouts, strict=True)]


def _in_order(x: jax.Array, exchange: Exchange, axes: Axes, sharding: NamedSharding) -> jax.Array:
    """Returns one of them. axes: of its dims, the first "layers" where it has L of them."""
    (dim,) = (dim for dim, axis in enumerate(axes) if axis in COUNTS_EXPERTS)
    experts = x.shape[dim]

    def of_shard(x: jax.Array, exchange: Exchange) -> jax.Array:
        layer = lambda at: Exchange(*(each[at] for each in exchange))  # noqa: E731
        if axes[0] != "layers":
            return of_layer(x, layer(0), dim)
        one = lambda at, x: x.at[at].set(of_layer(x[at], layer(at), dim - 1))  # noqa: E731
        return jax.lax.fori_loop(0, len(exchange.order_LE), one, x)

    def of_layer(x: jax.Array, of: Exchange, along: int) -> jax.Array:
        if x.shape[along] == experts:
            return jnp.take(x, of.order_LE, axis=along)
        axis = sharding.spec[dim]
        place_K, source_K = (each[jax.lax.axis_index(axis)] for each in (of.place_LDK, of.source_LDK))
        given = jnp.take(x, place_K, axis=along, mode="clip")
        given = jax.lax.all_gather(given, axis, axis=along, tiled=True)
        at = x.at[(*[slice(None)] * along, place_K)]
        taken = jnp.take(given, source_K, axis=along)
        return at.set(taken, mode="drop", indices_are_sorted=True, unique_indices=True)

    specs = sharding.spec, PartitionSpec()
    sharded = jax.shard_map(of_shard, mesh=sharding.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return sharded(x, exchange)

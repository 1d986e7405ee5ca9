"""The experts of a mixture, whose tokens find them on any mesh: dropless, with no collective of unknown size.

On one device: assignments are sorted by expert, their tokens gathered, multiplied group by group, and added
up token by token. Where experts are split (mesh axis `expert`), a device gathers the tokens of all that
share them, with the experts that were chosen for these, does the same with its own experts alone, and its
sums are scattered back. Along `tensor`, which splits every expert's width, the same gather and scatter
serve. With `mesh.transfers=copies` tokens come device by device in place of a gather, and sums go back so.

A device may be asked for all that it gathered, or for nothing: there are rows for the former, and what is not
filled is not multiplied. No token is dropped, whatever the router does.

Shapes: N tokens (n of a device, G gathered), K experts a token, E experts (those of a device), R rows, one an
assignment, D embed, M width of an expert.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxthru.models import fp8
from jaxthru.models.ops import Ops
from jaxthru.models.remat import EXPERT_HIDDEN, ROUTING, remat
from jaxthru.models.scopes import COMBINE, DISPATCH, EXPERTS
from jaxthru.runtime import copies
from jaxthru.runtime.sharding import Axes
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.routing import (
    Order,
    Routing,
    combine,
    dispatch,
    dispatch_weights,
    route,
    sort_assignments,
)
from pallas_kernels.weighted_swiglu import weighted_swiglu

ROW_BLOCK = 8
"""Rows come in so many: TMA, which loads them on Hopper, begins at no others."""


def routed(ops: Ops, logits_NE: jax.Array, valid_N: jax.Array, bias_E: jax.Array | None, **how) -> Routing:
    """Returns `pallas_kernels.routing.route` of tokens that are sharded as between blocks; `counts_E` are
    those of all tokens, the same on each device. how: as that takes it."""
    local = functools.partial(route, **how, implementation=ops.routing_by)
    if ops.layout.mesh.size == 1:
        return local(logits_NE, valid_N, bias_E)
    by_token, row = ops.layout.spec(("tokens", None)), ops.layout.spec(("tokens",))

    def of_shard(logits_nE: jax.Array, valid_n: jax.Array, bias_E: jax.Array | None) -> Routing:
        found = local(logits_nE, valid_n, bias_E)
        return found._replace(counts_E=jax.lax.psum(found.counts_E, row[0]))

    whole = PartitionSpec()
    out_specs = Routing(ids_NK=by_token, weights_NK=by_token, counts_E=whole, scores_NE=by_token)
    sharded = ops.layout.shard_map(of_shard, (by_token, row, whole), out_specs, check_vma=False)
    return sharded(logits_NE, valid_N, bias_E)


def experts(ops: Ops, x_ND: jax.Array, routing: Routing, gate_up: Any, down: Any) -> jax.Array:
    """Returns what each token's experts make of it, [N, D] in the compute dtype, sharded over tokens.

    y = Σ_k down(silu(gate(x)) · up(x) · weight_k): the router's weight stands before the down map, so that
    its gradient needs no expert's output.

    Args:
      x_ND: sharded over tokens. routing: of the same tokens, sharded alike, see `routed`; of a token that is
        routed nowhere the result is 0.
      gate_up, down: weights [E, D, 2, M] and [E, M, D] with their WeightInfo. Their gradients are reduced to
        the stored shards as those of all other matrices are.
    """
    axes = gate_up.info.axes, down.info.axes
    local = functools.partial(_of_shard, ops, axes)
    matrices = tuple(weight[...].astype(ops.compute) for weight in (gate_up, down))
    arrays = x_ND, routing.ids_NK, routing.weights_NK
    if ops.layout.mesh.size == 1:
        return local(*arrays, *matrices)
    tokens = ops.layout.spec(("tokens", None))
    in_specs = (tokens,) * len(arrays) + tuple(map(ops.layout.spec, axes))
    return ops.layout.shard_map(local, in_specs, tokens, check_vma=False)(*arrays, *matrices)


def rows_for_each(top_k: int, own: int) -> int:
    """Returns the rows that a device with so many experts of its own has for each token that it gathers."""
    return min(top_k, own)


def _of_shard(ops: Ops, axes: tuple[Axes, Axes], x_nD, ids_nK, weights_nK, gate_up, down) -> jax.Array:
    layout = ops.layout
    matrices = [ops.kept(ops.gathered(*pair)) for pair in zip((gate_up, down), axes, strict=True)]
    trained = ops.adapters is None  # else they are of a frozen base, and nobody asks for their gradients
    if trained:  # the layer before waits for these: put off, they would keep all rows in memory
        x_nD, *matrices = _together(x_nD, *matrices)
    split = layout.spec(axes[0], without=("fsdp",))
    over = tuple(name for name in layout.live_axes if name in jax.tree.leaves(tuple(split)))
    if not over:
        order = _order(ops, ids_nK, len(gate_up))
        return _multiplied(ops, x_nD, weights_nK, order, *matrices)
    parts = (_copied if ops.copies else _collected)(ops, (x_nD, ids_nK, weights_nK), over)
    own, expert_axis = len(gate_up), split[axes[0].index("experts")]
    first = jax.lax.axis_index(expert_axis) * own if expert_axis else 0
    multiplied = functools.partial(_multiplied, ops)
    if len(parts) > 1:
        multiplied = remat(multiplied, ops.policy)
    y_GD, home, made = None, None, []
    for part, *weights in zip(parts, *(_for_each(each, len(parts)) for each in matrices), strict=True):
        x_GD, ids_GK, weights_GK = part.arrays
        ids_GK = jnp.where((ids_GK >= first) & (ids_GK < first + own), ids_GK - first, own)
        if y_GD is not None:
            # The products of a part wait for those of the part before, and on the way back of the one behind:
            # rows of one part alone are in memory. Transfers wait for no product, and run beside them. Of
            # a part's inputs it is the ids that wait, for what is made of them is kept: were it x, computing
            # that again would take the part before, too.
            ids_GK = _after(y_GD, ids_GK)
            y_GD, x_GD = _together(y_GD, x_GD)
            if trained:
                x_GD, *weights = _together(x_GD, *weights)
            made.append(_sent(home, y_GD, made))
        y_GD, home = multiplied(x_GD, weights_GK, _order(ops, ids_GK, own), *weights), part.home
    made.append(_sent(home, y_GD, made))
    return (_sum_of_copied if ops.copies else jnp.concatenate)(made)


class Part(NamedTuple):
    """What a device multiplies at a time. arrays: tokens, of this device or of others, their experts' ids and
    weights. home: brings what becomes of the tokens to the devices whose they are."""

    arrays: tuple[jax.Array, ...]
    home: Callable[[jax.Array], jax.Array]


def _collected(ops: Ops, arrays: tuple[jax.Array, ...], over: tuple[str, ...]) -> list[Part]:
    """Returns `mesh.expert_chunks` parts, each of tokens of all devices along mesh axes; each part's sums are
    those of this device's tokens in it."""
    parts = math.gcd(ops.expert_chunks, len(arrays[0]))
    gather = functools.partial(jax.lax.all_gather, axis_name=over, tiled=True)
    home = functools.partial(jax.lax.psum_scatter, axis_name=over, tiled=True)
    with jax.named_scope(DISPATCH):
        pieces = zip(*(jnp.split(array, parts) for array in arrays), strict=True)
        return [Part(tuple(map(gather, piece)), home) for piece in pieces]


def _copied(ops: Ops, arrays: tuple[jax.Array, ...], over: tuple[str, ...]) -> list[Part]:
    """Returns `mesh.expert_chunks` parts of each other device's tokens and, last, those of this device, which
    need not move: what becomes of the others' goes home while these are multiplied. What is copied is joined
    with nothing."""
    x_nD, *routing = arrays
    parts = math.gcd(ops.expert_chunks, len(x_nD))
    own, *others = _for_each(x_nD, jax.lax.axis_size(over))
    found = []
    with jax.named_scope(DISPATCH):
        for away, x_nD in enumerate(others, 1):
            home = functools.partial(copies.moved, axis_name=over, by=away)
            pieces = zip(*(jnp.split(array, parts) for array in (x_nD, *routing)), strict=True)
            found += [Part(_fetched(over, -away, *piece), home) for piece in pieces]
    return [*found, Part((own, *routing), lambda y_nD: y_nD)]


def _fetched(over: tuple[str, ...], by: int, x_nD: jax.Array, *routing: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays of another device. Their routing follows the tokens, which so are on their way while
    the router works: XLA has one copy under way at a time, and would have that of the routing first."""
    x_nD = copies.moved(x_nD, over, by)
    return x_nD, *(copies.moved(_after(x_nD, each), over, by) for each in routing)


def _sum_of_copied(made: Sequence[jax.Array]) -> jax.Array:
    """Returns what the devices have made of this one's tokens, added up in float32 and rounded once."""
    *others, own_nD = made
    parts = len(own_nD) // len(others[0])
    with jax.named_scope(COMBINE):
        copied = (jnp.concatenate(others[at : at + parts]) for at in range(0, len(others), parts))
        return sum(y_nD.astype(jnp.float32) for y_nD in (own_nD, *copied)).astype(own_nD.dtype)


def _sent(home: Callable, y_GD: jax.Array, before: list[jax.Array]) -> jax.Array:
    """Returns a part's sums where its tokens are. On the way forward they wait for those of the part
    before: XLA put the first part's off until both were left, and nothing to run beside them."""
    if before:
        y_GD = _after(before[-1], y_GD)
    with jax.named_scope(COMBINE):
        return home(y_GD)


def _after(first: jax.Array, array: jax.Array) -> jax.Array:
    """Returns an array, which on the way forward waits for another."""
    return jax.lax.optimization_barrier((array, jax.lax.stop_gradient(first)))[0]


@jax.custom_vjp
def _together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what it is given, whose gradients go on together: none of them before the others are made."""
    return arrays


_together.defvjp(
    lambda *arrays: (arrays, None), lambda _, gradients: tuple(jax.lax.optimization_barrier(gradients))
)


def _order(ops: Ops, ids_NK: jax.Array, own: int) -> Order:
    """Returns where the assignments lie that are for experts of this device; of others the id is `own`."""
    with jax.named_scope(DISPATCH):
        order = _shortened(sort_assignments(ids_NK, own, implementation=ops.routing_by))
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, ROUTING), order)


def _multiplied(ops: Ops, x_ND, weights_NK, order: Order, gate_up, down) -> jax.Array:
    """Returns what the experts of this device make of the tokens that are here."""
    own, width = len(gate_up), gate_up.shape[-1]
    with jax.named_scope(DISPATCH):
        x_RD = dispatch(x_ND, order, weights_NK.shape[1], implementation=ops.routing_by)
        weights_R = dispatch_weights(weights_NK, order)
    product = fp8.grouped if ops.float8_experts else grouped_matmul
    multiply = functools.partial(product, sizes_E=order.sizes_E, implementation=ops.grouped_matmul_by)
    with jax.named_scope(EXPERTS):
        gate_up_R2M = multiply(x_RD, gate_up.reshape(own, -1, 2 * width)).reshape(-1, 2, width)
        gate_up_R2M = checkpoint_name(gate_up_R2M, EXPERT_HIDDEN)
        how = {"sizes_E": order.sizes_E, "implementation": ops.weighted_swiglu_by}
        hidden_RM = weighted_swiglu(gate_up_R2M, weights_R, **how)
        y_RD = multiply(hidden_RM, down)
    with jax.named_scope(COMBINE):
        return combine(y_RD, order, len(x_ND), implementation=ops.routing_by)


def _shortened(order: Order) -> Order:
    """Returns an order without the rows that can never be filled: a token's experts are different ones, so of
    its assignments no more than there are experts here are for them. One row more stays, which all
    assignments that have none point to."""
    tokens, top_k = order.inverse_NK.shape
    rows = tokens * rows_for_each(top_k, len(order.sizes_E)) + 1
    rows += -rows % ROW_BLOCK
    if rows >= len(order.order_R):
        return order
    return Order(order.order_R[:rows], jnp.minimum(order.inverse_NK, rows - 1), order.sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _for_each(array: jax.Array, parts: int) -> tuple[jax.Array, ...]:
    """Returns an array for each of several parts, whose gradients are added up in float32 and rounded
    once."""
    return (array,) * parts


_for_each.defvjp(
    lambda array, parts: ((array,) * parts, None),
    lambda parts, _, each: (sum(one.astype(jnp.float32) for one in each).astype(each[0].dtype),),
)

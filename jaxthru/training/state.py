"""The training state: what a step moves and a checkpoint keeps."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.models.bind import Model, is_axes, is_matrix
from jaxthru.optim.optimizer import Linear, Optimizer
from jaxthru.runtime.sharding import Axes, Layout

State = dict[str, Any]
"""`step`: updates tried, int32. `params`: the weights, and `opt_state`: {"count", "slots"}, as the optimizer
keeps them. `grad_norm`: of the last update that was made, float32, 0 before the first. `skipped`: updates
skipped for non-finite values, in all; `skipped_in_a_row`: since the last good one."""


def init_state(model: Model, optimizer: Optimizer, key: jax.Array) -> State:
    """Returns the state before the first update."""
    return first_state(*optimizer.init(model.init(key)))


def first_state(params: Any, opt_state: Any) -> State:
    """Returns the state of these parameters before the first update."""
    zero = jnp.zeros((), jnp.int32)
    return {
        "step": zero,
        "params": params,
        "opt_state": opt_state,
        "grad_norm": jnp.zeros((), jnp.float32),
        "skipped": zero,
        "skipped_in_a_row": zero,
    }


def matrices(model: Model) -> Any:
    """Returns what the optimizer is to know of each parameter, see `Optimizer.matrices`: weight decay, the
    state's format and Muon are for matrices, not for norms and biases."""

    def describe(axes: Axes) -> bool | Linear:
        dims = tuple(dim for dim, axis in enumerate(axes) if axis != "layers")
        if not is_matrix(axes) or "vocab" in axes:
            return is_matrix(axes)
        # A linear map has the residual stream, "embed", on one side and all its other dims on the other.
        from_stream = axes[dims[0]] == "embed"
        return Linear(dims[:1], dims[1:]) if from_stream else Linear(dims[:-1], dims[-1:])

    return jax.tree.map(describe, model.axes, is_leaf=is_axes)


def abstract_state(model: Model, optimizer: Optimizer, layout: Layout) -> State:
    """Returns the state's shapes, dtypes and shardings, without making it.

    A slot of the optimizer is laid out as its parameter.
    """
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))

    def placed(axes: Axes, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: _placed(leaf, layout, axes), tree)

    def like_params(tree: Any) -> Any:
        return jax.tree.map(placed, model.axes, tree, is_leaf=is_axes)

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

"""The training state: what a step moves and a checkpoint keeps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxthru.models.bind import Model, is_axes, is_matrix
from jaxthru.runtime.sharding import Layout

State = dict[str, Any]
"""`step`: updates made, int32. `params`: float32. `opt_state`: Optax's, in the structure of params.
`skipped`: updates skipped for non-finite values, in all; `skipped_in_a_row`: since the last good one."""


def init_state(model: Model, optimizer: optax.GradientTransformation, key: jax.Array) -> State:
    """Returns the state before the first update."""
    params = model.init(key)
    zero = jnp.zeros((), jnp.int32)
    return {
        "step": zero,
        "params": params,
        "opt_state": optimizer.init(params),
        "skipped": zero,
        "skipped_in_a_row": zero,
    }


def decayed(model: Model) -> Any:
    """Returns True for each parameter that weight decay applies to: matrices, not norms and biases."""
    return jax.tree.map(is_matrix, model.axes, is_leaf=is_axes)


def abstract_state(model: Model, optimizer: optax.GradientTransformation, layout: Layout) -> State:
    """Returns the state's shapes, dtypes and shardings, without making it.

    A leaf of the optimizer's state is laid out as the parameter that its path ends in.
    """
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))
    axes_of = {
        jax.tree_util.keystr(path): axes
        for path, axes in jax.tree_util.tree_flatten_with_path(model.axes, is_leaf=is_axes)[0]
    }

    def place(path, leaf):
        suffixes = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
        axes = next((axes_of[suffix] for suffix in suffixes if suffix in axes_of), ())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.sharding(axes))

    return jax.tree_util.tree_map_with_path(place, shapes)


def sharded_init(model: Model, optimizer: optax.GradientTransformation, layout: Layout, seed: int) -> State:
    """Returns the first state, each shard made where it lives."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, layout))
    make = jax.jit(lambda key: init_state(model, optimizer, key), out_shardings=shardings)
    return make(jax.random.key(seed))

"""Weights kept in eight bits that never change: values and their scale, and how matmuls take them.

Shapes: I input and O output of a linear layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxthru.runtime.sharding import Axes, Layout

LARGEST_INT8 = 127


class Quantised(NamedTuple):
    """`values` × `scale` is about the tensor. scale: float32. Of float8 it is a scalar power of two, or NaN;
    of int8 there is one for each output."""

    values: jax.Array
    scale: jax.Array


def quantise_int8(matrix: jax.Array, inputs: tuple[int, ...]) -> Quantised:
    """Returns a weight of a linear layer [*in, *out] in int8, with one scale for each output: the largest
    magnitude over its inputs is 127. inputs: the dims of *in."""
    matrix = matrix.astype(jnp.float32)
    amax = jnp.max(jnp.abs(matrix), axis=inputs, keepdims=True)
    scale = jnp.where(amax > 0, amax, 1.0) / LARGEST_INT8
    values = jnp.round(matrix / scale).astype(jnp.int8)
    return Quantised(values, jnp.squeeze(scale, inputs))


def widened(weight_IO: Quantised, dtype: jnp.dtype) -> jax.Array:
    """Returns a quantised matrix in another dtype."""
    return (weight_IO.values.astype(jnp.float32) * weight_IO.scale.reshape(1, -1)).astype(dtype)


def product(layout: Layout, x_NI: jax.Array, weight_IO: Quantised, axes: Axes) -> jax.Array:
    """Returns `x_NI` times a quantised matrix of these axes, which is gathered over `fsdp` as it is, and
    widened for each use: the backward pass does it again."""

    def multiplied(x_NI: jax.Array, weight_IO: Quantised) -> jax.Array:
        whole = layout.gathered(weight_IO.values, axes)
        return x_NI @ widened(weight_IO._replace(values=whole), x_NI.dtype)

    return jax.checkpoint(multiplied)(x_NI, weight_IO)


def plain(matrix: jax.Array | Quantised, dtype: jnp.dtype) -> jax.Array:
    """Returns a matrix in this dtype, be it quantised or not."""
    return widened(matrix, dtype) if isinstance(matrix, Quantised) else matrix.astype(dtype)

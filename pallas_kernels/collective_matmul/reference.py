"""The plain form: the collective, then the matmul, or the matmul, then the collective.

Shapes: M rows of a shard, A rows of all shards, K contracted, N columns.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot


def all_gather_matmul(x_MK, weights, *, axis_name):
    x_AK = jax.lax.all_gather(x_MK, axis_name, tiled=True)
    return tuple(dot(x_AK, w_KN, 1, 0) for w_KN in weights)


def all_gather_matmul_backward(x_MK, weights, dys, *, axis_name):
    x_AK = jax.lax.all_gather(x_MK, axis_name, tiled=True)
    # One matmul accumulates in float32 by itself; several are summed in it too.
    dtype = jnp.float32 if len(weights) > 1 else None
    dx_AK = sum(dot(dy_AN, w_KN, 1, 1, dtype) for dy_AN, w_KN in zip(dys, weights, strict=True))
    dx_MK = jax.lax.psum_scatter(dx_AK.astype(x_MK.dtype), axis_name, tiled=True)
    return dx_MK, tuple(dot(x_AK, dy_AN, 0, 0) for dy_AN in dys)


def matmul_reduce_scatter(y_AK, w_KN, *, axis_name):
    return jax.lax.psum_scatter(dot(y_AK, w_KN, 1, 0), axis_name, tiled=True)


def matmul_reduce_scatter_backward(y_AK, w_KN, dout_MN, *, axis_name):
    dout_AN = jax.lax.all_gather(dout_MN, axis_name, tiled=True)
    return dot(dout_AN, w_KN, 1, 1), dot(y_AK, dout_AN, 0, 0)

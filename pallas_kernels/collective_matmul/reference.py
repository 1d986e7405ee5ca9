"""The plain form: the collective, then the product, or the product, then the collective.

Shapes: M rows of a shard, A rows of all shards, K contracted, N columns.
"""

import jax
import jax.numpy as jnp


def all_gather_matmul(x_MK, weights, *, axis_name):
    x_AK = jax.lax.all_gather(x_MK, axis_name, tiled=True)
    return tuple(_dot(x_AK, w_KN, 1, 0) for w_KN in weights)


def all_gather_matmul_backward(x_MK, weights, dys, *, axis_name):
    x_AK = jax.lax.all_gather(x_MK, axis_name, tiled=True)
    # One product accumulates in float32 by itself; several are summed in it too.
    dtype = jnp.float32 if len(weights) > 1 else None
    dx_AK = sum(_dot(dy_AN, w_KN, 1, 1, dtype) for dy_AN, w_KN in zip(dys, weights, strict=True))
    dx_MK = jax.lax.psum_scatter(dx_AK.astype(x_MK.dtype), axis_name, tiled=True)
    return dx_MK, tuple(_dot(x_AK, dy_AN, 0, 0) for dy_AN in dys)


def matmul_reduce_scatter(y_AK, w_KN, *, axis_name):
    return jax.lax.psum_scatter(_dot(y_AK, w_KN, 1, 0), axis_name, tiled=True)


def matmul_reduce_scatter_backward(y_AK, w_KN, dout_MN, *, axis_name):
    dout_AN = jax.lax.all_gather(dout_MN, axis_name, tiled=True)
    return _dot(dout_AN, w_KN, 1, 1), _dot(y_AK, dout_AN, 0, 0)


def _dot(a, b, a_dim: int, b_dim: int, dtype=None):
    """Returns the product of two matrices over one dim of each, of the given dtype or else of theirs."""
    return jax.lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=dtype)

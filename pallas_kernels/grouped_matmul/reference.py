"""One group after another: all rows times its matrix, and of that the rows which are its own.

E times the products that are needed: to compare with, not to train with.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot
from pallas_kernels.varying import vary_alike


def grouped_matmul(x_RI, w, sizes_E, *, transposed: bool) -> jax.Array:
    """Returns [R, O]; see `grouped_matmul` of the package."""
    x32_RI, w32 = x_RI.astype(jnp.float32), w.astype(jnp.float32)

    def add_group(y_RO, group):
        w_, mine_R = group
        own_RI = jnp.where(mine_R[:, None], x32_RI, 0)
        return y_RO + dot(own_RI, w_, 1, 1 if transposed else 0), None

    O = w.shape[1 if transposed else 2]  # noqa: E741
    zeros = vary_alike(jnp.zeros((len(x_RI), O), jnp.float32), x_RI)[0]
    return jax.lax.scan(add_group, zeros, (w32, _own(sizes_E, len(x_RI))))[0].astype(x_RI.dtype)


def grouped_matmul_float8(x8_RI, w8_EOI, scales_E, sizes_E, *, dtype, exact: bool) -> jax.Array:
    """Returns [R, O]; see `grouped_matmul_float8` of the package."""
    w_EOI = w8_EOI.astype(jnp.float32) * scales_E[:, None, None]
    return grouped_matmul(x8_RI.astype(jnp.float32), w_EOI, sizes_E, transposed=True).astype(dtype)


def grouped_outer(x_RI, y_RO, sizes_E, into, *, dtype) -> jax.Array:
    """Returns [E, I, O]; see `grouped_outer` of the package."""

    def of_group(mine_R):
        own_RI, own_RO = (jnp.where(mine_R[:, None], a.astype(jnp.float32), 0) for a in (x_RI, y_RO))
        return dot(own_RI, own_RO, 0, 0)

    sums_EIO = jax.lax.map(of_group, _own(sizes_E, len(x_RI)))
    return (sums_EIO if into is None else into + sums_EIO).astype(dtype)


def _own(sizes_E, R: int) -> jax.Array:
    """Returns which rows are each group's, [E, R]."""
    end_E, row_R = jnp.cumsum(sizes_E), jnp.arange(R, dtype=jnp.int32)
    begin_E = end_E - sizes_E
    return (begin_E[:, None] <= row_R[None, :]) & (row_R[None, :] < end_E[:, None])

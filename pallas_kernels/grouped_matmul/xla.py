"""One small product a tile of rows, in a loop: portable, and as many FLOPs as the rows need and a few more.

Tiles are taken whole. What a product has of rows behind its group's last is overwritten by the next one, or
lies behind the last group, where anything may be; a sum over rows leaves them out. So nothing is padded but
the end. The loop ends with the last tile there is.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot
from pallas_kernels.grouped_matmul.tiles import tiles_of
from pallas_kernels.varying import vary_alike

SMALLEST, LARGEST = 8, 128  # rows of a tile


def tile_rows(rows: int, groups: int) -> int:
    """Returns the rows of a tile: a power of two, about a quarter of a group's mean, so that last tiles
    waste an eighth."""
    quarter = max(rows // (4 * groups), 1)
    return min(max(1 << (quarter.bit_length() - 1), SMALLEST), LARGEST)


def grouped_matmul(x_RI, w, sizes_E, *, transposed: bool) -> jax.Array:
    """Returns [R, O]; see `grouped_matmul` of the package."""
    R, B = len(x_RI), tile_rows(len(x_RI), len(w))
    group_P, first_P, *_, count = tiles_of(sizes_E, R, B)
    padded = jnp.pad(x_RI, ((0, B), (0, 0)))

    def put_tile(p, y):
        x_BI = jax.lax.dynamic_slice_in_dim(padded, first_P[p], B)
        matrix = jax.lax.dynamic_index_in_dim(w, group_P[p], keepdims=False)
        y_BO = dot(x_BI, matrix, 1, 1 if transposed else 0, jnp.float32).astype(y.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, y_BO, first_P[p], 0)

    O = w.shape[1 if transposed else 2]  # noqa: E741
    empty = vary_alike(jnp.zeros((R + B, O), x_RI.dtype), x_RI)[0]
    return jax.lax.fori_loop(0, count, put_tile, empty)[:R]


def grouped_outer(x_RI, y_RO, sizes_E, into, *, dtype) -> jax.Array:
    """Returns [E, I, O]; see `grouped_outer` of the package."""
    R, (E,) = len(x_RI), sizes_E.shape
    B = tile_rows(R, E)
    group_P, first_P, end_P, begins_P, count = tiles_of(sizes_E, R, B)
    padded_x, padded_y = (jnp.pad(a, ((0, B), (0, 0))) for a in (x_RI, y_RO))

    def add_tile(p, state):
        sum_IO, sums_EIO = state
        own_B1 = (first_P[p] + jnp.arange(B, dtype=jnp.int32) < end_P[p])[:, None]
        take = lambda a: jnp.where(own_B1, jax.lax.dynamic_slice_in_dim(a, first_P[p], B), 0)  # noqa: E731
        begun = jax.lax.dynamic_index_in_dim(sums_EIO, group_P[p], keepdims=False).astype(jnp.float32)
        sum_IO = jnp.where(first_P[p] == begins_P[p], begun, sum_IO)
        sum_IO += dot(take(padded_x), take(padded_y), 0, 0, jnp.float32)
        return sum_IO, jax.lax.dynamic_update_index_in_dim(sums_EIO, sum_IO.astype(dtype), group_P[p], 0)

    I, O = x_RI.shape[1], y_RO.shape[1]  # noqa: E741
    sums_EIO = jnp.zeros((E, I, O), dtype) if into is None else into
    zeros = vary_alike(jnp.zeros((I, O), jnp.float32), sums_EIO, x_RI)[:2]
    return jax.lax.fori_loop(0, count, add_tile, zeros)[1]

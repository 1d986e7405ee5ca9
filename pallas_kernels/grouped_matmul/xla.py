"""One small product a tile of rows, in a loop: portable, and as many FLOPs as the rows need and a few more.

Tiles are taken whole, at the end of the rows from so many before it. What a product has of rows behind its
group's last is overwritten by the next one, or lies behind the last group, where anything may be; what it has
of rows before its own is put back. So nothing is padded or copied. The loop ends with the last tile there is:
where most rows belong to no group, as on a device that has a few of all experts, it ends early.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot
from pallas_kernels.grouped_matmul.tiles import Tiles, tiles_of
from pallas_kernels.varying import vary_alike

SMALLEST, LARGEST = 8, 128  # rows of a tile


def tile_rows(rows: int, groups: int) -> int:
    """Returns the rows of a tile: a power of two, about a quarter of a group's mean, so that last tiles
    waste an eighth."""
    quarter = max(rows // (4 * groups), 1)
    return min(max(1 << (quarter.bit_length() - 1), SMALLEST), LARGEST, rows)


def grouped_matmul(x_RI, w, sizes_E, *, transposed: bool) -> jax.Array:
    """Returns [R, O]; see `grouped_matmul` of the package."""
    R, B = len(x_RI), tile_rows(len(x_RI), len(w))
    tiles = tiles_of(sizes_E, R, B)

    def put_tile(p, y_RO):
        begin, own_B1 = _place(tiles, p, R, B)
        x_BI, before_BO = (jax.lax.dynamic_slice_in_dim(a, begin, B) for a in (x_RI, y_RO))
        matrix = jax.lax.dynamic_index_in_dim(w, tiles.group_P[p], keepdims=False)
        y_BO = dot(x_BI, matrix, 1, 1 if transposed else 0, jnp.float32).astype(y_RO.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y_RO, jnp.where(own_B1, y_BO, before_BO), begin, 0)

    O = w.shape[1 if transposed else 2]  # noqa: E741
    empty_RO = vary_alike(jnp.zeros((R, O), x_RI.dtype), x_RI)[0]
    return jax.lax.fori_loop(0, tiles.count, put_tile, empty_RO)


def grouped_matmul_float8(x8_RI, w8_EOI, scales_E, sizes_E, *, dtype, exact: bool) -> jax.Array:
    """Returns [R, O]; see `grouped_matmul_float8` of the package. It saves nothing: operands are widened."""
    w_EOI = w8_EOI.astype(jnp.float32) * scales_E[:, None, None]
    return grouped_matmul(x8_RI.astype(jnp.float32), w_EOI, sizes_E, transposed=True).astype(dtype)


def grouped_outer(x_RI, y_RO, sizes_E, into, *, dtype) -> jax.Array:
    """Returns [E, I, O]; see `grouped_outer` of the package."""
    R, (E,) = len(x_RI), sizes_E.shape
    B = tile_rows(R, E)
    tiles = tiles_of(sizes_E, R, B)

    def add_tile(p, state):
        sum_IO, sums_EIO = state
        group = tiles.group_P[p]
        begin, own_B1 = _place(tiles, p, R, B)
        x_BI, y_BO = (jnp.where(own_B1, jax.lax.dynamic_slice_in_dim(a, begin, B), 0) for a in (x_RI, y_RO))
        begun_IO = jax.lax.dynamic_index_in_dim(sums_EIO, group, keepdims=False).astype(jnp.float32)
        opens = tiles.first_P[p] == tiles.begins_P[p]
        sum_IO = jnp.where(opens, begun_IO, sum_IO) + dot(x_BI, y_BO, 0, 0, jnp.float32)
        return sum_IO, jax.lax.dynamic_update_index_in_dim(sums_EIO, sum_IO.astype(dtype), group, 0)

    shape = x_RI.shape[1], y_RO.shape[1]
    sums_EIO = jnp.zeros((E, *shape), dtype) if into is None else into
    sum_IO, sums_EIO, _ = vary_alike(jnp.zeros(shape, jnp.float32), sums_EIO, x_RI)
    return jax.lax.fori_loop(0, tiles.count, add_tile, (sum_IO, sums_EIO))[1]


def _place(tiles: Tiles, p, R: int, B: int) -> tuple[jax.Array, jax.Array]:
    """Returns where B rows begin that hold tile p's, and which of them are its own, [B, 1]."""
    begin = jnp.minimum(tiles.first_P[p], R - B)
    row_B = begin + jnp.arange(B, dtype=jnp.int32)
    return begin, ((tiles.first_P[p] <= row_B) & (row_B < tiles.end_P[p]))[:, None]

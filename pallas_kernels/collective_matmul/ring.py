"""Collective matmuls as a ring of `lax.ppermute`, which runs wherever XLA does.

The ring is unrolled, so that a scheduler which hides latency sees each transfer beside a matmul that does
not depend on it, and barriers keep XLA from undoing that.

What travels is of the operands' dtype: float32 sums would double the bytes that are to be hidden, and a
reduce-scatter of the product rounds its sums at every hop as well. So a sum of t products is rounded t - 1
times beyond the products' own rounding. The gradients of weights, which do not travel, are summed in float32.

Shapes: M rows of a shard, P of them in one lane, A = t·M rows of all shards, K contracted, N columns.
"""

import itertools
from collections.abc import Callable, Generator, Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.collective_matmul import schedule
from pallas_kernels.dot import dot
from pallas_kernels.varying import vary_alike


def all_gather_matmul(x_MK, weights, *, axis_name, directions=1):
    t = jax.lax.axis_size(axis_name)
    ys = [_unwritten(t * len(x_MK), w_KN.shape[1], x_MK) for w_KN in weights]
    gathered, done = _gather(x_MK, axis_name, directions), None
    for _ in range(t):
        for row, x_PK in gathered.send(done):
            done = [_product(row, x_PK, w_KN, 0) for w_KN in weights]
            ys = [_write(y_AN, row, y_PN) for y_AN, y_PN in zip(ys, done, strict=True)]
    return tuple(ys)


def all_gather_matmul_backward(x_MK, weights, dys, *, axis_name, directions=1):
    w_KN = jnp.concatenate(weights, 1)  # one matmul for all, so that their sum is not rounded

    def dy_PN(row, rows):
        return jnp.concatenate([_read(dy_AN, row, rows) for dy_AN in dys], 1)

    def dx_PK(row, rows):
        return _product(row, dy_PN(row, rows), w_KN, 1)

    dw_KN, reduced = None, _reduce(dx_PK, len(x_MK), axis_name, directions)
    gathered, sums = _gather(x_MK, axis_name, directions), None
    for _ in range(jax.lax.axis_size(axis_name)):
        parts = gathered.send(sums)
        sums = next(reduced)  # both in one pass: two matmuls for each two transfers
        for row, x_PK in parts:
            dw_KN = _add(dw_KN, dot(x_PK, dy_PN(row, len(x_PK)), 0, 0, jnp.float32))
    ends = list(itertools.accumulate(w.shape[1] for w in weights[:-1]))
    return jnp.concatenate(sums), tuple(jnp.split(dw_KN.astype(x_MK.dtype), ends, 1))


def matmul_reduce_scatter(y_AK, w_KN, *, axis_name, directions=1):
    def out_PN(row, rows):
        return _product(row, _read(y_AK, row, rows), w_KN, 0)

    *_, sums = _reduce(out_PN, len(y_AK) // jax.lax.axis_size(axis_name), axis_name, directions)
    return jnp.concatenate(sums)


def matmul_reduce_scatter_backward(y_AK, w_KN, dout_MN, *, axis_name, directions=1):
    dy_AK, dw_KN = _unwritten(*y_AK.shape, y_AK), None
    gathered, done = _gather(dout_MN, axis_name, directions), None
    for _ in range(jax.lax.axis_size(axis_name)):
        for row, dout_PN in gathered.send(done):
            done = _product(row, dout_PN, w_KN, 1)
            dy_AK = _write(dy_AK, row, done)
            dw_KN = _add(dw_KN, dot(_read(y_AK, row, len(dout_PN)), dout_PN, 0, 0, jnp.float32))
    return dy_AK, dw_KN.astype(w_KN.dtype)


def _gather(x_MK, axis_name: str, directions: int) -> Generator[list[tuple[jax.Array, jax.Array]]]:
    """Yields, for each step, each lane's first row in the whole and the rows of x that are here.

    They are on their way to the next rank before they are worked on. What is sent back to the generator is
    some of that work: the next transfer waits for it. Free to choose, XLA's scheduler sends the rows all the
    way around before it multiplies any, and hides only the last transfer.
    """
    M, t, rank = len(x_MK), jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    lanes = schedule.ring(t, M, directions)
    held = sent = [x_MK[lane.start : lane.start + lane.rows] for lane in lanes]
    for step in range(t):
        rows = [_row(rank, lane.gather[step], t, M) + lane.start for lane in lanes]
        here = list(zip(rows, held, strict=True))
        if step < t - 1:
            held = _pass_on(sent, lanes, axis_name)
        done = yield here
        sent = [jax.lax.optimization_barrier((x, done))[0] for x in held]


def _reduce(block: Callable, M: int, axis_name: str, directions: int) -> Iterator[list[jax.Array]]:
    """Yields, for each step, each lane's sums so far; the last are this rank's, over all ranks.

    block: (first row in the whole, number of rows) -> this rank's contribution to those rows.
    """
    t, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    lanes = schedule.ring(t, M, directions)
    sums = [None] * len(lanes)
    for step in range(t):
        if step:
            sums = _pass_on(sums, lanes, axis_name)
        parts = [block(_row(rank, lane.reduce[step], t, M) + lane.start, lane.rows) for lane in lanes]
        # Were the addition fused into the matmul, the matmul would wait for what is still on its way.
        parts = [jax.lax.optimization_barrier(part) for part in parts]
        sums = [_add(total, part) for total, part in zip(sums, parts, strict=True)]
        yield sums


def _pass_on(arrays, lanes, axis_name: str) -> list[jax.Array]:
    """Returns, for each lane, the array of the rank before."""
    return [jax.lax.ppermute(x, axis_name, lane.permutation()) for x, lane in zip(arrays, lanes, strict=True)]


def _row(rank: jax.Array, offset: int, t: int, M: int) -> jax.Array:
    return jax.lax.rem(rank + offset, t) * M


def _read(x, row, rows: int):
    return jax.lax.dynamic_slice_in_dim(x, row, rows)


def _write(x, row, part):
    return jax.lax.dynamic_update_slice_in_dim(x, part, row, 0)


def _unwritten(rows: int, columns: int, like: jax.Array):
    """Returns an array whose rows will all be written: filling it first would cost a pass over it."""
    return vary_alike(jax.lax.empty((rows, columns), like.dtype), like)[0]


def _add(total, part):
    return part if total is None else total + part


def _product(row, x, w, w_dim: int):
    """Returns x times the matrix, over the matrix's dim `w_dim`; x is of the rows from `row` on.

    XLA would merge all steps' matmuls with one matrix into a single matmul, which waits for all that is
    still on its way. The barrier makes another matrix of it for each row, and x itself stays free of it.
    """
    w, _ = jax.lax.optimization_barrier((w, row))
    return dot(x, w, 1, w_dim)

"""The two kernels for Hopper, on the ring of `hopper_ring`: products of rows by group, and sums over them.

Shapes: R rows, E groups, I columns of x, O of the results; tiles of m × n.

`grouped_matmul`: a tile has m rows of one group and n columns. Which rows, a table says, which XLA makes on
the device: so there are just as many tiles as rows need, and nobody waits for the sizes. Tiles are taken in
bands of row blocks, all columns of a band one after another, so that the rows of a band and the matrices of
its groups are read from the L2 cache. TMA loads blocks that begin at multiples of 8 rows, so a group's first
tile may begin up to 7 rows early; what a tile has of other groups' rows, or of none's, is multiplied and
thrown away, as no row has a part in another's result. A consumer none of whose rows are the group's
multiplies nothing. Rows are stored by TMA in blocks of 64, 32, 16, 8, 4, 2 and 1, of which a tile that is
full takes the first alone. With `late` they wait in registers, and are stored between the steps of the next
tile, in both kernels.

`grouped_outer`: a tile is m × n of one group's sum, whose rows are contracted in blocks of 64 in an order
that depends on nothing but the sizes. Only the first and the last block may have rows of others: there both
consumers write zeros over them, in x and in y, for zero times NaN is NaN. These two come last, so that the
products before them go on meanwhile. A group without rows takes one block, all zeros. With `into`, TMA adds
each tile to it in float32; every element is added to once, so no order is left open.

The thread blocks of a cluster take tiles beside each other, of the same rows in the first kernel, with
`shares_w` of the same columns of a matrix, and of the same columns in the second, always of one group: they
go through the same steps, and TMA hands what they share to both within their GPU. There is no multicast
between GPUs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.hopper_tiles import Tiles
from pallas_kernels.grouped_matmul.tiles import tiles_of
from pallas_kernels.hopper_ring import Pieces, Ring, i32, kernel, order, out_of, run, scratch_of
from pallas_kernels.hopper_tiles import CONSUMERS, PIECE, STEP

ROWS = 8  # TMA's tiles in shared memory have as many: what it loads begins at a multiple
LADDER = tuple(PIECE >> i for i in range(PIECE.bit_length()))  # 64, 32, ..., 1


def grouped_matmul(x_RI, w, sizes_E, tiles: Tiles, ctas: int, *, transposed: bool = False):
    """Returns y_RO: each row times the matrix of its group.

    Args:
      x_RI: bfloat16.
      w: [E, I, O], or [E, O, I] if `transposed`.
      sizes_E: int32, of each group.
      tiles: divide I and O.
      ctas: how many thread blocks run at once: the number of SMs.
    """
    (R, I), O = x_RI.shape, w.shape[1 if transposed else 2]  # noqa: E741
    ctas -= ctas % tiles.cluster
    columns, steps, dtype = O // tiles.n, I // STEP, x_RI.dtype
    # A row block has parts of a consumer each. A cluster that shares w takes them in turns, so that the last
    # ones of a group fall to both its thread blocks.
    part, apart = tiles.m_of_consumer, tiles.cluster if tiles.shares_w else 1
    blocks = tiles_of(sizes_E, R, apart * tiles.m, aligned=ROWS)
    last = len(blocks.group_P) - 1

    def body(x_ref, w_ref, group_ref, first_ref, end_ref, begins_ref, behind_ref, y_ref, *scratch):
        shares = "b" if tiles.shares_w else "a"
        ring = Ring(tiles, scratch, b_transposed=transposed, shares=shares)
        count = behind_ref[len(sizes_E) - 1] * apart
        begin = part * (lax.axis_index("cluster") if tiles.shares_w else 0)

        def look_up(index):
            """Returns the tile's column block and group, its first row, and the group's first row and the
            one behind its last."""
            m, n = order(index, count, columns, tiles, shares)
            m = jnp.clip(lax.div(m, i32(apart)), 0, last)  # of a number behind the last tile's, anything
            return n, group_ref[m], first_ref[m] + begin, begins_ref[m], end_ref[m]

        def produce(tile, base):
            n, group, first, _, _ = tile
            of_n = pl.ds(n * tiles.n, tiles.n)
            copied = part if apart > 1 else tiles.m
            rows = [pl.ds(pl.multiple_of(first + r * apart, ROWS), copied) for r in range(0, tiles.m, copied)]

            def windows(step):
                contracted = pl.ds(step * STEP, STEP)
                b_window = (group, of_n, contracted) if transposed else (group, contracted, of_n)
                return *(x_ref.at[each, contracted] for each in rows), w_ref.at[b_window]

            ring.load_each(steps, base, windows)

        def store(number, value, n, row, begins, end):
            r, c = tiles.pieces[number]
            to_ref = y_ref.at[:, pl.ds(n * tiles.n + c, PIECE)]
            _store_rows(ring.write_out(number, value), to_ref, row + r, begins, end)

        pieces = Pieces(tiles.pieces, PIECE, dtype, store, nowhere=(0, 0, 0, 0))

        def consume(tile, base, waiting=None):
            n, _, first, begins, end = tile
            row = first + ring.first_row * apart

            def multiply(waiting):
                acc = _multiply(ring, pieces, waiting, steps, base)
                return _leave(tiles, pieces.of(acc, (n, row, begins, end)), pieces)

            def skip(waiting):
                ring.skip(steps, base)
                return waiting

            some = (row < end) & (row + part > begins)
            return lax.cond(some, multiply, skip, waiting)

        total, late = count * columns, pieces if tiles.late else None
        run(tiles, ctas, total, lambda tile: i32(steps), ring, produce, consume, look_up, late=late)

    b_tile = (tiles.n, STEP) if transposed else (STEP, tiles.n)
    out = out_of(tiles, dtype, tiles.out_slots(PIECE), rows=1)
    copies = 1 + (CONSUMERS if apart > 1 else 1)
    scratch = scratch_of(tiles, (tiles.m, STEP), b_tile, dtype, out, copies)
    out_type = jax.ShapeDtypeStruct((R, O), dtype)
    return kernel(body, out_type, tiles, ctas, scratch)(x_RI, w, *blocks)


def _multiply(ring: Ring, pieces: Pieces, waiting, steps, base, prepare=None):
    """Returns a consumer's part of a tile, and stores meanwhile what waits of the tile before it, if any."""
    if waiting is None:
        return ring.multiply(steps, base, prepare)
    acc = ring.multiply(steps, base, prepare, lambda step: pieces.store_at(step, waiting))
    pieces.store_from(steps, waiting)
    return acc


def _leave(tiles: Tiles, made, pieces: Pieces):
    """Stores a tile's pieces, or returns them to be stored late."""
    return made if tiles.late else pieces.store_from(0, made)


def _store_rows(piece_ref, to_ref, row, begins, end):
    """Stores those rows of a piece that are the group's: rows begins to end, where the piece begins at `row`.

    What TMA stores has a size that is fixed: so the rows are cut into powers of two.
    """
    at = jnp.maximum(begins - row, 0)
    count = jnp.maximum(jnp.minimum(end - row, PIECE) - at, 0)
    for size in LADDER:

        def store(at=at, size=size):
            rows_ref = to_ref.at[pl.ds(row + at, size)]
            plgpu.copy_smem_to_gmem(piece_ref.at[pl.ds(at, size)], rows_ref, commit_group=False)

        pl.when((count & size) != 0)(store)
        at += count & size
    plgpu.commit_smem_to_gmem_group()


def grouped_outer(x_RI, y_RO, sizes_E, into, tiles: Tiles, ctas: int, *, dtype):
    """Returns each group's Σ x ⊗ y over its rows, [E, I, O] of `dtype`, added to `into` if there is one.

    Args:
      x_RI, y_RO: bfloat16.
      sizes_E: int32, of each group.
      into: None, or float32 [E, I, O], which `dtype` is then too.
      tiles: divide I and O.
      ctas: how many thread blocks run at once: the number of SMs.
    """
    I, O, (E,) = x_RI.shape[1], y_RO.shape[1], sizes_E.shape  # noqa: E741
    ctas -= ctas % tiles.cluster
    tiles_M, tiles_N = I // tiles.m, O // tiles.n
    of_group = tiles_M * tiles_N
    width = tiles.piece_columns(dtype)
    parts = tiles.pieces_of(width)
    bounds = jnp.concatenate((jnp.zeros(1, jnp.int32), jnp.cumsum(sizes_E)))

    def body(x_ref, y_ref, bounds_ref, out_ref, *scratch):
        *scratch, masked = scratch
        ring = Ring(tiles, scratch, a_transposed=True)

        def look_up(index):
            """Returns the tile's number, its group's first row and the one behind its last."""
            index = jnp.minimum(index, E * of_group - 1)
            group = lax.div(index, i32(of_group))
            return index, bounds_ref[group], bounds_ref[group + 1]

        def place(index):
            """Returns the tile's group, and its first row and column in the sum."""
            m, n = order(lax.rem(index, i32(of_group)), tiles_M, tiles_N, tiles)
            return lax.div(index, i32(of_group)), m * tiles.m, n * tiles.n

        def steps_of(tile):
            _, begins, end = tile
            return jnp.maximum(lax.div(end - _aligned(begins) + (STEP - 1), i32(STEP)), 1)

        def row_of(tile, step):
            """Returns the first row of the block that a step contracts: the inner ones come first."""
            steps = steps_of(tile)
            outer = jnp.where(step == steps - 2, 0, steps - 1)
            return _aligned(tile[1]) + jnp.where(step < steps - 2, step + 1, outer) * STEP

        def produce(tile, base):
            _, at_m, at_n = place(tile[0])

            def windows(step):
                rows = pl.ds(pl.multiple_of(row_of(tile, step), ROWS), STEP)
                return x_ref.at[rows, pl.ds(at_m, tiles.m)], y_ref.at[rows, pl.ds(at_n, tiles.n)]

            ring.load_each(steps_of(tile), base, windows)

        def store(number, value, index):
            (r, c), (group, at_m, at_n) = parts[number], place(index)
            rows, of_n = pl.ds(at_m + ring.first_row + r, PIECE), pl.ds(at_n + c, width)
            how = {} if into is None else {"reduction_op": "add"}

            @pl.when(index >= 0)
            def _():
                plgpu.copy_smem_to_gmem(ring.write_out(number, value), out_ref.at[group, rows, of_n], **how)

        pieces = Pieces(parts, width, dtype, store, nowhere=(-1,))

        def consume(tile, base, waiting=None):
            index, begins, end = tile
            steps = steps_of(tile)

            def prepare(step, slot):
                row = row_of(tile, step)
                mask = functools.partial(_mask, ring, masked, slot, begins - row, end - row)
                pl.when(step >= steps - 2)(mask)

            acc = _multiply(ring, pieces, waiting, steps, base, prepare)
            return _leave(tiles, pieces.of(acc, (index,)), pieces)

        late = pieces if tiles.late else None
        run(tiles, ctas, E * of_group, steps_of, ring, produce, consume, look_up, late=late)

    out = out_of(tiles, dtype, tiles.out_slots(width))
    scratch = scratch_of(tiles, (STEP, tiles.m), (STEP, tiles.n), x_RI.dtype, out)
    scratch.append(plgpu.Barrier(num_arrivals=CONSUMERS))
    out_type = jax.ShapeDtypeStruct((E, I, O), dtype)
    if into is None:
        return kernel(body, out_type, tiles, ctas, scratch)(x_RI, y_RO, bounds)
    sums_ref = jax.new_ref(into)  # an operand that is a result too
    kernel(body, [], tiles, ctas, scratch)(x_RI, y_RO, bounds, sums_ref)
    return jax.freeze(sums_ref)


def _aligned(row):
    return row & ~(ROWS - 1)


def _mask(ring: Ring, masked, slot, begins, end):
    """Has both consumers write zeros over a slot's rows before `begins` and from `end` on, each over its own
    columns of x and over every other 64 of y, which both read."""
    wg = lax.axis_index("wg")
    row = plgpu.broadcasted_iota(jnp.int32, (STEP, PIECE), 0, layout=plgpu.Layout.WGMMA)
    inside = (row >= begins) & (row < end)

    def mask(ref, column):
        window = ref.at[slot, :, pl.ds(column, PIECE)]
        window[...] = jnp.where(inside, window[...], jnp.zeros((), ref.dtype))

    for c in range(0, ring.tiles.m_of_consumer, PIECE):
        mask(ring.a, ring.first_row + c)
    pieces = ring.tiles.n // PIECE
    for first in range(0, pieces, CONSUMERS):
        number = first + wg
        both = functools.partial(mask, ring.b, number * PIECE)
        both() if first + CONSUMERS <= pieces else pl.when(number < pieces)(both)
    plgpu.commit_smem()
    plgpu.barrier_arrive(masked)
    plgpu.barrier_wait(masked)

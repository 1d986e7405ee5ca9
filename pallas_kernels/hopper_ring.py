"""The persistent matmul for Hopper: shared memory as a ring between a thread block's producer and consumers.

One thread block (CTA) runs on each SM and takes tiles of the result in turn. Two of its warpgroups multiply:
the consumers. The third loads their operands by TMA: the producer, which runs ahead of them by as many steps
as the ring has slots, and so into their next tile while they store one. Which tiles there are, and what they
are made of, say the kernels that are built of this.
"""

import functools
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.hopper_tiles import CONSUMERS, PIECE, RingTiles

PRODUCER = CONSUMERS  # the warpgroup's index
# Of a consumer and of the producer: of 65,536, for 128 threads of each warpgroup; multiples of 8.
REGISTERS = 232, 40
REGISTERS_LATE = 240, 24  # where a tile's pieces wait in them while the next is summed
WIDTH_BYTES = 128  # of a row of shared memory: what TMA and the tensor cores swizzle
APART = 2  # steps of 8 bits whose sums the tensor cores keep; no more than a ring's slots, 2 at least
i32 = jnp.int32


def order(number, tiles_M, tiles_N: int, tiles: RingTiles, shares: Literal["a", "b"] = "b"):
    """Returns the row block and column block of a tile of tiles_M × tiles_N, the former a number or traced.

    Neighbours in time share operands in the L2 cache, those of a cluster what it `shares`: their rows of a,
    or their columns of b.
    """
    group, rank = lax.div(number, i32(tiles.cluster)), lax.rem(number, i32(tiles.cluster))
    along_m, along_n = (1, tiles.cluster) if shares == "a" else (tiles.cluster, 1)
    counts = tiles_M if along_m == 1 else tiles_M // along_m, tiles_N // along_n
    m, n = plgpu.planar_snake(group, counts, "MN".index(tiles.minor), tiles.width)
    return (m, n * along_n + rank) if shares == "a" else (m * along_m + rank, n)


def cta_of(tiles: RingTiles):
    """Returns this thread block's number, of all that run; those of a cluster are neighbours."""
    cluster = lax.axis_index("sm")
    return cluster * tiles.cluster + lax.axis_index("cluster") if tiles.cluster > 1 else cluster


class Ring:
    """The ring of shared memory between a CTA's producer and its consumers, as either of them uses it.

    Step s of a CTA fills slot s mod stages with a tile of a and one of b. A slot's `full` barrier counts the
    copies into it, its `empty` barrier the two consumers.

    a_transposed, b_transposed: a tile of a lies as [contracted, m], one of b as [n, contracted]. shares:
    which of them the thread blocks of a cluster have in common, "a" or "b".
    """

    def __init__(self, tiles: RingTiles, refs, b_transposed=False, a_transposed=False, shares="b"):
        self.tiles, self.a_transposed, self.b_transposed = tiles, a_transposed, b_transposed
        self.a, self.b, self.out, self.full, self.empty = refs
        self.first_row = lax.axis_index("wg") * tiles.m_of_consumer  # of a consumer, within the tile
        # Each thread block of a cluster loads a part, for all of them.
        shared = {"collective_axes": "cluster"} if tiles.cluster > 1 else {}
        self.shared = {name: shared if name == shares else {} for name in "ab"}

    def slot(self, step):
        return lax.rem(step, i32(self.tiles.stages))

    def load_each(self, steps, base, windows):
        """Fills the slots of steps base.. with windows(step) of two arrays: a's, in as many parts as `full`
        counts with b's, and b's."""

        @pl.loop(0, steps)
        def _(step):
            slot, (*a_windows, b_window) = self.slot(base + step), windows(step)
            plgpu.barrier_wait(self.empty.at[slot])
            rows = self.a.shape[1] // len(a_windows)
            for part, a_window in enumerate(a_windows):
                to_ref = self.a.at[slot, pl.ds(part * rows, rows)]
                plgpu.copy_gmem_to_smem(a_window, to_ref, self.full.at[slot], **self.shared["a"])
            plgpu.copy_gmem_to_smem(b_window, self.b.at[slot], self.full.at[slot], **self.shared["b"])

    def multiply(self, steps, base, prepare=None, meanwhile=None):
        """Returns this consumer's part of a tile in float32.

        prepare: called with a step and its slot, which is full, before the slot is multiplied. meanwhile:
        called with a step whose products are on their way.
        """

        def run(acc_ref):
            @pl.loop(0, steps)
            def _(step):
                slot = self.slot(base + step)
                plgpu.barrier_wait(self.full.at[slot])
                if prepare is not None:
                    prepare(step, slot)
                self.add_products(acc_ref, slot)
                if meanwhile is not None:
                    meanwhile(step)
                plgpu.wgmma_wait(1)  # the matmul before this one has read its slot
                pl.when(step > 0)(lambda: self.release(base + step - 1))

            return acc_ref[...]

        acc = pl.run_scoped(run, plgpu.ACC((self.tiles.m_of_consumer, self.tiles.n), jnp.float32))
        self.release(base + (steps - 1))
        return acc

    def multiply_apart(self, steps: int, base):
        """Returns the same for operands of 8 bits, of which the tensor cores sum up a few steps at a time:
        they keep about 14 bits of the sums, and these are added up in float32 outside of them."""
        shape = self.tiles.m_of_consumer, self.tiles.n

        def sum_of(first, count: int):
            def run(acc_ref):
                for step in range(count):
                    slot = self.slot(base + first + step)
                    plgpu.barrier_wait(self.full.at[slot])
                    self.add_products(acc_ref, slot)
                return acc_ref[...]

            part = pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
            for step in range(count):
                self.release(base + first + step)
            return part

        whole, rest = divmod(steps, APART)
        add = lambda number, total: total + sum_of(number * APART, APART)  # noqa: E731
        total = lax.fori_loop(0, whole, add, jnp.zeros(shape, jnp.float32))
        return total + sum_of(whole * APART, rest) if rest else total

    def add_products(self, acc_ref, slot):
        """Begins to add the products of a full slot to this consumer's part of a tile."""
        b_ref, rows = self.b.at[slot], pl.ds(self.first_row, self.tiles.m_of_consumer)
        b_ref = b_ref.transpose((1, 0)) if self.b_transposed else b_ref
        inline("wgmma.fence.sync.aligned;")  # else ptxas adds its own, and at times serialises for it
        a_ref = self.a.at[slot, :, rows].transpose((1, 0)) if self.a_transposed else self.a.at[slot, rows]
        plgpu.wgmma(acc_ref, a_ref, b_ref)

    def skip(self, steps, base):
        """Does for a consumer that has nothing of a tile what else `multiply` does to the ring."""

        @pl.loop(0, steps)
        def _(step):
            plgpu.barrier_wait(self.full.at[self.slot(base + step)])
            self.release(base + step)

    def release(self, step):
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def write_out(self, number: int, value):
        """Returns where in shared memory piece `number` of the tile now is, ready to be stored."""
        slots = self.out.shape[1]
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        piece_ref = self.out.at[lax.axis_index("wg"), number % slots]
        piece_ref[...] = value
        plgpu.commit_smem()
        return piece_ref


def turns_of(total, cta, ctas: int):
    """Returns how many of `total` things a CTA takes: numbers cta, cta + ctas, ..."""
    return lax.div(total + (ctas - 1) - cta, i32(ctas))


def inline(ptx: str):
    @plgpu.inline_mgpu()
    def insert(_):
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], ptx, "", has_side_effects=True)

    insert()


class Pieces:
    """A consumer's part of a tile, cut into the pieces in which it is stored: at once, or late. Those wait in
    registers, in 2 bytes a value, and are stored one a step of the next tile, whose products the tensor cores
    make meanwhile.

    store: called with a piece's number, what it holds, and the numbers that say where its tile belongs.
    nowhere: such numbers of a tile that has nothing to store.
    """

    def __init__(self, places: list[tuple[int, int]], columns: int, dtype, store, nowhere: tuple):
        self.places, self.columns, self.dtype, self.store = places, columns, dtype, store
        self.nowhere = nowhere

    @property
    def none(self):
        """What waits before the first tile."""
        empty = [jnp.zeros((PIECE, self.columns), self.dtype) for _ in self.places]
        return empty, self._numbers(self.nowhere)

    def of(self, acc, where: tuple):
        """Returns the pieces, which `store_at` and `store_from` take. acc: a consumer's part of a tile."""
        cut = [acc[r : r + PIECE, c : c + self.columns].astype(self.dtype) for r, c in self.places]
        return cut, self._numbers(where)

    def store_at(self, step, waiting):
        """Stores the piece whose turn is at a step of the next tile."""
        for number in range(len(self.places)):
            pl.when(step == number)(functools.partial(self._store, number, waiting))

    def store_from(self, first, waiting):
        """Stores the pieces from number `first` on, a number or traced."""
        for number in range(len(self.places)):
            store = functools.partial(self._store, number, waiting)
            if not isinstance(first, int):
                pl.when(number >= first)(store)
            elif number >= first:
                store()

    def _store(self, number, waiting):
        values, where = waiting
        self.store(number, values[number], *where)

    @staticmethod
    def _numbers(where):
        return [jnp.asarray(number, jnp.int32) for number in where]


def run(
    tiles,
    ctas,
    total,
    steps_of_tile,
    ring: Ring,
    produce,
    consume,
    look_up=None,
    finish=None,
    send=None,
    late: Pieces | None = None,
):
    """Has a CTA's producer and consumers go through its tiles: number cta, cta + ctas, ... of `total`.

    produce, consume, steps_of_tile: called with a tile, the first two with its first step of the ring too. A
    tile is its number or, where there is `look_up`, what that returns of the number, of one that is no tile's
    too: it is read a tile ahead, for memory is far away. late: what has `consume` called with the pieces that
    the tile before left to store too, and return those that it leaves itself. finish: called by the
    consumers, with the number of the CTA's last tile, once all its tiles are stored. send: called by a warp
    beside the producer's in every CTA: a fourth warpgroup would leave the consumers too few registers.
    """
    wg, cta = lax.axis_index("wg"), cta_of(tiles)
    of_consumer, of_producer = REGISTERS if late is None else REGISTERS_LATE
    turns = turns_of(total, cta, ctas)

    def each_tile(act, left=()):
        """left: what `act` is called with too, and returns for the next tile; returns what the last left."""

        def take(tile, base, left):
            left = act(tile, base, *left)
            return base + steps_of_tile(tile), () if left is None else left

        def look_ahead(i, state):
            tile, base, left = state
            following = look_up((i + 1) * ctas + cta)
            return following, *take(tile, base, left)

        if look_up is None:
            next_tile, first = lambda i, state: take(i * ctas + cta, *state), ()
        else:
            next_tile, first = look_ahead, (look_up(cta),)
        return lax.fori_loop(i32(0), turns, next_tile, (*first, i32(0), left))[-1]

    @pl.when(wg == PRODUCER)
    def _():
        plgpu.set_max_registers(of_producer, action="decrease")

        def produce_all():
            each_tile(produce)
            for slot in range(tiles.stages):  # leave no arrival unseen
                plgpu.barrier_wait(ring.empty.at[slot])

        if send is None:
            produce_all()
        else:

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(produce_all)
                pl.when(warp == 1)(send)

    @pl.when(wg < CONSUMERS)
    def _():
        plgpu.set_max_registers(of_consumer, action="increase")
        for slot in range(tiles.stages):  # at first, all slots are empty
            plgpu.barrier_arrive(ring.empty.at[slot])
        if late is None:
            each_tile(consume)
        else:
            (waiting,) = each_tile(lambda *tile: (consume(*tile),), (late.none,))
            late.store_from(0, waiting)
        if finish is not None:
            pl.when(turns > 0)(lambda: finish((turns - 1) * ctas + cta))
        plgpu.wait_smem_to_gmem(0)


def smem(dtype, *shape, rows: int = 8):
    """Returns shared memory as TMA and the tensor cores take it, which want tiles of 8 rows. rows: 1 for what
    TMA alone reads: it can be cut at any row."""
    width = WIDTH_BYTES // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((rows, width)), plgpu.SwizzleTransform(WIDTH_BYTES)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def scratch_of(tiles: RingTiles, a_tile, b_tile, dtype, out, copies: int = 2, b_dtype=None):
    """Returns the scratch that a `Ring` is made of. a_tile, b_tile: their shapes. out: what of `smem`.
    copies: how many fill a slot. b_dtype: of b, where it is not a's."""
    empty = plgpu.Barrier
    if tiles.cluster > 1:  # a slot is empty once it is in all thread blocks to which its shared part goes
        empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    return [
        smem(dtype, tiles.stages, *a_tile),
        smem(b_dtype or dtype, tiles.stages, *b_tile),
        out,
        plgpu.Barrier(num_arrivals=copies, num_barriers=tiles.stages),
        empty(num_arrivals=CONSUMERS, num_barriers=tiles.stages),
    ]


def out_of(tiles: RingTiles, dtype, slots: int, rows: int = 8):
    """Returns the scratch for pieces on their way out. rows: as of `smem`."""
    return smem(dtype, CONSUMERS, slots, PIECE, WIDTH_BYTES // jnp.dtype(dtype).itemsize, rows=rows)


def kernel(body, out_type, tiles: RingTiles, ctas: int, scratch):
    """Returns the kernel, which has `body` run in every warpgroup of so many thread blocks."""
    clusters = {"cluster": (tiles.cluster,), "cluster_names": ("cluster",)} if tiles.cluster > 1 else {}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(ctas // tiles.cluster,),
        grid_names=("sm",),
        **clusters,
        num_threads=CONSUMERS + 1,
        thread_name="wg",
    )

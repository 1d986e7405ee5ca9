"""The two kernels for Hopper: a persistent matmul that sends or receives while it multiplies.

Shapes, all of one shard: t shards on the mesh axis, M rows, A = t·M rows of all shards, K contracted, N
columns. `hopper_ring` has what multiplies: a thread block (CTA) on each SM, with two consumers and a
producer, here one warp. On some SMs one more warp copies to the peers, in pieces through shared memory: a
sender. Nothing else leaves the GPU, and there are just as many senders as fill NVLink: what more of them have
under way stands in the way of the loads of all SMs.

`gather_matmul`: senders copy this shard's rows to the `gathered` buffer of each peer, while the others
multiply: first this shard's own rows, then those of the next shard, and so on. A producer waits for the row
block that it is about to load. Nothing is forwarded from shard to shard, and no step waits for all SMs.

`matmul_scatter`: the tiles of the peers' rows come first. Consumers store them in this GPU's `outgoing`
buffer, whence senders copy each to its owner: the shard before it writes straight into the owner's result,
the others into its `staged` buffer. Then come the own tiles. A consumer adds the staged ones to its own,
always in the same order, and has TMA add the sum to what the shard before has written. The staged ones come
through the same ring of shared memory as the operands, so they are loaded ahead. Senders may first gather
another matrix, which the gradient of the weights needs. With `adds`, nothing is staged: TMA adds every tile
to the owner's result, which begins as zeros.

Why this is correct, and ends:
  * The runtime holds a launch back until the devices of the mesh have reached it (`skip_device_barrier` stays
    False). When a peer's kernel writes here, the stream here has come to the same kernel: what used these
    buffers before is done, and the semaphores, which XLA clears for each call, are clear.
  * A shard writes to its peers and reads nothing of theirs. Its kernel does not end before its own remote
    stores are complete, and before every row block and tile meant for it has arrived: each is a part of the
    result, so each is waited for. No store and no signal is then under way to a buffer that a later operation
    may reuse, and no peer needs x or the operands of a kernel that has ended.
  * Each (source, row block) and each (source, tile) has a semaphore of its own, which only grows in a call.
    With `adds` one counts all tiles, and one thread block waits for it before it ends.
  * With `adds`, a result is zeros before its device comes to the kernel. PTX promises that an addition by TMA
    is atomic among those of one GPU (`.relaxed.gpu`); for those of peers this relies on NVLink, which hands
    them to the L2 cache that owns the memory, where all of them are made.
  * Senders wait for their own copies, and for tiles of consumers of the same GPU; one of them also for what
    peers send, once it has sent all of its own. A CTA computes all tiles that leave it before any that needs
    a peer's, and says so of the last before it waits for its first. So no circle of waits can close while all
    CTAs run at once; there are no more of them than SMs, and one fits on each.
  * The thread blocks of a cluster go through as many tiles, always of the same phase, as two of their row
    blocks divide a shard's rows; a step of one needs the other's part of b. In a gather each may wait for
    a row block before it loads its part, which comes from senders that wait for no one. In a scatter both
    load all of b for an own tile before either waits for a peer's. All clusters of two run at once, as
    Hopper's SMs come in pairs.
  * Another kernel that itself waits for peers, as NCCL's do, can break that: it holds SMs of one device while
    CTAs here hold all of another's, and each waits for the other; it may be one over the same axis. Compile
    with xla_gpu_disable_async_collectives=ALLCOLLECTIVES, which runs them in line. Where they may run beside
    this kernel still, leave them SMs: `ctas` less than the SMs by as many as they take.
  * A signal is given, with release at system scope, by the thread whose stores it announces and after they
    are complete. A wait acquires at system scope; what TMA loads or adds behind it belongs to another
    proxy, so a proxy fence stands between them.

Peers are addressed one by one, in plain peer memory; there is no NVLink multicast. What a cluster of thread
blocks shares, TMA hands to both within their GPU.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ring
from pallas_kernels.collective_matmul.tiles import CONSUMERS, PIECE, STEP, Tiles
from pallas_kernels.hopper_ring import cta_of, i32, inline, order, run, smem, turns_of


def gather_matmul(x_MK, weights, tiles: Tiles, ctas: int, *, axis_name, transposed=False, keep=False):
    """Returns a tuple of (x of all shards) @ w, and the gathered x.

    Args:
      x_MK: this shard's rows.
      weights: each [K, N_i], or [N_i, K] if `transposed`.
      tiles: divide M, K and each N_i.
      ctas: how many thread blocks run at once: the number of SMs.
      axis_name: the mesh axis.
      transposed: how the weights lie.
      keep: whether the gathered x is to have this shard's rows too; otherwise these are undefined.
    """
    t = lax.axis_size(axis_name)
    ctas -= ctas % tiles.cluster
    M, K = x_MK.shape
    columns = [w.shape[0 if transposed else 1] for w in weights]
    blocks = [N // tiles.n for N in columns]
    first = [sum(blocks[:i]) for i in range(len(blocks))]
    tiles_M, tiles_N, steps = M // tiles.m, sum(blocks), K // STEP
    count = tiles_M * tiles_N  # tiles of one shard's rows
    dtype = x_MK.dtype

    def body(x_ref, *refs):
        w_refs, y_refs, rest = (
            refs[: len(weights)],
            refs[len(weights) : 2 * len(weights)],
            refs[2 * len(weights) :],
        )
        (gathered_ref, *rest) = rest if t > 1 else (None, *rest)
        ring, rest = _Ring(tiles, rest[:5], transposed), rest[5:]
        me = lax.axis_index(axis_name) if t > 1 else i32(0)
        if t > 1:
            sender = _Sender(tiles, rest, ctas)
            outbox = _Outbox(sender, x_ref, gathered_ref, axis_name, tiles.m)

        def place(index):
            """Returns how far away the tile's shard is, its row block and column block, and its row of A."""
            away = lax.div(index, i32(count))
            m, n = order(lax.rem(index, i32(count)), tiles_M, tiles_N, tiles)
            return away, m, n, lax.rem(me + away, i32(t)) * M + m * tiles.m

        def each_weight(n, act):
            """Calls act(i, column block of weight i) for the weight that has column block n of them all."""
            for i, blocks_i in enumerate(blocks):
                inside = (n >= first[i]) & (n < first[i] + blocks_i)
                pl.when(inside)(functools.partial(act, i, n - first[i]))

        def produce(index, base):
            away, m, n, row = place(index)

            def load(a_ref, row):
                each_weight(n, lambda i, n: ring.load(a_ref, row, w_refs[i], n * tiles.n, steps, base))

            pl.when(away == 0)(lambda: load(x_ref, m * tiles.m))
            if t > 1:

                @pl.when(away > 0)
                def _():
                    outbox.wait_for(away, m)
                    load(gathered_ref, row)

        def consume(index, base):
            _, _, n, row = place(index)
            acc = ring.multiply(steps, base)
            row += ring.first_row
            for number, (r, c) in enumerate(tiles.pieces):
                piece_ref = ring.write_out(number, acc[r : r + PIECE, c : c + PIECE].astype(dtype))

                def store(i, n, r=r, c=c, piece_ref=piece_ref):
                    to = y_refs[i].at[pl.ds(row + r, PIECE), pl.ds(n * tiles.n + c, PIECE)]
                    plgpu.copy_smem_to_gmem(piece_ref, to)

                each_weight(n, store)

        send = (lambda: outbox.send(keep)) if t > 1 else None
        run(tiles, ctas, t * count, lambda index: steps, ring, produce, consume, send=send)

    out_type = [jax.ShapeDtypeStruct((t * M, N), dtype) for N in columns]
    if t > 1:
        out_type.append(jax.ShapeDtypeStruct((t * M, K), dtype))
    outs = _kernel(body, out_type, tiles, ctas, dtype, transposed, t > 1)(x_MK, *weights)
    return tuple(outs[: len(weights)]), outs[-1] if t > 1 else x_MK


def matmul_scatter(pairs, tiles: Tiles, ctas: int, *, axis_name, transposed=False, gather=None, adds=False):
    """Returns this shard's rows of Σ a @ w over the pairs and the shards, and all shards' rows of `gather`.

    What a peer sends is rounded to the operands' dtype, and summed in float32 but for the last addition, of
    what the shard before this one sends: that is made in the operands' dtype, and with `adds` all are.

    Args:
      pairs: of (a_AK, w_KN), or (a_AK, w_NK) if `transposed`; all have the same A and N.
      tiles: divide M, N and each K.
      ctas: how many thread blocks run at once: the number of SMs.
      axis_name: the mesh axis.
      transposed: how the weights lie.
      gather: None, or a matrix [M, G] to gather meanwhile.
      adds: whether shards add to each other's results, in whatever order they come.
    """
    t = lax.axis_size(axis_name)
    adds = t > 1 and adds
    staged = 0 if adds else max(t - 2, 0)  # peers whose tiles do not go straight into the result
    ctas -= ctas % tiles.cluster
    A, N = pairs[0][0].shape[0], pairs[0][1].shape[0 if transposed else 1]
    M = A // t
    tiles_M, tiles_N = M // tiles.m, N // tiles.n
    count = tiles_M * tiles_N  # tiles of one shard's rows
    steps_of = [a.shape[1] // STEP for a, _ in pairs]
    steps, own_phase = sum(steps_of), t - 1
    staged_steps = staged * (tiles.n // PIECE)
    dtype, gathers = pairs[0][0].dtype, gather is not None and t > 1

    def body(*refs):
        operands, rest = refs[: 2 * len(pairs)], refs[2 * len(pairs) :]
        (gather_ref, *rest) = rest if gathers else (None, *rest)
        (out_ref, *rest) = rest
        (outgoing_ref, *rest) = rest if t > 1 else (None, *rest)
        (staged_ref, *rest) = rest if staged else (None, *rest)
        (gathered_ref, *rest) = rest if gathers else (None, *rest)
        ring, rest = _Ring(tiles, rest[:5], transposed), rest[5:]
        me = lax.axis_index(axis_name) if t > 1 else i32(0)
        if t > 1:
            sender = _Sender(tiles, rest, ctas)
            stored = pl.get_global(plgpu.SemaphoreType.REGULAR(((t - 1) * count,)))  # in `outgoing`
            arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((1 if adds else (t - 1) * count,)))
        if gathers:
            outbox = _Outbox(sender, gather_ref, gathered_ref, axis_name, gather.shape[0])

        def place(index):
            """Returns the tile's phase, its number and place within the owner's rows, and the owner.

            Phase k is that of the shard k + 1 further on; the last one is this shard's own.
            """
            phase, number = lax.div(index, i32(count)), lax.rem(index, i32(count))
            m, n = order(number, tiles_M, tiles_N, tiles)
            return phase, number, m, n, lax.rem(me + phase + 1, i32(t))

        def produce(index, base):
            phase, number, m, n, owner = place(index)
            begin = base
            for pair, steps_i in enumerate(steps_of):
                a_ref, w_ref = operands[2 * pair : 2 * pair + 2]
                ring.load(a_ref, owner * M + m * tiles.m, w_ref, n * tiles.n, steps_i, begin)
                begin += steps_i
            if staged:

                @pl.when(phase == own_phase)
                def _():
                    for source in range(staged):
                        _wait(arrived.at[(1 + source) * count + number], 1)
                    for c in range(tiles.n // PIECE):
                        for source in range(staged):
                            step = begin + c * staged + source
                            ring.load_staged(staged_ref, source, m * tiles.m, n * tiles.n + c * PIECE, step)

        def announce(index):
            """Tells the sender that this tile can leave, if it is another's."""

            @pl.when(index < own_phase * count)
            def _():
                plgpu.wait_smem_to_gmem(0)
                pl.semaphore_signal(stored.at[index])

        def consume(index, base):
            phase, number, m, n, _ = place(index)
            acc = ring.multiply(steps, base)
            if t > 1:  # the tile before this one: its stores have had the time of a tile to complete
                pl.when(index >= ctas)(lambda: announce(index - ctas))

            def store(to_ref, sources=0, **how):
                """Adds what is staged of so many peers, and stores the tile."""
                sums = {(r, c): acc[r : r + PIECE, c : c + PIECE] for r, c in tiles.pieces}
                for place_in_tile, (r, c) in enumerate(tiles.pieces):
                    if r == 0:
                        for source in range(sources):
                            step = base + steps + c // PIECE * sources + source
                            for below, piece in ring.staged(step):
                                sums[below, c] += piece.astype(jnp.float32)
                    piece_ref = ring.write_out(place_in_tile, sums[r, c].astype(dtype))
                    row, column = m * tiles.m + ring.first_row + r, n * tiles.n + c
                    window = to_ref.at[pl.ds(row, PIECE), pl.ds(column, PIECE)]
                    plgpu.copy_smem_to_gmem(piece_ref, window, **how)

            def store_own():
                if t > 1 and not adds:
                    _wait(arrived.at[number], 1)  # what the shard before this one sends is there
                store(out_ref, staged, **({"reduction_op": "add"} if t > 1 else {}))

            if t > 1:
                pl.when(phase < own_phase)(lambda: store(outgoing_ref.at[phase]))
            pl.when(phase == own_phase)(store_own)

        def steps_of_tile(index):
            return steps + jnp.where(index >= own_phase * count, i32(staged_steps), i32(0))

        def send_tile(phase: int, number):
            _wait(stored.at[phase * count + number], CONSUMERS)
            peer = {axis_name: lax.rem(me + (phase + 1), i32(t))}
            if phase == 0 or adds:
                to_ref = plgpu.remote_ref(out_ref, peer)
            else:
                to_ref = plgpu.remote_ref(staged_ref, peer).at[phase - 1]
            m, n = order(number, tiles_M, tiles_N, tiles)
            corners = itertools.product(range(0, tiles.m, PIECE), range(0, tiles.n, PIECE))
            pieces = [(m * tiles.m + r, n * tiles.n + c) for r, c in corners]
            how = {"reduction_op": "add"} if adds else {}
            sender.copy(outgoing_ref.at[phase], pieces, [to_ref], pieces, **how)
            pl.semaphore_signal(arrived.at[0 if adds else phase * count + number], device_id=peer)

        def send():
            if gathers:
                outbox.send(keep=True)
            for phase in range(t - 1):
                sender.each(count, functools.partial(send_tile, phase))

            @pl.when(cta_of(tiles) == 0)  # for what nothing in the kernel reads
            def _():
                if adds:
                    _wait(arrived.at[0], (t - 1) * count)
                for away in range(1, t) if gathers else ():
                    outbox.wait_for(away, 0)

        communicate = {"finish": announce, "send": send} if t > 1 else {}
        run(tiles, ctas, t * count, steps_of_tile, ring, produce, consume, **communicate)

    out_type = [jax.ShapeDtypeStruct((M, N), dtype)]
    out_type += [jax.ShapeDtypeStruct((planes, M, N), dtype) for planes in (t - 1, staged) if planes]
    if gathers:
        out_type.append(jax.ShapeDtypeStruct((t * gather.shape[0], gather.shape[1]), dtype))
    operands = [x for pair in pairs for x in pair] + ([gather] if gathers else [])
    outs = _kernel(body, out_type, tiles, ctas, dtype, transposed, t > 1, adds)(*operands)
    return outs[0], outs[-1] if gathers else gather


class _Ring(hopper_ring.Ring):
    """The ring, whose slots may also have a column of a staged tile, in two copies as all others."""

    def load(self, a_ref, row, b_ref, column, steps: int, base):
        """Fills the slots of steps base.. with rows of a from `row` on, columns of b from `column` on."""
        rows, columns = pl.ds(row, self.tiles.m), pl.ds(column, self.tiles.n)

        def windows(step):
            contracted = pl.ds(step * STEP, STEP)
            b_window = (columns, contracted) if self.b_transposed else (contracted, columns)
            return a_ref.at[rows, contracted], b_ref.at[b_window]

        self.load_each(steps, base, windows)

    def load_staged(self, staged_ref, source: int, row, column, step):
        """Fills a slot's tile of a with PIECE columns of a staged tile, in the two copies `full` counts."""
        slot, half = self.slot(step), self.tiles.m // 2
        plgpu.barrier_wait(self.empty.at[slot])
        for begin in (0, half):
            window = staged_ref.at[source, pl.ds(row + begin, half), pl.ds(column, PIECE)]
            plgpu.copy_gmem_to_smem(window, self.a.at[slot, pl.ds(begin, half)], self.full.at[slot])

    def staged(self, step):
        """Returns (row, [PIECE, PIECE]) for each piece that this consumer has of a staged slot."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.full.at[slot])
        pieces = [
            (r, self.a[slot, pl.ds(self.first_row + r, PIECE)])
            for r in range(0, self.tiles.m_of_consumer, PIECE)
        ]
        if self.tiles.cluster > 1:  # of a cluster's barrier one thread is told for all: let all have read
            plgpu.commit_smem()
        self.release(step)
        return pieces


class _Sender:
    """The warp that copies to peers, through two slots of shared memory. The last CTAs have one: they compute
    a tile less than the others if any do."""

    def __init__(self, tiles: Tiles, refs, ctas: int):
        self.smem, self.loaded = refs
        self.senders, self.number = min(tiles.senders, ctas), ctas - 1 - cta_of(tiles)

    def each(self, total: int, act):
        """Calls act(i) for those of `total` things that are this sender's."""

        @pl.when(self.number < self.senders)
        def _():
            @pl.loop(0, turns_of(total, self.number, self.senders))
            def _(turn):
                act(turn * self.senders + self.number)

    def copy(self, from_ref, pieces, to_refs, places, **how):
        """Copies pieces, each at a (row, column), to these places. They are complete when it returns."""

        def window(ref, place):
            return ref.at[tuple(pl.ds(begin, PIECE) for begin in place)]

        def load(number):
            source, slot = window(from_ref, pieces[number]), number % 2
            plgpu.copy_gmem_to_smem(source, self.smem.at[slot], self.loaded.at[slot])

        for number in range(min(2, len(pieces))):
            load(number)
        for number, place in enumerate(places):
            plgpu.barrier_wait(self.loaded.at[number % 2])
            for to_ref in to_refs:
                plgpu.copy_smem_to_gmem(self.smem.at[number % 2], window(to_ref, place), **how)
            if number + 2 < len(pieces):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                load(number + 2)
        plgpu.wait_smem_to_gmem(0)


class _Outbox:
    """Copies a shard's rows to the same place in the buffers of all peers, and waits for theirs.

    Groups of pieces are sent in the order of rows, and each is announced once it is complete. The nearest
    shard before this one is served first: it is the one that waits first.
    """

    def __init__(self, sender: _Sender, from_ref, to_ref, axis_name, block_rows: int):
        self.sender, self.from_ref, self.to_ref, self.axis_name = sender, from_ref, to_ref, axis_name
        self.t, self.me = lax.axis_size(axis_name), lax.axis_index(axis_name)
        self.rows, columns = from_ref.shape
        self.bands_in_block = block_rows // PIECE
        self.blocks = self.rows // block_rows
        pieces = columns // PIECE
        self.pieces_in_group = max(g for g in range(1, 9) if pieces % g == 0)
        self.groups_in_band = pieces // self.pieces_in_group
        self.arrived = pl.get_global(plgpu.SemaphoreType.REGULAR(((self.t - 1) * self.blocks,)))

    def wait_for(self, away, block):
        """Waits for a row block of the shard that is `away` further on."""
        _wait(self.arrived.at[(away - 1) * self.blocks + block], self.bands_in_block * self.groups_in_band)

    def send(self, keep: bool):
        """Sends all rows; `keep` has them written to this shard's own buffer too."""
        for away in range(1, self.t):
            peer = {self.axis_name: lax.rem(self.me + (self.t - away), i32(self.t))}
            to_refs = [plgpu.remote_ref(self.to_ref, peer)]
            if keep and away == 1:
                to_refs.append(self.to_ref)

            def send_group(group, away=away, peer=peer, to_refs=to_refs):
                band = lax.div(group, i32(self.groups_in_band))
                within = lax.rem(group, i32(self.groups_in_band))
                row, group_size = band * PIECE, self.pieces_in_group
                columns = [(within * group_size + i) * PIECE for i in range(group_size)]
                pieces, places = ([(r, c) for c in columns] for r in (row, self.me * self.rows + row))
                self.sender.copy(self.from_ref, pieces, to_refs, places)
                block = lax.div(band, i32(self.bands_in_block))
                pl.semaphore_signal(self.arrived.at[(away - 1) * self.blocks + block], device_id=peer)

            self.sender.each(self.rows // PIECE * self.groups_in_band, send_group)


def _wait(semaphore, value: int):
    """Waits until a semaphore has this value; TMA behind it sees what was stored before the signals."""
    pl.semaphore_wait(semaphore, value, decrement=False)
    inline("fence.proxy.async;")


def _kernel(body, out_type, tiles: Tiles, ctas: int, dtype, transposed: bool, sends: bool, adds=False):
    """Returns the kernel with its shared memory; `tiles.smem_bytes` counts the same.

    adds: whether the first result begins as zeros.
    """

    b_tile = (tiles.n, STEP) if transposed else (STEP, tiles.n)
    out = hopper_ring.out_of(tiles, dtype, tiles.out_slots(sends))
    scratch = hopper_ring.scratch_of(tiles, (tiles.m, STEP), b_tile, dtype, out)
    if sends:
        scratch += [smem(dtype, 2, PIECE, PIECE), plgpu.Barrier(num_barriers=2)]
    kernel = hopper_ring.kernel(body, out_type[adds:], tiles, ctas, scratch)

    def add_to_zeros(*operands):
        # Tied to the operands, or JAX takes the zeros out of a scan that is differentiated, and copies them.
        zero, *operands = lax.optimization_barrier((jnp.zeros((), dtype), *operands))
        sums_ref = jax.new_ref(jnp.broadcast_to(zero, out_type[0].shape))  # an operand that is a result too
        others = kernel(*operands, sums_ref)
        return jax.freeze(sums_ref), *others

    return add_to_zeros if adds else kernel

"""Collective matmuls on TPUs, each one kernel that sends by remote DMA while it multiplies.

Follows the same schedule as ring.py, in both directions where the rows of a shard can be halved. Every rank
first meets its neighbours at a barrier: their buffers exist from then on. Each transfer has a place of its
own where it arrives, so that no rank ever waits for its neighbour to have read; that takes the memory of the
gathered rows, or of the sums on their way. Gradients of weights need all gathered rows and nothing that is
sent: they are plain matmuls behind the kernel, of rows that its pass gathered along the way.

Run in interpret mode, with its race detection, and compiled for TPUs, but on none yet: only when named.

Shapes: t shards, M rows of a shard, P of them in one lane, A = t·M rows of all, K contracted, N columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.collective_matmul import schedule
from pallas_kernels.dot import dot

LANES = 128  # a multiple of this is what the last dim of every operand has to be
BLOCK = 512  # at most so many rows or columns of an operand are in VMEM at once, twice


def all_gather_matmul(x_MK, weights, *, axis_name, platform):
    _check(platform, axis_name, len(x_MK), x_MK, *weights)
    _, *ys = _gather_pass(x_MK, weights, axis_name, w_dim=0)
    return tuple(ys)


def all_gather_matmul_backward(x_MK, weights, dys, *, axis_name, platform):
    _check(platform, axis_name, len(x_MK), x_MK, *weights)
    dy_AN, w_KN = jnp.concatenate(dys, 1), jnp.concatenate(weights, 1)
    dx_MK, x_AK = _reduce_pass(dy_AN, w_KN, axis_name, w_dim=1, beside=(x_MK,))
    return dx_MK, tuple(dot(x_AK, dy_AN, 0, 0) for dy_AN in dys)


def matmul_reduce_scatter(y_AK, w_KN, *, axis_name, platform):
    _check(platform, axis_name, len(y_AK) // jax.lax.axis_size(axis_name), y_AK, w_KN)
    (out_MN,) = _reduce_pass(y_AK, w_KN, axis_name, w_dim=0)
    return out_MN


def matmul_reduce_scatter_backward(y_AK, w_KN, dout_MN, *, axis_name, platform):
    _check(platform, axis_name, len(dout_MN), y_AK, w_KN)
    dout_AN, dy_AK = _gather_pass(dout_MN, (w_KN,), axis_name, w_dim=1)
    return dy_AK, dot(y_AK, dout_AN, 0, 0)


def _check(platform: str, axis_name: str, rows: int, *arrays) -> None:
    dispatch.require_tpu(platform)
    if (t := jax.lax.axis_size(axis_name)) < 2:
        raise dispatch.Unsupported(f"needs 2 devices on axis {axis_name!r}, found {t}")
    tile = _tile(arrays[0].dtype)
    wide = all(n % LANES == 0 for n in (arrays[0].shape[1], *(n for w in arrays[1:] for n in w.shape)))
    if rows % tile or not wide:
        raise dispatch.Unsupported(
            f"needs rows of a shard in multiples of {tile} and all other sizes in multiples of {LANES}, "
            f"found {rows} rows and {[x.shape for x in arrays]}"
        )


def _gather_pass(x_MK, weights, axis_name: str, w_dim: int) -> list[jax.Array]:
    """Returns x of all shards, and its product with each matrix over the matrix's dim `w_dim`."""
    t, (M, K) = jax.lax.axis_size(axis_name), x_MK.shape
    lanes = _lanes(t, M, x_MK.dtype)
    return _call(
        functools.partial(_gather_kernel, lanes=lanes, axis_name=axis_name, w_dim=w_dim),
        (x_MK, *weights),
        [(t * M, K), *((t * M, w.shape[1 - w_dim]) for w in weights)],
        [pltpu.SemaphoreType.DMA((2, t - 1, len(lanes))), pltpu.SemaphoreType.DMA],
        axis_name,
    )


def _gather_kernel(*refs, lanes, axis_name: str, w_dim: int):
    *refs, semaphores, own_copied = refs
    (x_MK, *weights), (x_AK, *ys) = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    M, t, rank = len(x_MK), jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    own = _copy_own(x_MK, x_AK, own_copied, axis_name)
    _meet_neighbours(axis_name)
    for step in range(t):
        sent = _send_gathered(x_MK, x_AK, semaphores, lanes, axis_name, step)
        for lane in lanes:
            rows = _shard(rank, lane.gather[step], t, M, lane)
            x_PK = _gathered(x_MK, x_AK, lane, step, rows)
            for w, y_AN in zip(weights, ys, strict=True):
                _matmul(x_PK, w, y_AN.at[rows], w_dim)
        for copy in sent:
            copy.wait()
    own.wait()


def _copy_own(x_MK, x_AK, semaphore, axis_name: str):
    """Starts to copy this rank's rows to their place among those of all, and returns the transfer."""
    M, t, rank = len(x_MK), jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    copy = pltpu.make_async_copy(x_MK, x_AK.at[_shard(rank, 0, t, M)], semaphore)
    copy.start()
    return copy


def _gathered(x_MK, x_AK, lane: schedule.Lane, step: int, rows):
    """Returns the rows that a lane holds in this step: its own, or where those of another shard arrived."""
    return x_AK.at[rows] if step else x_MK.at[pl.ds(lane.start, lane.rows)]


def _send_gathered(x_MK, x_AK, semaphores, lanes, axis_name: str, step: int) -> list:
    """Starts to pass on what is held, but in the last step; returns the transfers."""
    M, t, rank = len(x_MK), jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    sent = []
    for i, lane in enumerate(lanes if step < t - 1 else ()):
        rows = _shard(rank, lane.gather[step], t, M, lane)
        held = _gathered(x_MK, x_AK, lane, step, rows)
        sent.append(_send(held, x_AK.at[rows], semaphores.at[:, step, i], lane, axis_name))
    return sent


def _reduce_pass(y_AK, w, axis_name: str, w_dim: int, beside=()) -> list[jax.Array]:
    """Returns this rank's rows of the matmuls with w over its dim `w_dim`, summed over all ranks.

    beside: at most one array [M, N'] whose rows of all shards are gathered in the same pass, and returned.
    """
    t, N = jax.lax.axis_size(axis_name), w.shape[1 - w_dim]
    M = len(y_AK) // t
    lanes = _lanes(t, M, y_AK.dtype)
    semaphores = pltpu.SemaphoreType.DMA((2, t - 1, len(lanes)))
    gathered = [(t * M, x.shape[1]) for x in beside]
    out_MN, _, _, *gathered = _call(
        functools.partial(_reduce_kernel, lanes=lanes, axis_name=axis_name, w_dim=w_dim, beside=bool(beside)),
        (y_AK, w, *beside),
        [(M, N), (2, M, N), (t - 1, M, N), *gathered],
        [semaphores, *([semaphores, pltpu.SemaphoreType.DMA] if beside else [])],
        axis_name,
    )
    return [out_MN, *gathered]


def _reduce_kernel(y_AK, w, *refs, lanes, axis_name: str, w_dim: int, beside: bool):
    if beside:
        x_MK, out_MN, sums_2MN, arrived_SMN, x_AK, semaphores, gather_semaphores, own_copied = refs
    else:
        out_MN, sums_2MN, arrived_SMN, semaphores = refs
    M, t, rank = len(out_MN), jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    own = [_copy_own(x_MK, x_AK, own_copied, axis_name)] if beside else []
    _meet_neighbours(axis_name)
    for step in range(t):
        sent = _send_gathered(x_MK, x_AK, gather_semaphores, lanes, axis_name, step) if beside else []
        for i, lane in enumerate(lanes if step else ()):
            part = pl.ds(lane.start, lane.rows)
            sums, arrives = sums_2MN.at[(step - 1) % 2, part], arrived_SMN.at[step - 1, part]
            sent.append(_send(sums, arrives, semaphores.at[:, step - 1, i], lane, axis_name))
        sums_MN = out_MN if step == t - 1 else sums_2MN.at[step % 2]
        for lane in lanes:
            y_PK = y_AK.at[_shard(rank, lane.reduce[step], t, M, lane)]
            _matmul(y_PK, w, sums_MN.at[pl.ds(lane.start, lane.rows)], w_dim)
        for copy in sent:
            copy.wait()
        if step:
            _add(sums_MN, arrived_SMN.at[step - 1])
    for copy in own:
        copy.wait()


def _call(kernel, operands, outputs, scratch, axis_name: str) -> list[jax.Array]:
    """Calls a kernel that leaves all its operands where they are, in HBM."""
    like = operands[0]
    kind = jax.typeof(like).manual_axis_type
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    # Kernels on one axis meet the same neighbours and may share a barrier; those on another may not.
    barrier = jax.sharding.get_abstract_mesh().axis_names.index(axis_name)
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, like.dtype, manual_axis_type=kind) for shape in outputs],
        in_specs=[anywhere] * len(operands),
        out_specs=[anywhere] * len(outputs),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(collective_id=barrier),
    )(*operands)


def _meet_neighbours(axis_name: str) -> None:
    """Returns once both neighbours are in this kernel too."""
    t, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    barrier = pltpu.get_barrier_semaphore()
    for shift in (1, t - 1):
        neighbour = _device(axis_name, jax.lax.rem(rank + shift, t))
        pl.semaphore_signal(barrier, 1, device_id=neighbour, device_id_type=pl.DeviceIdType.LOGICAL)
    pl.semaphore_wait(barrier, 2)


def _send(source, destination, semaphores, lane: schedule.Lane, axis_name: str):
    """Starts a transfer to the next rank of the lane, and returns it. To wait for it is to wait until these
    rows have left and until those of the rank before have arrived."""
    t, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    copy = pltpu.make_async_remote_copy(
        source,
        destination,
        send_sem=semaphores.at[0],
        recv_sem=semaphores.at[1],
        device_id=_device(axis_name, jax.lax.rem(rank + lane.shift % t, t)),
        device_id_type=pl.DeviceIdType.LOGICAL,
    )
    copy.start()
    return copy


def _device(axis_name: str, rank: jax.Array) -> jax.Array:
    """Returns the place in the whole mesh of the device at this rank of one axis, and here on the others.

    JAX does the same for a rank by axis, but cannot lower that within a shard_map of check_vma=True.
    """
    place, mesh = 0, jax.sharding.get_abstract_mesh()
    for name, size in mesh.shape.items():
        place = place * size + (rank if name == axis_name else jax.lax.axis_index(name))
    return place


def _matmul(x_MK, w, out_MN, w_dim: int) -> None:
    """Writes the matmul over w's dim `w_dim`, from HBM to HBM, a block at a time."""
    (M, K), N = x_MK.shape, w.shape[1 - w_dim]
    m, n, k = _block(M, _tile(x_MK.dtype)), _block(N, LANES), _block(K, LANES)

    def multiply(sum_mn):
        def one_block(x_mk, w_block, out_mn):
            @pl.when(pl.program_id(2) == 0)
            def _():
                sum_mn[...] = jnp.zeros_like(sum_mn)

            over = (((1,), (w_dim,)), ((), ()))
            sum_mn[...] += jax.lax.dot_general(
                x_mk[...], w_block[...], over, preferred_element_type=jnp.float32
            )

            @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
            def _():
                out_mn[...] = sum_mn[...].astype(out_mn.dtype)

        w_spec = (
            pl.BlockSpec((n, k), lambda i, j, c: (j, c))
            if w_dim
            else pl.BlockSpec((k, n), lambda i, j, c: (c, j))
        )
        pltpu.emit_pipeline(
            one_block,
            grid=(M // m, N // n, K // k),
            in_specs=[pl.BlockSpec((m, k), lambda i, j, c: (i, c)), w_spec],
            out_specs=[pl.BlockSpec((m, n), lambda i, j, c: (i, j))],
        )(x_MK, w, out_MN)

    pl.run_scoped(multiply, pltpu.VMEM((m, n), jnp.float32))


def _add(sums_MN, arrived_MN) -> None:
    """Adds to the sums in place, in float32."""

    def one_block(a, b, out):
        out[...] = (a[...].astype(jnp.float32) + b[...].astype(jnp.float32)).astype(out.dtype)

    M, N = sums_MN.shape
    m, n = _block(M, _tile(sums_MN.dtype)), _block(N, LANES)
    spec = pl.BlockSpec((m, n), lambda i, j: (i, j))
    pltpu.emit_pipeline(one_block, grid=(M // m, N // n), in_specs=[spec, spec], out_specs=[spec])(
        sums_MN, arrived_MN, sums_MN
    )


def _lanes(t: int, M: int, dtype) -> tuple[schedule.Lane, ...]:
    """Returns those of both directions, or of one where half of M rows is no whole number of tiles."""
    return schedule.ring(t, M, 2 if M % (2 * _tile(dtype)) == 0 else 1)


def _shard(rank, offset: int, t: int, M: int, lane: schedule.Lane | None = None):
    """Returns which rows of the whole belong to the shard at this offset, or to one lane of it."""
    start, rows = (lane.start, lane.rows) if lane else (0, M)
    return pl.ds(pl.multiple_of(jax.lax.rem(rank + offset, t) * M + start, rows), rows)


def _tile(dtype) -> int:
    """Returns of how many rows a tile in memory is."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def _block(size: int, multiple: int) -> int:
    """Returns the largest divisor of the size, up to BLOCK, that is such a multiple."""
    return max(n for n in range(multiple, min(size, BLOCK) + 1, multiple) if size % n == 0)

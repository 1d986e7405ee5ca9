"""Fused on one host's Hopper GPUs: transfers by TMA over NVLink, hidden behind the matmul's tiles.

`hopper.py` has the two kernels and why they are correct. Here is what each of the four operations makes of
them, and where they refuse: any GPU but Hopper with NVLink, several processes, dtypes but bfloat16, shapes
that no tile divides, a shard_map that leaves an axis to the compiler, and, unless named, where the plain form
is faster, measured or predicted.

    forward of all_gather_matmul       gather_matmul, all weights in one kernel
    backward                           matmul_scatter over all (dy, w.T), gathering x beside it; then each dw
    forward of matmul_reduce_scatter   matmul_scatter
    backward                           gather_matmul of dout and w.T, keeping the gathered dout; then dw

`mosaic_gpu_adds.py` makes them of the same kernels, with another way to add up in matmul_scatter.

Weights are never transposed in memory, nor concatenated: the tensor cores read either layout, and a tile's
columns are of one weight. The matmuls that give dw take the gathered matrix and are XLA's.

What is to be hidden, and what it should take on 2 H200s at 700 TFLOP/s and 400 GB/s each way. 132 tiles of
128 x 256 are computed at a time; at K = 4096 a wave of them takes 51 µs. 20 µs are for the start, where all
devices wait for each other. The plain form is taken to transfer at 330 GB/s, then to multiply. Predicted, by
`tiles.predict`; measured is in docs/results.md.

    rows x contracted x columns    GFLOP   MB sent   transfer   waves      fused     plain   ratio
    8192 x 4096 x 6144               206      33.6      84 µs    5.8: 6     324 µs    411 µs    1.27
    8192 x 4096 x 14336              481      33.6      84 µs   13.6: 14    729 µs    804 µs    1.10
    16384 x 4096 x 28672            1924      67.1     168 µs   54.3: 55   2804 µs   2967 µs    1.06
    8192 x 6144 -> 4096              206      33.6      84 µs    7.8: 8     324 µs    411 µs    1.27
    8192 x 14336 -> 4096             481      33.6      84 µs    7.8: 8     729 µs    804 µs    1.10

A backward pass sends as much (of a reduce-scatter) or twice as much (of a gather, for x travels again beside
dx), hidden behind a matmul of the same size; the matmuls for dw come after it.

Beside its results a gather takes [t·M, K] for what arrives, a scatter [(t-1)·M, N] for what leaves and
[(t-2)·M, N] for what arrives.

A mesh whose devices are not in the order of their ids is refused by JAX itself, when a program is lowered.
"""

import jax

from pallas_kernels import dispatch
from pallas_kernels.collective_matmul import hopper
from pallas_kernels.collective_matmul.tiles import Problem, Tiles, choose, predict
from pallas_kernels.dot import dot
from pallas_kernels.hopper_tiles import hopper_device
from pallas_kernels.varying import mark, unmark

HOPPER = {"least": (9, 0), "below": (10, 0)}

# Lowered once for all layers of a program that call them alike: Mosaic would compile the kernel for each.
_static = "tiles", "ctas", "axis_name", "transposed"
_gather_matmul = jax.jit(hopper.gather_matmul, static_argnames=(*_static, "keep"))
_matmul_scatter = jax.jit(hopper.matmul_scatter, static_argnames=(*_static, "adds"))


def all_gather_matmul(x_MK, weights, *, axis_name, **options):
    """As `collective_matmul` describes it. options: of all four, see `_plan`."""
    columns = tuple(w.shape[1] for w in weights)
    problem = _problem("gather", x_MK, axis_name, len(x_MK), (x_MK.shape[1],), columns)
    plan = _plan(problem, **options)
    x, *ws = unmark(x_MK, *weights)
    ys, _ = _gather_matmul(x, ws, *plan, axis_name=axis_name)
    return mark(ys, x_MK, *weights)


def all_gather_matmul_backward(x_MK, weights, dys, *, axis_name, adds=False, **options):
    contracted = tuple(dy.shape[1] for dy in dys)
    M, K = x_MK.shape
    problem = _problem("scatter_transposed", x_MK, axis_name, M, contracted, (K,), gathers=K)
    plan = _plan(problem, **options)
    pairs = list(zip(unmark(*dys), unmark(*weights), strict=True))
    (x,) = unmark(x_MK)
    results = _matmul_scatter(pairs, *plan, axis_name=axis_name, transposed=True, gather=x, adds=adds)
    dx_MK, x_AK = mark(results, x_MK, *weights, *dys)
    return dx_MK, tuple(dot(x_AK, dy_AN, 0, 0) for dy_AN in dys)


def matmul_reduce_scatter(y_AK, w_KN, *, axis_name, adds=False, **options):
    M = len(y_AK) // jax.lax.axis_size(axis_name)
    problem = _problem("scatter", y_AK, axis_name, M, (y_AK.shape[1],), (w_KN.shape[1],))
    plan = _plan(problem, **options)
    out_MN, _ = _matmul_scatter([unmark(y_AK, w_KN)], *plan, axis_name=axis_name, adds=adds)
    return mark((out_MN,), y_AK, w_KN)[0]


def matmul_reduce_scatter_backward(y_AK, w_KN, dout_MN, *, axis_name, **options):
    M, N = dout_MN.shape
    problem = _problem("gather_transposed", dout_MN, axis_name, M, (N,), (len(w_KN),))
    plan = _plan(problem, **options)
    dout, w = unmark(dout_MN, w_KN)
    (dy_AK,), dout_AN = _gather_matmul(dout, (w,), *plan, axis_name=axis_name, transposed=True, keep=True)
    dy_AK, dout_AN = mark((dy_AK, dout_AN), y_AK, w_KN, dout_MN)
    return dy_AK, dot(y_AK, dout_AN, 0, 0)


def _problem(operation: str, like, axis_name, rows, contracted, columns, gathers=0) -> Problem:
    shards = jax.lax.axis_size(axis_name)
    gathers = gathers if shards > 1 else 0
    return Problem(operation, shards, rows, contracted, columns, str(like.dtype), gathers)


def _plan(
    problem: Problem,
    *,
    platform: str = "gpu",
    tiles: Tiles | None = None,
    named: bool = False,
) -> tuple[Tiles, int]:
    """Returns the tiles and the number of thread blocks: one on each SM.

    platform: where it will run. tiles: None chooses them. named: run even where the plain form is expected
    to be faster, as with given tiles.

    Raises:
      Unsupported: the kernel cannot run, or is not expected to pay.
    """
    dispatch.require_nvidia(platform, **HOPPER)
    dispatch.require_nvlink(platform)
    dispatch.require_one_process()
    _require_every_axis()
    if problem.dtype != "bfloat16":
        raise dispatch.Unsupported(f"multiplies bfloat16, found {problem.dtype}")
    if problem.shards > 8:
        raise dispatch.Unsupported(f"has at most 8 shards on an axis, found {problem.shards}")
    if tiles is not None:
        problem.check(tiles)
        return tiles, hopper_device()[1]
    return tiles_for(problem, named)


def tiles_for(problem: Problem, named: bool) -> tuple[Tiles, int]:
    """Returns the tiles and the number of thread blocks.

    Raises:
      Unsupported: no tiles divide the shape or, unless `named`, the plain form is faster.
    """
    kind, sms = hopper_device()
    tiles, faster = choose(problem, kind, sms)
    fused, plain = predict(problem, tiles, sms)
    if not named and faster is False:
        raise dispatch.Unsupported(f"measured slower than the plain form at {problem.key}")
    if not named and faster is None and fused >= plain:
        raise dispatch.Unsupported(
            f"expected to be slower than the plain form at {problem.key}: {1e6 * fused:.0f} µs against "
            f"{1e6 * plain:.0f} µs"
        )
    return tiles, sms


def _require_every_axis() -> None:
    """Raises Unsupported where the compiler still splits arrays over an axis: it cannot split a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)
    if split := [name for name in sizes if name not in mesh.manual_axes and sizes[name] > 1]:
        raise dispatch.Unsupported(f"needs a shard_map over every axis of the mesh, not without {split}")

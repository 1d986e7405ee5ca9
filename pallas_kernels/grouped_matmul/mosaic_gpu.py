"""Grouped matmuls on Hopper: persistent kernels of Mosaic GPU on the ring that the fused collectives run on.

`hopper.py` has the two kernels. They refuse any GPU but Hopper, dtypes but bfloat16, rows that 8 does not
divide, columns that no tile divides and, unless named, shapes for which the table of tiles does not say that
they are the fastest way.

Predicted on an H200 whose dense products sustain 690 TFLOP/s, for 131,072 rows of 128 groups of random sizes
(1,024 in the mean):

    product        GFLOP   tiles   steps of each   waste of rows   a tile's start and end   TFLOP/s   of dense
    2,048 → 1,536    825   6,500              32            3.3 %                     3 %       645       0.93
    768 → 2,048      412   8,700              12            3.3 %                     8 %       615       0.89
    1,536 → 2,048    825   8,700              24            3.3 %                     4 %       640       0.93
    2,048 → 768      412   3,250              32            3.3 %                     3 %       640       0.93
    sum 2,048 × 1,536    825  12,300        16.6            3.7 %                     6 %       625       0.90
    the same, into float32, reads and writes 3.2 GB, 0.8 of its 1.3 ms: behind the products, if L2 lets it
    sum 768 × 2,048      412   6,150        16.6            3.7 %                     6 %       625       0.90

The operands of tiles of 128 × 256 are 48 KB a step of 0.8 µs and SM: 8 TB/s from the L2 cache, which is about
all it has; pairs that share their rows read 6.7, pairs that share columns 5.3, and wait for each other. A
tile's end is some 2 µs in which the tensor cores do nothing, of 12 to 29 a tile: stored late, 0.5. At a clock
that power does not hold down that is 5 % of the products of 32 steps, 12 % of those of 12 and 9 % of the
sums; under a power cap half as much. Of the memory they read 1.3 GB and write 0.4: 0.4 of 1.3 ms.
The table of tiles is three small kernels of XLA, the groups' bounds are one, 3 µs each.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import hopper
from pallas_kernels.grouped_matmul.hopper_tiles import Problem, Tiles, choose
from pallas_kernels.hopper_tiles import hopper_device
from pallas_kernels.varying import mark, unmark

HOPPER = {"least": (9, 0), "below": (10, 0)}

# Lowered once for all layers of a program that call them alike: Mosaic would compile the kernel for each.
_grouped_matmul = jax.jit(hopper.grouped_matmul, static_argnames=("tiles", "ctas", "transposed"))
_grouped_matmul_float8 = jax.jit(
    hopper.grouped_matmul_float8, static_argnames=("tiles", "ctas", "dtype", "exact")
)
_grouped_outer = jax.jit(hopper.grouped_outer, static_argnames=("tiles", "ctas", "dtype"))


def grouped_matmul(x_RI, w, sizes_E, *, transposed: bool, **options) -> jax.Array:
    """Returns [R, O]; see `grouped_matmul` of the package. options: of both, see `_plan`."""
    name = "matmul_transposed" if transposed else "matmul"
    problem = Problem(name, len(w), *x_RI.shape, w.shape[1 if transposed else 2])
    plan = _plan(problem, x_RI.dtype, **options)
    y_RO = _grouped_matmul(*unmark(x_RI, w, sizes_E), *plan, transposed=transposed)
    return mark((y_RO,), x_RI, w, sizes_E)[0]


def grouped_matmul_float8(x8_RI, w8_EOI, scales_E, sizes_E, *, dtype, exact: bool, **options) -> jax.Array:
    """Returns [R, O]; see `grouped_matmul_float8` of the package."""
    problem = Problem(f"float8{'_exact' * exact}", len(w8_EOI), *x8_RI.shape, w8_EOI.shape[1])
    plan = _plan(problem, x8_RI.dtype, named=True, **options)  # no other way is faster
    if jnp.dtype(dtype).itemsize != 2:
        raise dispatch.Unsupported(f"results of float8 have 2 bytes, asked for {jnp.dtype(dtype)}")
    operands = x8_RI, w8_EOI, scales_E, sizes_E
    y_RO = _grouped_matmul_float8(*unmark(*operands), *plan, dtype=jnp.dtype(dtype), exact=exact)
    return mark((y_RO,), *operands)[0]


def grouped_outer(x_RI, y_RO, sizes_E, into, *, dtype, **options) -> jax.Array:
    """Returns [E, I, O]; see `grouped_outer` of the package."""
    dtype = jnp.dtype(dtype)
    name = "outer" if dtype.itemsize == 2 else "outer_float32" if into is None else "outer_into"
    problem = Problem(name, len(sizes_E), *x_RI.shape, y_RO.shape[1])
    plan = _plan(problem, x_RI.dtype, **options)
    operands = (x_RI, y_RO, sizes_E) if into is None else (x_RI, y_RO, sizes_E, into)
    x, y, sizes, *sums = unmark(*operands)
    return mark((_grouped_outer(x, y, sizes, *sums or [None], *plan, dtype=dtype),), *operands)[0]


def _plan(
    problem: Problem, dtype, *, platform: str = "gpu", tiles: Tiles | None = None, named: bool = False
) -> tuple[Tiles, int]:
    """Returns the tiles and the number of thread blocks: one on each SM.

    platform: where it will run. tiles: None chooses them. named: run even where it is not known to be the
    fastest, as with given tiles.

    Raises:
      Unsupported: the kernel cannot run, or is not known to pay.
    """
    dispatch.require_nvidia(platform, **HOPPER)
    if dtype != jnp.bfloat16 and not problem.float8:
        raise dispatch.Unsupported(f"multiplies bfloat16, found {dtype}")
    kind, sms = hopper_device()
    if tiles is not None:
        problem.check(tiles)
        return tiles, sms
    tiles, faster = choose(problem, kind, sms)
    if not (named or faster):
        found = "measured slower" if faster is False else "not measured to be faster"
        raise dispatch.Unsupported(f"{found} than others at {problem.key} on {kind}")
    return tiles, sms

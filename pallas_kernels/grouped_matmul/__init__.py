"""Grouped matmul: rows that lie by group, each group's with a matrix of its own, as experts have them.

Shapes: R rows, E groups (experts), I columns of the rows, O of the results. Group e's `sizes_E[e]` rows lie
behind those of e-1. Rows behind the last group belong to none: they are in the result too, where they hold
anything, and nothing reads them in an operand, be they NaN.

An implementation is a module of this folder with two functions, which know nothing of differentiation:

    grouped_matmul(x_RI, w, sizes_E, *, transposed) -> y_RO of x's dtype; w is [E, O, I] where `transposed`
    grouped_outer(x_RI, y_RO, sizes_E, into, *, dtype) -> [E, I, O] of `dtype`, added to `into` if given

One that cannot run here raises `dispatch.Unsupported` while it is traced, and the next one is tried. The
gradient of the rows is the first function with the matrices turned, that of the matrices the second.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation, on_nvidia, resolve_platform, triton_before_xla
from pallas_kernels.grouped_matmul import stand_in
from pallas_kernels.varying import vary_alike

__all__ = ["OPERATION", "STAND_IN", "automatic", "grouped_matmul", "grouped_outer"]

STAND_IN = "stand_in"
"""What takes the place of kernels in a plan without their GPU."""

DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def automatic(platform: str | None = None) -> tuple[str, ...]:
    """Returns the implementations that are tried where none is named, the first first.

    That for Hopper leaves what is not known to be fastest with it to the others.
    """
    if resolve_platform(platform) == "tpu":
        return ("ragged", "xla")
    return ("mosaic_gpu", *triton_before_xla(platform)) if on_nvidia(platform) else ("xla",)


OPERATION = Operation(
    __name__,
    {
        "mosaic_gpu": Implementation(takes=("platform", "named")),
        "triton": Implementation(takes=("platform",)),
        "ragged": Implementation(takes=("platform",)),
        "xla": Implementation(),
        "reference": Implementation(),
    },
    automatic,
)


def grouped_matmul(
    x_RI: jax.Array,
    w: jax.Array,
    sizes_E: jax.Array,
    transposed: bool = False,
    implementation: str | None = None,
    *,
    platform: str | None = None,
) -> jax.Array:
    """Returns each row times the matrix of its group, [R, O] of x's dtype, accumulated in float32.

    Arrays are taken as they lie on one device: on a mesh, call it within `jax.shard_map`. Differentiable in
    x and w: d x has the rows behind the last group as the result has them, unspecified.

    Args:
      x_RI: [R, I], float32 or bfloat16.
      w: [E, I, O] of x's dtype, or [E, O, I] where `transposed`.
      sizes_E: [E] int32, rows of each group, at most R in all; on the device, no one waits for them.
      implementation: one of `OPERATION.names`; None tries those of `automatic`.
      platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.

    Raises:
      ValueError: shapes or dtypes do not fit together, or no implementation has the name.
      dispatch.Unsupported: the named implementation, or every one, refuses; with the reasons.

    Source: grouped experts without capacity or padding: Gale et al. 2022 (arXiv:2211.15841).
    """
    contracted = 2 if transposed else 1
    if x_RI.ndim != 2 or w.ndim != 3 or w.shape[contracted] != x_RI.shape[1] or sizes_E.shape != w.shape[:1]:
        wanted = "[E, O, I]" if transposed else "[E, I, O]"
        raise ValueError(
            f"grouped_matmul: shapes do not fit: x [R, I] {x_RI.shape}, w {wanted} {w.shape}, sizes [E] "
            f"{sizes_E.shape}"
        )
    _check("grouped_matmul", x_RI, w, sizes_E)
    return _product(vary_alike(x_RI, w, sizes_E), transposed, implementation, platform)


def grouped_outer(
    x_RI: jax.Array,
    y_RO: jax.Array,
    sizes_E: jax.Array,
    into: jax.Array | None = None,
    dtype=None,
    implementation: str | None = None,
    *,
    platform: str | None = None,
) -> jax.Array:
    """Returns each group's sum over its rows of x ⊗ y, [E, I, O]: what a weight's gradient is.

    Summed in float32 and in the order of the rows, so that it repeats to the bit. A group without rows has
    zeros. Not differentiable.

    Args:
      x_RI, y_RO: [R, I] and [R, O], both float32 or both bfloat16.
      sizes_E: as for `grouped_matmul`.
      into: float32 [E, I, O], to which the sums are added, in its memory where it is donated or not needed
        again; or None.
      dtype: of the result, by default x's, or float32 with `into`, which allows no other.
      implementation, platform: as for `grouped_matmul`.

    Raises: as `grouped_matmul`.
    """
    shape = (*sizes_E.shape, *x_RI.shape[1:], *y_RO.shape[1:])
    if x_RI.ndim != 2 or y_RO.ndim != 2 or len(x_RI) != len(y_RO) or len(shape) != 3:
        raise ValueError(
            f"grouped_outer: shapes do not fit: x [R, I] {x_RI.shape}, y [R, O] {y_RO.shape}, sizes [E] "
            f"{sizes_E.shape}"
        )
    _check("grouped_outer", x_RI, y_RO, sizes_E)
    dtype = jnp.dtype(dtype or (x_RI.dtype if into is None else jnp.float32))
    if into is not None and (into.shape, into.dtype, dtype) != (shape, jnp.float32, jnp.float32):
        raise ValueError(
            f"grouped_outer: sums are added to float32{list(shape)} and are of that dtype, got "
            f"{into.dtype}{list(into.shape)} and dtype {dtype}"
        )
    arrays = (x_RI, y_RO, sizes_E) if into is None else (x_RI, y_RO, sizes_E, into)
    x_RI, y_RO, sizes_E, *into_ = vary_alike(*arrays)
    return _outer(x_RI, y_RO, sizes_E, *into_ or [None], dtype, implementation, platform)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _product(operands: tuple, transposed: bool, implementation: str | None, platform: str | None):
    if implementation == STAND_IN:
        return stand_in.grouped_matmul(*operands, transposed=transposed)
    how = {"implementation": implementation, "platform": platform}
    return OPERATION.run(*operands, transposed=transposed, **how)


def _forward(operands, transposed, implementation, platform):
    return _product(operands, transposed, implementation, platform), operands


def _backward(transposed, implementation, platform, operands, dy_RO):
    x_RI, w, sizes_E = operands
    dx_RI = _product((dy_RO, w, sizes_E), not transposed, implementation, platform)
    pair = (dy_RO, x_RI) if transposed else (x_RI, dy_RO)
    return ((dx_RI, _outer(*pair, sizes_E, None, w.dtype, implementation, platform), None),)


_product.defvjp(_forward, _backward)


def _outer(x_RI, y_RO, sizes_E, into, dtype, implementation, platform):
    if implementation == STAND_IN:
        return stand_in.grouped_outer(x_RI, y_RO, sizes_E, into, dtype=dtype)
    how = {"implementation": implementation, "platform": platform, "function": "grouped_outer"}
    return OPERATION.run(x_RI, y_RO, sizes_E, into, dtype=dtype, **how)


def _check(function: str, a: jax.Array, b: jax.Array, sizes_E: jax.Array) -> None:
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise ValueError(
            f"{function}: operands are both float32 or both bfloat16, got {a.dtype} and {b.dtype}"
        )
    if sizes_E.dtype != jnp.int32:
        raise ValueError(f"{function}: sizes are int32, got {sizes_E.dtype}")
    if not len(a) or not len(sizes_E):
        raise ValueError(f"{function}: needs a row and a group, got {len(a)} rows and {len(sizes_E)} groups")

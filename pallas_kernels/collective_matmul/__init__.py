"""Collective matmul: a matmul with the all-gather before it or the reduce-scatter behind it, overlapped.

Shapes, all of one shard: t shards on the mesh axis, M rows (flattened tokens), K contracted, N columns;
A = t·M rows of all shards. `all_gather_matmul` takes [M, K] to [A, N] and `matmul_reduce_scatter` [A, K] to
[M, N]. Each one's backward pass is the other, along with the gradient of the weights.

An implementation is a module of this folder with four functions. They take and give one dtype, accumulate
each matmul in float32, and know nothing of differentiation:

    all_gather_matmul(x_MK, weights, *, axis_name) -> tuple of y_AN, one for each w_KN of `weights`
    all_gather_matmul_backward(x_MK, weights, dys, *, axis_name) -> dx_MK, tuple of dw_KN
        dx_MK: this shard's rows of the sum over shards and weights of dy_AN @ w_KN.T
        dw_KN: (x of all shards)_AK.T @ dy_AN; x is gathered again, which is cheaper to hide than to keep
    matmul_reduce_scatter(y_AK, w_KN, *, axis_name) -> out_MN
    matmul_reduce_scatter_backward(y_AK, w_KN, dout_MN, *, axis_name) -> dy_AK, dw_KN
        with dout of all shards gathered once: dy_AK = dout_AN @ w_KN.T, dw_KN = y_AK.T @ dout_AN

A function that cannot run here raises `dispatch.Unsupported` while it is traced, and the next implementation
is tried. The forward and the backward pass are chosen apart from each other. What sums over other mesh axes a
gradient needs, shard_map adds.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.varying import vary_alike

__all__ = ["OPERATION", "WRITES_TO_PEERS", "all_gather_matmul", "automatic", "matmul_reduce_scatter"]


def automatic(platform: str | None = None, fused: bool = False) -> tuple[str, ...]:
    """Returns the implementations that are tried where none is named, the first first. fused: or "fused" is.

    A CPU has no transfers to hide behind matmuls. On 2 H200s the ring took longer than the plain form in
    most shapes (docs/results.md): the matmuls of its parts are slower than the whole one. The fused kernels
    are faster there but have to be asked for: a program with them is compiled otherwise, CUDA loads all code
    at its start, and one that waits for a signal that never comes holds all devices.
    """
    portable = ("ring", "reference") if dispatch.resolve_platform(platform) == "tpu" else ("reference",)
    return ("mosaic_gpu", *portable) if fused else portable


OPERATION = Operation(
    __name__,
    {
        "mosaic_gpu": Implementation(takes=("platform", "named")),
        # adds up in the memory of the result: less exactly, and in an order that may differ from run to run
        "mosaic_gpu_adds": Implementation(takes=("platform", "named")),
        "mosaic_tpu": Implementation(takes=("platform",)),
        "ring": Implementation(),
        "ring_bidirectional": Implementation(module="ring", options={"directions": 2}),
        "reference": Implementation(),
    },
    automatic,
)

WRITES_TO_PEERS = ("fused", "mosaic_gpu", "mosaic_gpu_adds")
"""What may address the memory of other GPUs; how such a program has to be compiled is said in `hopper`."""


def all_gather_matmul(
    x_MK: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    axis_name: str,
    implementation: str | None = None,
    backward: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the product of the rows of all shards with each matrix of this shard.

    To be called within `jax.shard_map`, of any mesh that has the axis; other axes take no part. The matrices
    share one gather of x. Matmuls accumulate in float32. Differentiable in x and in the weights.

    Args:
      x_MK: [M, K] this shard's rows, float32 or bfloat16.
      weights: matrices [K, N_i] of x's dtype, each this shard's columns.
      axis_name: the mesh axis over which rows and columns are split.
      implementation: one of `OPERATION.names`; None is the first of `automatic` that can run; "fused" tries
        kernels that write to peers before these, which run where they are expected to be faster. How such a
        program has to be compiled is said in `hopper`.
      backward: the same for the backward pass; None follows `implementation`.
      platform: "cpu", "gpu" or "tpu", where the computation will run; None is JAX's default backend.

    Returns:
      A tuple of [t·M, N_i] of x's dtype, the rows of shard 0 first.

    Raises:
      ValueError: shapes or dtypes do not fit together, or no implementation has the name.
      dispatch.Unsupported: the named implementation, or every one, refuses; with the reasons.

    Source: Wang et al. 2023 (doi:10.1145/3567955.3567959).
    """
    weights = tuple(weights)
    fits = x_MK.ndim == 2 and weights and all(w.ndim == 2 and len(w) == x_MK.shape[1] for w in weights)
    if not fits:
        raise ValueError(
            f"all_gather_matmul: shapes do not fit: x {x_MK.shape}, weights {[w.shape for w in weights]}"
        )
    _check_dtypes("all_gather_matmul", x_MK, *weights)
    x_MK, *weights = vary_alike(x_MK, *weights)
    operands, backward = (x_MK, tuple(weights)), backward or implementation
    return _differentiable("all_gather_matmul", operands, axis_name, implementation, backward, platform)


def matmul_reduce_scatter(
    y_MK: jax.Array,
    w_KN: jax.Array,
    *,
    axis_name: str,
    implementation: str | None = None,
    backward: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Returns this shard's rows of the matmuls of all shards, summed over them.

    To be called within `jax.shard_map`, of any mesh that has the axis; other axes take no part. Matmuls
    accumulate in float32; what travels between shards is of the operands' dtype and is rounded to it at each
    addition, as a reduce-scatter of the matmul would be; by "mosaic_gpu" where it leaves a shard and at the
    last addition, the others being made in float32. Differentiable in both operands.

    Args:
      y_MK: [M, K] all rows, this shard's part of what is contracted; float32 or bfloat16. t divides M.
      w_KN: [K, N] of y's dtype, this shard's rows.
      axis_name, implementation, backward, platform: as for `all_gather_matmul`.

    Returns:
      [M / t, N] of y's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit together, t does not divide M, or no implementation has the
        name.
      dispatch.Unsupported: the named implementation, or every one, refuses; with the reasons.

    Source: Wang et al. 2023 (doi:10.1145/3567955.3567959).
    """
    if y_MK.ndim != 2 or w_KN.ndim != 2 or y_MK.shape[1] != len(w_KN):
        raise ValueError(f"matmul_reduce_scatter: shapes do not fit: y {y_MK.shape}, w {w_KN.shape}")
    _check_dtypes("matmul_reduce_scatter", y_MK, w_KN)
    t = jax.lax.axis_size(axis_name)
    if len(y_MK) % t:
        raise ValueError(
            f"matmul_reduce_scatter: {len(y_MK)} rows do not divide by the {t} shards of axis {axis_name!r}"
        )
    operands, backward = vary_alike(y_MK, w_KN), backward or implementation
    return _differentiable("matmul_reduce_scatter", operands, axis_name, implementation, backward, platform)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3, 4, 5))
def _differentiable(operation: str, operands: tuple, axis_name, implementation, backward, platform):
    return _run(operation, axis_name, implementation, platform, *operands)


def _forward(operation, operands, axis_name, implementation, backward, platform):
    return _differentiable(operation, operands, axis_name, implementation, backward, platform), operands


def _backward(operation, axis_name, implementation, backward, platform, operands, cotangents):
    return (_run(f"{operation}_backward", axis_name, backward, platform, *operands, cotangents),)


_differentiable.defvjp(_forward, _backward)


def _run(function: str, axis_name: str, implementation: str | None, platform: str | None, *arguments):
    """Calls one of the four functions of the named implementation, or of the first that can run."""
    fused = implementation == "fused"
    return OPERATION.run(
        *arguments,
        implementation=None if fused else implementation,
        platform=platform,
        function=function,
        facts={"fused": fused},
        axis_name=axis_name,
    )


def _check_dtypes(operation: str, *arrays: jax.Array) -> None:
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        raise ValueError(
            f"{operation}: operands are all float32 or all bfloat16, got {[str(x.dtype) for x in arrays]}"
        )

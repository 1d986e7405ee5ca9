"""The cast of a scaled matrix to float8, as it is and transposed: float8 is multiplied along rows alone."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import STAND_IN_SUFFIX, Implementation, Operation, on_nvidia

__all__ = ["OPERATION", "STAND_IN", "TIMED", "cast_transpose"]

TIMED = (9, 0), (10, 0)
"""Compute capabilities, from the first to below the second, of GPUs of which one has timed the kernel."""


def _automatic(platform: str) -> tuple[str, ...]:
    """Returns the order on a platform. On an H200 steps are 1.03 to 1.09 times as fast by the kernel. Later
    GPUs than Hopper may multiply float8 along columns, too, and need no transposes; none was timed."""
    return ("triton", "xla") if on_nvidia(platform, *TIMED) else ("xla",)


STAND_IN = f"triton{STAND_IN_SUFFIX}"
"""What has the memory of "triton", for programs that are compiled and not run."""

OPERATION = Operation(
    __name__,
    {
        "triton": Implementation(takes=("platform",)),
        "xla": Implementation(),
        "reference": Implementation(),
    },
    _automatic,
    stand_ins={STAND_IN: Implementation(module="stand_in")},
)

DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def cast_transpose(
    x_RC: jax.Array,
    up: jax.Array,
    dtype: jnp.dtype,
    *,
    implementation: str | Sequence[str] | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x · up in a float8 dtype, as it is [R, C] and transposed [C, R]; it is not differentiated.

    The product is float32's, and is rounded once, so that both results have the same numbers, whatever
    implementation makes them. Arrays are taken as they lie on one device: on a mesh, call it within
    `jax.shard_map`.

    Args:
      x_RC: [R, C] of a float dtype.
      up: the scale, float32, a scalar. Products beyond the dtype's largest number are the caller's to avoid.
      dtype: float8_e4m3fn or float8_e5m2.
      implementation: one of `OPERATION.names`, or `STAND_IN`, or several, of which the first that can runs;
        None takes those of `automatic`.
      platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.

    Raises:
      ValueError: shapes or dtypes do not fit, or no implementation has the name.
      dispatch.Unsupported: the named implementation refuses; `STAND_IN` does where the kernel would.

    Source: Micikevicius et al. 2022 (arXiv:2209.05433).
    """
    if x_RC.ndim != 2 or up.shape:
        raise ValueError(f"cast_transpose: x is [R, C] and the scale a scalar, got {x_RC.shape}, {up.shape}")
    if not jnp.issubdtype(x_RC.dtype, jnp.floating) or up.dtype != jnp.float32:
        raise ValueError(
            f"cast_transpose: x is of a float dtype and the scale float32, got {x_RC.dtype} and {up.dtype}"
        )
    if dtype not in DTYPES:
        names = " and ".join(jnp.dtype(each).name for each in DTYPES)
        raise ValueError(f"cast_transpose: casts to {names}, not to {jnp.dtype(dtype).name}")
    return OPERATION.run(x_RC, up, dtype, implementation=implementation, platform=platform)

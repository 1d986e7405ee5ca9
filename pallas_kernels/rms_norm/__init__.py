"""RMSNorm: alone, at the start of a residual branch, or of heads that are then rotated (RoPE)."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import STAND_IN_SUFFIX, Implementation, Operation, triton_before_xla
from pallas_kernels.rms_norm.xla import rotate

__all__ = [
    "OPERATION",
    "PARTITIONED",
    "STAND_IN",
    "rms_norm",
    "rms_norm_residual",
    "rms_norm_rotary",
    "rotate",
]

STAND_IN = f"triton{STAND_IN_SUFFIX}"
"""What has the memory of "triton", for programs that are compiled and not run; where it refuses, "xla"."""

OPERATION = Operation(
    __name__,
    {
        "triton": Implementation(takes=("platform",)),
        "xla": Implementation(),
        "reference": Implementation(),
    },
    triton_before_xla,
    stand_ins={STAND_IN: Implementation(module="stand_in")},
)

PARTITIONED = "xla"
"""What XLA's partitioner can split: on a mesh of several devices the one for outside a shard_map."""


def rms_norm(
    x: jax.Array,
    scale_D: jax.Array,
    *,
    epsilon: float,
    offset: float = 0.0,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Returns x over the root of its mean square along the last dim, times scale + offset, in x's dtype.

    The arithmetic is float32. Arrays are taken as they lie on one device: a kernel is not partitioned.

    Args:
      x: [..., D].
      scale_D: [D] of any float dtype, in which its gradient comes.
      epsilon: added to the mean square, static.
      offset: added to the scale, static; 1 where weights are stored as Gemma's are.
      implementation: one of `OPERATION.names`; None takes those of `automatic`. On a mesh of several devices
        name `PARTITIONED`, or call this in a shard_map, in a plan of "triton" without a GPU `STAND_IN`.
      platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.

    Raises:
      ValueError: x and scale do not fit together, or no implementation has the name.
      dispatch.Unsupported: the named implementation refuses.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    _check("rms_norm", x, scale_D)
    return _run("rms_norm", x, scale_D, implementation, platform, epsilon=epsilon, offset=offset)


def rms_norm_residual(
    x: jax.Array,
    scale_D: jax.Array,
    *,
    epsilon: float,
    offset: float = 0.0,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x as it is, for the residual stream, and its norm, for the branch; see `rms_norm`.

    Both come of one function so that the gradients of both meet in it: what comes back along the residual
    stream is added where the norm's gradient is made, with no pass of its own.
    """
    _check("rms_norm_residual", x, scale_D)
    options = {"epsilon": epsilon, "offset": offset}
    return _run("rms_norm_residual", x, scale_D, implementation, platform, **options)


def rms_norm_rotary(
    x_BTHC: jax.Array,
    scale_C: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    epsilon: float,
    offset: float = 0.0,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Returns the norm of each head, rotated in pairs (i, i + C/2) as `rotate` does, in x's dtype.

    "xla" rounds the norm to x's dtype before it is rotated, the others do not. See `rms_norm`.

    Args:
      x_BTHC: [B, T, H, C], queries or keys.
      scale_C: [C], one for all heads.
      cos, sin: float32 [B, T, C/2], of each position's rotation; constants, without a gradient.
    """
    _check("rms_norm_rotary", x_BTHC, scale_C)
    B, T, C = *x_BTHC.shape[:2], x_BTHC.shape[-1]
    angles = (B, T, C // 2)
    if x_BTHC.ndim != 4 or C % 2 or cos.shape != angles or sin.shape != angles:
        raise ValueError(
            f"rms_norm_rotary: shapes do not fit: x [B, T, H, C] {x_BTHC.shape}, C even, takes cos and sin "
            f"[B, T, C/2], got {cos.shape} and {sin.shape}"
        )
    if {cos.dtype, sin.dtype} != {jnp.dtype(jnp.float32)}:
        raise ValueError(f"rms_norm_rotary: cos and sin are float32, got {cos.dtype} and {sin.dtype}")
    arrays = x_BTHC, scale_C, *jax.lax.stop_gradient((cos, sin))
    return _run("rms_norm_rotary", *arrays, implementation, platform, epsilon=epsilon, offset=offset)


def _run(function: str, *given, **options):
    """given: the function's arrays, implementation and platform."""
    *arrays, implementation, platform = given
    if implementation == STAND_IN:
        implementation = STAND_IN, "xla"
    how = {"implementation": implementation, "platform": platform, "function": function}
    return OPERATION.run(*arrays, **how, **options)


def _check(function: str, x: jax.Array, scale_D: jax.Array) -> None:
    if not x.ndim or scale_D.shape != x.shape[-1:]:
        raise ValueError(
            f"{function}: shapes do not fit: x {x.shape} takes a scale of {x.shape[-1:]}, got {scale_D.shape}"
        )
    for name, array in (("x", x), ("scale", scale_D)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{function}: {name} is of a float dtype, got {array.dtype}")

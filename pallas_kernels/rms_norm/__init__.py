"""A root-mean-square norm at the start of a residual branch, its backward pass joined with the residual's."""

import functools

import jax

from pallas_kernels import dispatch
from pallas_kernels.rms_norm import reference, triton

__all__ = ["rms_norm"]


def rms_norm(
    x: jax.Array,
    scale_D: jax.Array,
    *,
    epsilon: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x as it is, for the residual stream, and its norm over the last dim times scale, in x's dtype.

    Both come of one function so that the gradients of both meet in one: what comes back along the residual
    stream is added where the norm's gradient is made. The arithmetic is float32.

    Args:
      x: [..., D], as it lies on one device.
      scale_D: [D] float32; its gradient is summed in float32.
      epsilon: added to the mean square, static.
      implementation: "reference", which None takes, or "triton", which no GPU has run yet.
      platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.

    Raises:
      ValueError: no implementation has the name.
      dispatch.Unsupported: the named implementation refuses.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    platform = dispatch.resolve_platform(platform)
    implementations = {
        "triton": functools.partial(triton.rms_norm, epsilon=epsilon, platform=platform),
        "reference": functools.partial(reference.rms_norm, epsilon=epsilon),
    }
    return dispatch.run("rms_norm", implementations, ("reference",), implementation, x, scale_D)

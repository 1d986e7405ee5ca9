"""Stand-ins for the norm's Triton kernels, compiled but never run, to plan memory on a machine without a GPU.

As those of attention: calls of the same operands and results stand in the kernels' places, which cannot be
lowered without their GPU; all else is as in triton.py.
"""

import jax

from pallas_kernels.rms_norm import triton
from pallas_kernels.varying import vary_alike


def rms_norm(x: jax.Array, scale_D: jax.Array, *, epsilon: float, offset: float) -> jax.Array:
    """Returns [..., D] in the place of "triton"; a program that runs it fails. Raises Unsupported where the
    kernels would."""
    triton.require_fit(x, triton.WIDEST)
    return triton.norm(*vary_alike(x, scale_D), epsilon, offset, launch)


def rms_norm_residual(
    x: jax.Array, scale_D: jax.Array, *, epsilon: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """Returns x and [..., D], see `rms_norm`."""
    triton.require_fit(x, triton.WIDEST)
    return triton.norm_residual(*vary_alike(x, scale_D), epsilon, offset, launch)


def rms_norm_rotary(
    x_BTHC: jax.Array, scale_C: jax.Array, cos: jax.Array, sin: jax.Array, *, epsilon: float, offset: float
) -> jax.Array:
    """Returns [B, T, H, C], see `rms_norm`."""
    triton.require_fit(x_BTHC, triton.WIDEST_HEAD)
    return triton.norm_rotary(*vary_alike(x_BTHC, scale_C, cos, sin), epsilon, offset, launch)


def launch(kernel: str, arrays, numbers, outputs, **_) -> tuple[jax.Array, ...]:
    """As `triton.launch`; numbers are no operands, nor are they in its call."""
    structs = [jax.ShapeDtypeStruct(*output) for output in outputs]
    call = jax.ffi.ffi_call(f"jaxthru_stand_in_{kernel}", structs, vmap_method="sequential")
    return vary_alike(*call(*arrays), arrays[0])[: len(outputs)]

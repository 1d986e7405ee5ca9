"""Stand-in for the kernel of casts, compiled but never run, to plan memory on a machine without a GPU."""

import jax
import jax.numpy as jnp

from pallas_kernels.cast_transpose import triton


def cast_transpose(x_RC: jax.Array, up: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns [R, C] and [C, R] in the place of "triton"; a program that runs it fails. Raises Unsupported
    where the kernel would."""
    triton.require_fit(x_RC)
    call = jax.ffi.ffi_call(
        "jaxthru_stand_in_cast_transpose", triton.results(x_RC, dtype), vmap_method="sequential"
    )
    return tuple(call(x_RC, up))

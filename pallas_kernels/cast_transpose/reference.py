"""The definition."""

import jax
import jax.numpy as jnp


def cast_transpose(x_RC: jax.Array, up: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns x · up [R, C] and transposed [C, R]; see `cast_transpose` of the package."""
    return (x_RC.astype(jnp.float32) * up).astype(dtype), (x_RC.T.astype(jnp.float32) * up).astype(dtype)

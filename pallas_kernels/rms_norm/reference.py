"""The norm written out, for XLA to fuse as it sees fit."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale_D: jax.Array, *, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Returns x and its norm; see `rms_norm` of the package."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale_D, range(x.ndim - 1))
    return x, (x32 * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)

"""The norm written out, for XLA to fuse as it sees fit and to partition: it differentiates it too.

Shapes: D width, B rows, T tokens, H heads, C head_dim.
"""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale_D: jax.Array, *, epsilon: float, offset: float) -> jax.Array:
    """Returns the norm of x; see `rms_norm` of the package."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    scale = scale_D.astype(jnp.float32)
    if offset:
        scale = scale + offset
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return (x32 * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)


def rms_norm_residual(x: jax.Array, scale_D: jax.Array, **how) -> tuple[jax.Array, jax.Array]:
    """Returns x and its norm; see `rms_norm_residual` of the package."""
    return x, rms_norm(x, scale_D, **how)


def rms_norm_rotary(x_BTHC: jax.Array, scale_C: jax.Array, cos: jax.Array, sin: jax.Array, **how):
    """Returns the rotated norm of each head; see `rms_norm_rotary` of the package."""
    return rotate(rms_norm(x_BTHC, scale_C, **how), (cos, sin))


def rotate(x_BTHC: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + C/2) of each head, the pairing of published Llama weights. rotary: cosine and
    sine [B, T, C/2] of each position's rotation."""
    cos, sin = rotary[0][:, :, None, :], rotary[1][:, :, None, :]
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTHC.dtype)

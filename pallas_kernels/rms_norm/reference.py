"""The norm as its definition reads, in float32 to the end.

Shapes: D width, B rows, T tokens, H heads, C head_dim.
"""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale_D: jax.Array, *, epsilon: float, offset: float) -> jax.Array:
    """Returns the norm of x; see `rms_norm` of the package."""
    return _normed(x, scale_D, epsilon, offset).astype(x.dtype)


def rms_norm_residual(x: jax.Array, scale_D: jax.Array, **how) -> tuple[jax.Array, jax.Array]:
    """Returns x and its norm; see `rms_norm_residual` of the package."""
    return x, rms_norm(x, scale_D, **how)


def rms_norm_rotary(
    x_BTHC: jax.Array, scale_C: jax.Array, cos: jax.Array, sin: jax.Array, *, epsilon: float, offset: float
) -> jax.Array:
    """Returns the rotated norm of each head; see `rms_norm_rotary` of the package."""
    normed_BTHC = _normed(x_BTHC, scale_C, epsilon, offset)
    C = x_BTHC.shape[-1]
    # Half of the dims are real parts, the other half imaginary ones: a rotation is a product.
    number = jax.lax.complex(normed_BTHC[..., : C // 2], normed_BTHC[..., C // 2 :])
    number *= jax.lax.complex(cos, sin)[:, :, None, :]
    return jnp.concatenate([number.real, number.imag], -1).astype(x_BTHC.dtype)


def _normed(x, scale_D, epsilon, offset):
    """Returns the norm in float32."""
    x = x.astype(jnp.float32)
    root = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon)
    scale = scale_D.astype(jnp.float32) + offset
    return x / root * scale.reshape((1,) * (x.ndim - 1) + scale.shape)
